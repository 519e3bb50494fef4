"""A drafter computed anew from an export's tensors and config alone, as an engine would, to compare with.

Shares no code with the drafter: no cache, no masks, one position after the other, by the definition.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from osprey.modeling import OspreyDrafter
from osprey.serving.layout import check_tensors, from_vllm_tap_ids

VERIFIED, DRAFTED = 9, 3  # positions with true contexts, and draft steps behind them, that are compared
TOLERANCE = 1e-3  # of the largest logit; float noise is below 1e-5 of it, a swapped norm or half is of its size


class RebuiltDrafter:
    """`contexts` of taps, `states` of the last position, and `logits`, from the files in `folder`."""

    def __init__(self, folder: Path):
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = load_file(folder / "model.safetensors")
        self.tensors = {name: t.float() if t.is_floating_point() else t for name, t in stored.items()}
        swapped = self.config.get("swap_h_and_emb", False)
        if not swapped:
            check_tensors(self.config, {name: tuple(tensor.shape) for name, tensor in stored.items()})
        self.norms = ("input_layernorm", "hidden_norm") if swapped else ("ctx_norm", "input_layernorm")
        eagle = self.config.get("eagle_config") or {}
        # The published EAGLE-3 format counts taps as we do, vLLM's own key counts the embedding as 0.
        self.target_layer_ids = eagle.get("eagle_aux_hidden_state_layer_ids") or from_vllm_tap_ids(
            self.config["eagle_aux_hidden_state_layer_ids"]
        )
        keys = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
        rope = ("rope_parameters", "rope_theta", "rope_scaling")
        shape = {key: self.config[key] for key in (*keys, *rope) if self.config.get(key) is not None}
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**shape))

    def layer(self, i: int) -> Callable[[str], Tensor | None]:
        prefix = f"layers.{i}." if f"layers.{i}.mlp.up_proj.weight" in self.tensors else "midlayer."
        return lambda name: self.tensors.get(prefix + name)

    def norm(self, weight: Tensor, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * weight

    def contexts(self, taps: Tensor) -> Tensor:
        return taps @ self.tensors["fc.weight"].T  # [T, 3H] to [T, h]

    def rotate(self, heads: Tensor) -> Tensor:
        """`heads` (`[n, T, head_dim]`) turned by their positions, 0 to T - 1."""
        cos, sin = self.rotary(heads, torch.arange(heads.shape[1])[None])  # [1, T, head_dim]
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat([-second, first], dim=-1) * sin

    def states(self, tokens: Tensor, contexts: Tensor) -> Tensor:
        """Last layer's output before the final norm, `[T, h]`, of tokens `[T]` against contexts `[T, h]`."""
        c, head_dim = self.config, self.config["head_dim"]
        groups = c["num_attention_heads"] // c["num_key_value_heads"]
        ctx_norm, x_norm = self.norms
        x = self.tensors["embed_tokens.weight"][tokens]
        for i in range(c["num_hidden_layers"]):
            of = self.layer(i)

            def linear(name: str, inputs: Tensor, of=of) -> Tensor:
                return F.linear(inputs, of(f"{name}.weight"), of(f"{name}.bias"))

            widened = torch.cat(
                [self.norm(of(f"{ctx_norm}.weight"), contexts), self.norm(of(f"{x_norm}.weight"), x)], dim=-1
            )  # [T, 2h]
            query, key, value = (
                linear(f"self_attn.{kind}_proj", widened).unflatten(-1, (-1, head_dim)).transpose(0, 1)
                for kind in "qkv"
            )  # [heads or kv heads, T, head_dim]
            if of("self_attn.q_norm.weight") is not None:
                query = self.norm(of("self_attn.q_norm.weight"), query)
                key = self.norm(of("self_attn.k_norm.weight"), key)
            if c.get("no_rope_layers") is None or c["no_rope_layers"][i]:
                query, key = self.rotate(query), self.rotate(key)
            key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
            scores = query @ key.transpose(1, 2) * head_dim**-0.5  # [heads, T, T]
            future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
            mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
            x = x + linear("self_attn.o_proj", mixed.transpose(0, 1).flatten(1))
            inner = self.norm(of("post_attention_layernorm.weight"), x)
            x = x + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", inner)) * linear("mlp.up_proj", inner))
        return x

    def logits(self, states: Tensor) -> Tensor:
        """Scores `[V]` of states `[h]`, `-inf` outside the draft vocabulary."""
        head = self.tensors.get("lm_head.weight", self.tensors["embed_tokens.weight"])
        scores = head @ self.norm(self.tensors["norm.weight"], states)
        wide = torch.full((self.config["vocab_size"],), -torch.inf)
        if "d2t" in self.tensors:
            wide[torch.arange(len(scores)) + self.tensors["d2t"]] = scores
        else:
            limit = self.config.get("target_num_tokens") or len(scores)
            wide[:limit] = scores[:limit]
        return wide


@torch.no_grad()
def check_rebuilt(drafter: OspreyDrafter, folder: Path) -> float:
    """The largest difference between the drafter's logits and the rebuilt one's, over verified and drafted positions.

    Raises:
        ValueError: the difference is more than float noise, or the taps are others.
    """
    rebuilt = RebuiltDrafter(folder)
    config = drafter.config
    if rebuilt.target_layer_ids != list(config.target_layer_ids):
        raise ValueError(
            f"The export names the taps {rebuilt.target_layer_ids}, the drafter {config.target_layer_ids}: it is not "
            "kept; report this as a bug."
        )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.num_draftable, (VERIFIED + DRAFTED,), generator=generator)  # [T]
    taps = torch.randn(VERIFIED, 3 * config.target_hidden_size, generator=generator)  # [verified, 3H]
    ours, theirs = drafter.project_taps(taps[None]), rebuilt.contexts(taps)  # [1, t, h], [t, h]
    largest = 0.0
    for t in range(VERIFIED, VERIFIED + DRAFTED + 1):
        state = drafter.run_layers(tokens[None, :t], ours)[:, -1:]  # [1, 1, h]
        rebuilt_state = rebuilt.states(tokens[:t], theirs)[-1]  # [h]
        expected = drafter.widen_logits(drafter.draft_logits(state))[0, -1]  # [V]
        largest = max(largest, logit_difference(expected, rebuilt.logits(rebuilt_state)))
        ours, theirs = torch.cat([ours, state], dim=1), torch.cat([theirs, rebuilt_state[None]])
    return largest


def logit_difference(expected: Tensor, found: Tensor) -> float:
    """The largest difference where `expected` is finite (both `[..., V]`); `ValueError` beyond float noise."""
    finite = expected.isfinite()
    scale = expected[finite].abs().max().item()
    difference = (expected[finite] - found[finite]).abs().max().item()
    if not difference <= TOLERANCE * scale:
        raise ValueError(
            f"What was exported computes something else than the drafter (logits differ by {difference:.3g}, the "
            f"largest is {scale:.3g}): it is not kept; report this as a bug."
        )
    return difference
