"""Attention that reads a grouped-query cache as it lies.

Behind a mask, transformers' sdpa path first repeats each key and value head for the queries that share it. Decoding a
single token needs no mask and no copy; verifying a draft needs both: behind 4,096 positions of SmolLM2-135M, on a CPU,
a verification of two rows takes twice a plain step for that reason alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "osprey_grouped"
FEW_POSITIONS = 64  # more than a verification has rows, and few enough that their mask is small


def attend_in_groups(
    query: torch.Tensor,  # [B, heads, T, head_dim]
    key: torch.Tensor,  # [B, kv heads, S, head_dim]
    value: torch.Tensor,  # [B, kv heads, S, head_dim]
    attention_mask: torch.Tensor | None,  # [B or 1, 1, T, S]
    scaling: float | None,
) -> torch.Tensor:
    """sdpa in which the queries that share a key head are rows of it, exactly; `[B, T, heads, head_dim]`."""
    batch, heads, length, head_dim = query.shape
    groups = heads // key.shape[1]
    query = query.reshape(batch, -1, groups * length, head_dim)  # [B, kv heads, groups * T, head_dim]
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, groups, 1)  # [B or 1, 1, groups * T, S]
    output = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return output.reshape(batch, heads, length, head_dim).transpose(1, 2)


def grouped_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa, in groups where a mask covers few positions and is the same for all heads."""
    few = attention_mask is not None and query.shape[2] <= FEW_POSITIONS and attention_mask.shape[1] == 1
    is_plain = dropout == 0.0 and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if few and is_plain and query.shape[1] > key.shape[1]:
        return attend_in_groups(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


AttentionInterface.register(GROUPED, grouped_attention_forward)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model` attends in groups if it is on a CPU and uses sdpa; nothing else changes but float noise."""
    config = model.config
    if model.device.type != "cpu" or config._attn_implementation != "sdpa":
        yield
        return
    config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
