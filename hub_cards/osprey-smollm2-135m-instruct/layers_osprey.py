"""The drafter's decoder blocks, and the cache of their keys and values.

Sizes in the comments as in `modeling_osprey.py`: B batch, T positions, S cached + new positions, h drafter hidden.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb, eager_attention_forward

from .attention_osprey import FEW_POSITIONS, attend_in_groups
from .configuration_osprey import OspreyConfig


def stack_linears(*linears: nn.Linear) -> nn.Linear:
    """One linear layer that gives the outputs of `linears` side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])  # [out, in]
    stacked = nn.Linear(weight.shape[1], weight.shape[0], bias=linears[0].bias is not None, device="meta")
    stacked.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        stacked.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return stacked


class OspreyAttention(nn.Module):
    """Grouped-query attention over `[context | x]`: each projection is twice as wide as the backbone's."""

    def __init__(self, config: OspreyConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = [config.num_attention_heads, *2 * [config.num_key_value_heads]]  # of queries, keys, values
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.use_rope = config.no_rope_layers is None or bool(config.no_rope_layers[layer_idx])

        in_features = 2 * config.hidden_size
        query_features = config.num_attention_heads * self.head_dim
        kv_features = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(in_features, query_features, bias=config.attention_bias)
        self.k_proj = nn.Linear(in_features, kv_features, bias=config.attention_bias)
        self.v_proj = nn.Linear(in_features, kv_features, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_features, config.hidden_size, bias=config.attention_output_bias)
        self.qkv_proj = None  # the three as one product, see `fuse`
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def fuse(self) -> None:
        self.qkv_proj = stack_linears(self.q_proj, self.k_proj, self.v_proj)
        self.q_proj = self.k_proj = self.v_proj = None

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, `[B, T, heads or kv heads, head_dim]`."""
        if self.qkv_proj is None:
            projected = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
            return tuple(states.unflatten(-1, (-1, self.head_dim)) for states in projected)
        return self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).split(self.num_heads, dim=2)

    def extend_cache(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], cache: Cache
    ) -> None:
        """Leave the keys and values of these positions (`[B, T, 2h]`), which is all that later ones read of them."""
        _, key, value = self.project(hidden_states)
        key = self.k_norm(key).transpose(1, 2)  # [B, kv heads, T, head_dim]
        if self.use_rope:
            _, key = apply_rotary_pos_emb(key, key, *position_embeddings)
        cache.update(key, value.transpose(1, 2), self.layer_idx)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, 2h]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        query, key, value = self.project(hidden_states)
        query = self.q_norm(query).transpose(1, 2)  # [B, heads, T, head_dim]
        key = self.k_norm(key).transpose(1, 2)  # [B, kv heads, T, head_dim]
        value = value.transpose(1, 2)  # [B, kv heads, T, head_dim]
        if self.use_rope:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)  # [B, kv heads, S, head_dim]
        return self.o_proj(self.attend(query, key, value, attention_mask).flatten(2))  # [B, T, h]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """What the heads read, `[B, T, heads, head_dim]`; without a mask each position sees itself and all before."""
        implementation, (batch, heads, length, _) = self.config._attn_implementation, query.shape
        has_few = length == 1 if attention_mask is None else length <= FEW_POSITIONS
        if has_few and implementation == "sdpa" and not self.training:
            return attend_in_groups(query, key, value, attention_mask, self.scaling)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, _ = attention(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling)
        return output.reshape(batch, length, heads, self.head_dim)


class OspreyMLP(LlamaMLP):
    def __init__(self, config: OspreyConfig):
        super().__init__(config)
        self.gate_up_proj = None  # the two as one product, see `fuse`

    def fuse(self) -> None:
        self.gate_up_proj = stack_linears(self.gate_proj, self.up_proj)
        self.gate_proj = self.up_proj = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.gate_up_proj is None:
            return super().forward(hidden_states)
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)  # [B, T, intermediate]
        return self.down_proj(self.act_fn(gate) * up)


class OspreyDecoderLayer(nn.Module):
    """A backbone block with `Q, K, V = W · [ctx_norm(context) | input_layernorm(x)]`, W's left half zero at first."""

    def __init__(self, config: OspreyConfig, layer_idx: int):
        super().__init__()
        self.self_attn = OspreyAttention(config, layer_idx)
        self.mlp = OspreyMLP(config)
        self.ctx_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, h]
        context: torch.Tensor,  # [B, T, h]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        widened = self.widen(hidden_states, context)
        hidden_states = hidden_states + self.self_attn(widened, position_embeddings, attention_mask, cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))  # [B, T, h]

    def widen(self, hidden_states: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.ctx_norm(context), self.input_layernorm(hidden_states)], dim=-1)  # [B, T, 2h]

    def extend_cache(
        self,
        hidden_states: torch.Tensor,  # [B, T, h]
        context: torch.Tensor,  # [B, T, h]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
    ) -> None:
        """`forward` of positions whose output nobody reads: the last block of all but the last position."""
        self.self_attn.extend_cache(self.widen(hidden_states, context), position_embeddings, cache)


class BufferedLayer(DynamicLayer):
    """Keys and values in buffers that double when they are full: a step writes its own rows and copies no others.

    `crop`, the base class's, only shortens the views; what it gave up is overwritten.
    """

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.buffers = [states[:, :, :0] for states in (key_states, value_states)]  # [B, kv heads, capacity, head_dim]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self.buffers[0].shape[-2]:
            self.buffers = [grown(buffer, start, 2 * end) for buffer in self.buffers]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values


def grown(buffer: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    """A buffer with `capacity` positions that starts with the first `used` ones of `buffer`."""
    batch, heads, _, head_dim = buffer.shape
    larger = buffer.new_empty(batch, heads, capacity, head_dim)
    larger[:, :, :used] = buffer[:, :, :used]
    return larger
