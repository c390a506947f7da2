"""Memory for weights in large pages, where the system has them; it is faster to fill and read."""

from __future__ import annotations

import ctypes
import sys
from math import prod

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Bytes of a large page."""

WORTHWHILE_BYTES = 2 * LARGE_PAGE
"""Smallest memory for which large pages are requested, in bytes."""

MOST_LEFT_OVER = LARGE_PAGE // 4
"""Most bytes of a tensor's last large page that nothing may be stored in; they take memory."""

MADV_HUGEPAGE = 14
"""Advice for Linux's madvise(2); a system without large pages refuses it, which does no harm."""


def weight_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the CPU, in large pages where that is worthwhile.

    It begins with such a page; the last one is large if little of it is left over.
    """
    n_bytes = prod(shape) * dtype.itemsize
    if sys.platform != "linux" or n_bytes < WORTHWHILE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(n_bytes + 2 * LARGE_PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % LARGE_PAGE
    large = (n_bytes + MOST_LEFT_OVER) // LARGE_PAGE * LARGE_PAGE
    advise = ctypes.CDLL(None).madvise
    start = ctypes.c_void_p(memory.data_ptr() + begin)
    advise(start, ctypes.c_size_t(large), MADV_HUGEPAGE)
    return memory[begin : begin + n_bytes].view(dtype).view(shape)
