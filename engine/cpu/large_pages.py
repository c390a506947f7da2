"""Memory for weights, in large pages where the system has them: they fill and read faster."""

from __future__ import annotations

import ctypes
import sys
from math import prod

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
WORTHWHILE_BYTES = 2 * LARGE_PAGE
MADV_HUGEPAGE = 14
"""Of Linux's madvise(2); a system without large pages refuses it, which does no harm."""


def weight_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU whose contents are whatever lay there."""
    tensor = torch.empty(prod(shape), dtype=dtype)
    if sys.platform == "linux" and tensor.nbytes >= WORTHWHILE_BYTES:
        start = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
        n_bytes = (tensor.data_ptr() + tensor.nbytes - start) // LARGE_PAGE * LARGE_PAGE
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), MADV_HUGEPAGE)
    return tensor.view(shape)
