"""Where to compute, and when in bf16: one setting for every stage."""

from contextlib import AbstractContextManager

import torch

PRECISIONS = ("auto", "bf16", "fp32")


def default_device_type() -> str:
    """Where the stages compute: on a CUDA card where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def use_bf16(precision: str, device_type: str) -> bool:
    """Whether `auto`, `bf16` or `fp32` means bf16 here.

    `auto` takes bf16 where it is faster than fp32: on a CUDA card that has it, and on a CPU whose instructions
    multiply it (AMX tiles, or AVX-512 BF16; without them matrix products are emulated and much slower).
    """
    if precision not in PRECISIONS:
        raise ValueError(f"The precision {precision!r} is unknown: choose one of {', '.join(PRECISIONS)}.")
    if precision != "auto":
        return precision == "bf16"
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported()
    return device_type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def meaning(precision: str, device_type: str) -> str:
    """`bf16` or `fp32`: what is recorded, since on another machine `auto` may mean the other."""
    return "bf16" if use_bf16(precision, device_type) else "fp32"


def compute_dtype(precision: str, device_type: str) -> torch.dtype:
    return torch.bfloat16 if use_bf16(precision, device_type) else torch.float32


def autocast(precision: str, device_type: str) -> AbstractContextManager:
    """A bf16 autocast context where `use_bf16` says so, one that does nothing elsewhere."""
    return torch.autocast(device_type, dtype=torch.bfloat16, enabled=use_bf16(precision, device_type))
