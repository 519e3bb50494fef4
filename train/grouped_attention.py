"""Decoding attention that reads a grouped-query cache as it lies.

Behind a mask, transformers' sdpa path first repeats every key and value head for the queries that share it: at batch
96 and 400 positions of SmolLM2 that copy is seven eighths of a layer's attention time on a CPU.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "osprey_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, T, head_dim]
    key: Tensor,  # [B, kv heads, S, head_dim]
    value: Tensor,  # [B, kv heads, S, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """sdpa; with one query position, the queries that share a key head stand as rows of one attention, exactly."""
    batch, heads, length, head_dim = query.shape
    if length != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.view(batch, key.shape[1], -1, head_dim)  # [B, kv heads, group, head_dim]
    output = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, head_dim), None


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let `model`, which uses sdpa, decode with `grouped_attention`."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, grouped_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
