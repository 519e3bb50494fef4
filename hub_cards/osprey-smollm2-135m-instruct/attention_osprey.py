"""Attention that reads a grouped-query cache as it lies.

Behind a mask, transformers' sdpa path first repeats each key and value head for the queries that share it. Decoding a
single token needs no mask and no copy; verifying a draft needs both: behind 4,096 positions of SmolLM2-135M, on a CPU,
a verification of two rows takes twice a plain step for that reason alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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


def can_group(query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    """Whether these are few queries on a CPU that share key heads, behind one mask for all heads."""
    few = attention_mask is not None and attention_mask.shape[1] == 1 and query.shape[2] <= FEW_POSITIONS
    return few and query.device.type == "cpu" and query.shape[1] > key.shape[1]


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Inside, in this thread, models that use sdpa attend in groups where they can; only float noise changes."""
    token = GenerationMixin._osprey_groups.set(True)
    try:
        yield
    finally:
        GenerationMixin._osprey_groups.reset(token)


def install_grouped_attention() -> None:
    """Let transformers' sdpa heed `grouped_attention`; a second call, also from another copy, does nothing.

    Not an implementation under a name of its own: some models ask whether theirs is called sdpa.
    """
    if hasattr(GenerationMixin, "_osprey_groups"):
        return
    GenerationMixin._osprey_groups = ContextVar("osprey_groups", default=False)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    @wraps(sdpa)
    def sdpa_or_groups(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        wanted = not torch.compiler.is_compiling() and GenerationMixin._osprey_groups.get()
        is_plain = dropout == 0.0 and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
        if wanted and is_plain and can_group(query, key, attention_mask):
            return attend_in_groups(query, key, value, attention_mask, scaling), None
        return sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)

    AttentionInterface.register("sdpa", sdpa_or_groups)
