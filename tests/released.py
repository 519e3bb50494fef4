"""Checkpoints in the format that the paper's authors released (DESIGN.md §7), and what one computes, step by step.

The computation follows the definition of the drafter (DESIGN.md §2) in plain tensor operations on the checkpoint's own
names, without the modeling code and without transformers.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

SHAPE = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}


def released_config(model_type: str, layers: int, vocab_size: int, target_hidden_size: int, **changes) -> dict:
    architecture = {"qwen3": "Qwen3ForCausalLMEagle3", "llama": "LlamaForCausalLMEagle3"}[model_type]
    config = {
        **SHAPE,
        **{"architectures": [architecture], "model_type": model_type, "num_hidden_layers": layers},
        **{"vocab_size": vocab_size, "draft_vocab_size": vocab_size, "target_hidden_size": target_hidden_size},
        **{"swap_h_and_emb": True, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "rope_scaling": None},
        **{"max_position_embeddings": 256, "hidden_act": "silu", "attention_bias": False, "torch_dtype": "float32"},
        **{"tie_word_embeddings": False, "transformers_version": "4.51.0"},
    }
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def released_tensors(config: dict[str, Any], draft_ids: Tensor | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Random weights; no two norms are alike, so that exchanged ones change every logit."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    h, head, vocab_size = config["hidden_size"], config["head_dim"], config["vocab_size"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    ids = torch.arange(vocab_size) if draft_ids is None else draft_ids
    tensors = {
        "embed_tokens.weight": matrix(vocab_size, h) * h**0.5,
        "fc.weight": matrix(h, 3 * config["target_hidden_size"]),
        "norm.weight": norm(h),
        "lm_head.weight": matrix(len(ids), h),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True),
    }
    for prefix in block_names(config):
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": matrix(query, 2 * h),
            f"{prefix}self_attn.k_proj.weight": matrix(kv, 2 * h),
            f"{prefix}self_attn.v_proj.weight": matrix(kv, 2 * h),
            f"{prefix}self_attn.o_proj.weight": matrix(h, query),
            f"{prefix}mlp.gate_proj.weight": matrix(config["intermediate_size"], h),
            f"{prefix}mlp.up_proj.weight": matrix(config["intermediate_size"], h),
            f"{prefix}mlp.down_proj.weight": matrix(h, config["intermediate_size"]),
            f"{prefix}hidden_norm.weight": norm(h),
            f"{prefix}input_layernorm.weight": norm(h),
            f"{prefix}post_attention_layernorm.weight": norm(h),
        }
        if config["model_type"] == "qwen3":
            tensors |= {f"{prefix}self_attn.{name}_norm.weight": norm(head) for name in ("q", "k")}
    return tensors


def block_names(config: dict[str, Any]) -> list[str]:
    layers = config["num_hidden_layers"]
    return ["midlayer."] if layers == 1 else [f"layers.{i}." for i in range(layers)]


def write_released(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def frequencies(config: dict[str, Any]) -> list[float]:
    """Rotation of each pair of a head's features per position, `[head_dim / 2]`."""
    pairs = config["head_dim"] // 2
    plain = [config["rope_theta"] ** (-i / pairs) for i in range(pairs)]
    scaling = config["rope_scaling"] or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return plain
    if kind == "linear":  # positions are divided by the factor
        return [frequency / scaling["factor"] for frequency in plain]
    # Llama 3.1: long waves are slowed down by the factor, short ones kept, those between mixed.
    length, low, high = (
        scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    scaled = []
    for frequency in plain:
        turns = length * frequency / (2 * math.pi)  # of this pair over the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(kept * frequency + (1 - kept) * frequency / scaling["factor"])
    return scaled


def rotate(x: Tensor, positions: Tensor, config: dict[str, Any]) -> Tensor:
    """Rotary positions of `x` (`[heads, T, head_dim]`), where feature i makes a pair with feature i + head_dim / 2."""
    angles = positions[:, None].double() * torch.tensor(frequencies(config), dtype=torch.float64)  # [T, head_dim / 2]
    first, second = x.double().chunk(2, dim=-1)
    turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    return torch.cat(turned, dim=-1).to(x.dtype)


def step_by_step(config: dict[str, Any], weights: dict[str, Tensor], ids: Tensor, context: Tensor):
    """Logits (`[T, D]`) and the last block's output (`[T, h]`) at each of the tokens `ids` (`[T]`).

    `context` (`[T, h]`) belongs to the positions one before; every position sees itself and those before it.
    """
    eps, head = config["rms_norm_eps"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    positions = torch.arange(len(ids))
    x = weights["embed_tokens.weight"][ids]  # the residual stream starts from the embedding
    for prefix in block_names(config):

        def of(name: str, prefix: str = prefix) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        normed = [rms_norm(context, of("input_layernorm"), eps), rms_norm(x, of("hidden_norm"), eps)]
        widened = torch.cat(normed, dim=-1)  # [T, 2h]: context, then x
        q, k, v = (
            (widened @ of(f"self_attn.{name}_proj").T).view(len(ids), count, head).transpose(0, 1)  # [heads, T, head]
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if config["model_type"] == "qwen3":
            q, k = rms_norm(q, of("self_attn.q_norm"), eps), rms_norm(k, of("self_attn.k_norm"), eps)
        q, k = rotate(q, positions, config), rotate(k, positions, config)
        attended = []
        for index in range(heads):
            of_group = index // (heads // kv_heads)
            scores = q[index] @ k[of_group].T / math.sqrt(head)  # [T, T]
            scores = scores.masked_fill(positions[None] > positions[:, None], -math.inf)
            attended.append(scores.softmax(-1) @ v[of_group])  # [T, head]
        x = x + torch.cat(attended, dim=-1) @ of("self_attn.o_proj").T
        normed = rms_norm(x, of("post_attention_layernorm"), eps)
        gated = silu(normed @ of("mlp.gate_proj").T) * (normed @ of("mlp.up_proj").T)
        x = x + gated @ of("mlp.down_proj").T
    return rms_norm(x, weights["norm.weight"], eps) @ weights["lm_head.weight"].T, x
