"""Memory that a CPU training step frees stays with the process for the next step."""

import ctypes
import platform

# glibc's <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Tells glibc neither to map large blocks one by one nor to give memory back; false where it is not glibc.

    A step allocates gradients and logits of 100 MB and more, and by default each of them is mapped, cleared by the
    kernel page by page and unmapped again: a fifth of the CPU time of a step of two SmolLM2-135M blocks in bf16.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return mallopt(M_MMAP_MAX, 0) == 1 and mallopt(M_TRIM_THRESHOLD, -1) == 1
