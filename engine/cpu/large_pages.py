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

MADV_HUGEPAGE = 14
"""Advice for Linux's madvise(2); a system without large pages refuses it, which does no harm."""


def weight_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the CPU."""
    tensor = torch.empty(prod(shape), dtype=dtype)
    if sys.platform == "linux" and tensor.nbytes >= WORTHWHILE_BYTES:
        start = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
        n_bytes = (tensor.data_ptr() + tensor.nbytes - start) // LARGE_PAGE * LARGE_PAGE
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), MADV_HUGEPAGE)
    return tensor.view(shape)
