"""How the process deals with memory that tensors gave back."""

from __future__ import annotations

import ctypes
import platform
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt, from glibc's malloc.h."""


@cache
def keep_freed() -> bool:
    """Keeps freed memory in the process, so that the next tensor of that size is there at once.

    By itself glibc returns every large block to the system when it is freed, and the next one
    comes back as pages that the kernel must clear and map one by one: a tenth of a training step
    at 14M parameters, half of a validation at pilot size. The process then holds a little more than
    its largest use until it ends. Results are the same, bit for bit.

    Returns:
        whether the C library here takes such advice; others are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    never_mapped = mallopt(M_MMAP_MAX, 0)  # large blocks from the heap, like small ones
    never_trimmed = mallopt(M_TRIM_THRESHOLD, -1)
    return bool(never_mapped and never_trimmed)
