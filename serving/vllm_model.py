"""The drafter built from vLLM's layers, so that it runs sharded (tensor parallel), compiled and on vLLM's KV cache.

vLLM's EAGLE-3 path calls `combine_hidden_states` on the taps of verified positions, `forward` on tokens shifted by
one against these contexts, and `compute_logits`; in later draft steps the context is what `forward` returned second.

Shapes in the comments: T scheduled tokens of all requests, h drafter hidden, H target hidden, D draft vocabulary.
"""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.tokenizers import cached_tokenizer_from_config

from osprey.serving.layout import check_tensors
from osprey.serving.startup import check_start_up

# Parts of vLLM's stacked parameters: part, parameter, which shard of it.
STACKED = (
    ("q_proj", "qkv_proj", "q"),
    ("k_proj", "qkv_proj", "k"),
    ("v_proj", "qkv_proj", "v"),
    ("gate_proj", "gate_up_proj", 0),
    ("up_proj", "gate_up_proj", 1),
)


class OspreyAttention(nn.Module):
    """Grouped-query attention over `[context | x]`: twice as wide an input as an ordinary layer's."""

    def __init__(self, config, layer_idx: int, cache_config, prefix: str):
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            2 * config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias=config.attention_output_bias,
            prefix=f"{prefix}.o_proj",
        )
        num_shards = get_tensor_model_parallel_world_size()
        num_heads = config.num_attention_heads // num_shards
        num_kv_heads = max(1, config.num_key_value_heads // num_shards)  # fewer than shards: replicated
        self.q_size, self.kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.rotary_emb = None
        if config.no_rope_layers is None or config.no_rope_layers[layer_idx]:
            self.rotary_emb = get_rope(
                self.head_dim,
                max_position=config.max_position_embeddings,
                rope_parameters=config.rope_parameters,
                is_neox_style=True,
            )
        self.attn = Attention(
            num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=num_kv_heads,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, widened: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(widened)  # widened: [T, 2h]
        query, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.q_norm is not None:
            query = self.q_norm(query.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            key = self.k_norm(key.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        if self.rotary_emb is not None:
            query, key = self.rotary_emb(positions, query, key)
        output, _ = self.o_proj(self.attn(query, key, value))
        return output  # [T, h]


class OspreyDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx: int, cache_config, prefix: str):
        super().__init__()
        self.self_attn = OspreyAttention(config, layer_idx, cache_config, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.mlp_bias,
            prefix=f"{prefix}.mlp",
        )
        self.ctx_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        positions: torch.Tensor,
        context: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer adds to the residual stream, and the stream without it (vLLM's norms do the addition)."""
        if residual is None:
            hidden_states, residual = self.input_layernorm(hidden_states), hidden_states
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        widened = torch.cat([self.ctx_norm(context), hidden_states], dim=-1)  # [T, 2h]
        hidden_states = self.self_attn(positions, widened)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "hidden_states": 0, "input_embeds": 0},
)
class OspreyModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", first_layer_id: int = 0):
        super().__init__()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.fc = ReplicatedLinear(
            3 * config.target_hidden_size,
            config.hidden_size,
            bias=False,
            params_dtype=vllm_config.model_config.dtype,
            prefix=f"{prefix}.fc",
            return_bias=False,
        )
        # Layer names decide which KV cache is whose: the drafter's count on from the target's.
        self.layers = nn.ModuleList(
            OspreyDecoderLayer(config, i, vllm_config.cache_config, f"{prefix}.layers.{first_layer_id + i}")
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,  # [T]
        positions: torch.Tensor,  # [T]
        hidden_states: torch.Tensor,  # [T, h]: contexts
        input_embeds: torch.Tensor | None = None,  # [T, h]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last layer's output after the final norm, for the head, and before it, the next step's context."""
        states, residual = self.embed_tokens(input_ids) if input_embeds is None else input_embeds, None
        for layer in self.layers:
            states, residual = layer(positions, hidden_states, states, residual)
        return self.norm(states, residual)  # [T, h] each


class OspreyForVllm(Eagle3LlamaForCausalLM):
    """The Osprey drafter behind vLLM's EAGLE-3 interface, of which its proposer asks an instance.

    Raises:
        ValueError: the config is incomplete, the served model is not the drafter's target, or a tensor is missing,
            unexpected or misshapen.
    """

    # Read by vLLM, which otherwise replaces the drafter's embedding and head by the target's.
    has_own_embed_tokens = True
    has_own_lm_head = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        nn.Module.__init__(self)
        check_start_up(vllm_config, cached_tokenizer_from_config)
        config = vllm_config.speculative_config.draft_model_config.hf_config
        if get_draft_quant_config(vllm_config) is not None:
            raise ValueError("An Osprey drafter runs unquantized: leave `quantization` out of --speculative-config.")
        self.config = config
        self.use_parallel_drafting = False
        self.num_draftable = config.target_num_tokens or config.vocab_size
        num_target_layers = vllm_config.model_config.get_total_num_hidden_layers()
        self.model = OspreyModel(
            vllm_config=vllm_config, prefix=f"{prefix}.model".lstrip("."), first_layer_id=num_target_layers
        )
        draft_vocab_size = config.draft_vocab_size or config.vocab_size
        self.draft_id_to_target_id = None
        if config.draft_vocab_size is not None:
            self.draft_id_to_target_id = nn.Parameter(
                torch.zeros(draft_vocab_size, dtype=torch.long), requires_grad=False
            )
        self.lm_head = ParallelLMHead(draft_vocab_size, config.hidden_size, prefix=f"{prefix}.lm_head".lstrip("."))
        if config.tie_word_embeddings and config.draft_vocab_size is None:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(draft_vocab_size)

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Contexts `[T, h]` from the taps `[T, 3H]`."""
        return self.model.fc(hidden_states)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Scores `[T, V]`, `-inf` where a token cannot be drafted, from states `[T, h]` after the final norm."""
        logits = self.logits_processor(self.lm_head, hidden_states)  # [T, D]
        if logits is None:  # not the rank that gathers them
            return None
        if self.draft_id_to_target_id is None:
            logits[:, self.num_draftable :] = -torch.inf
            return logits
        draft_ids = torch.arange(logits.shape[1], device=logits.device) + self.draft_id_to_target_id
        wide = logits.new_full((logits.shape[0], self.config.vocab_size), -torch.inf)
        wide[:, draft_ids] = logits
        return wide

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The best token of each state, `[T]`; for vLLM's `use_local_argmax_reduction`."""
        if self.draft_id_to_target_id is None and self.num_draftable < self.config.vocab_size:
            return self.compute_logits(hidden_states).argmax(dim=-1)
        return super().get_top_tokens(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        tensors = dict(weights)
        check_tensors(vars(self.config), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        if "d2t" in tensors:
            draft_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
            check_draft_ids(draft_ids, tensors["t2d"])
            if self.config.tie_word_embeddings:
                tensors["lm_head.weight"] = tensors["embed_tokens.weight"][draft_ids]
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in tensors.items():
            if name == "t2d":
                continue
            name = "draft_id_to_target_id" if name == "d2t" else name
            name = name if name.startswith(("lm_head.", "draft_id")) else f"model.{name}"
            shard = ()
            for part, stacked, index in STACKED:
                if f".{part}." in name:
                    name, shard = name.replace(part, stacked), (index,)
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], tensor, *shard)
            loaded.add(name)
        return loaded


def check_draft_ids(draft_ids: torch.Tensor, t2d: torch.Tensor) -> None:
    """Raise `ValueError` where `d2t` and `t2d` do not name the same tokens."""
    marked = t2d.bool().nonzero()[:, 0]
    if not torch.equal(draft_ids.cpu(), marked.cpu()):
        raise ValueError(
            "The drafter's d2t and t2d do not name the same draft vocabulary in rising order: fetch or make the "
            "drafter again."
        )
