"""Memory for weights, in large pages (which are faster to fill and read) if the system has them."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from math import prod

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Size of a large page, in bytes."""

WORTHWHILE_BYTES = 2 * LARGE_PAGE
"""Minimum size, in bytes, for which large pages are requested."""

MAX_LEFT_OVER = LARGE_PAGE // 4
"""Maximum number of unused bytes in a tensor's last large page; unused bytes take up memory."""

MADV_HUGEPAGE = 14
"""Advice value for Linux's madvise(2); fails harmlessly on systems without large pages."""

CHUNK_BYTES = 256 << 20
"""Address space, in bytes, that an arena reserves at a time; it takes no memory until used."""

ALIGNMENT = 128
"""Alignment of an arena's tensors, in bytes."""


def weight_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the CPU, in large pages if it is large enough.

    The tensor starts at a large page; its last page is large only if most of it is used.
    """
    n_bytes = prod(shape) * dtype.itemsize
    if sys.platform != "linux" or n_bytes < WORTHWHILE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(n_bytes + 2 * LARGE_PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % LARGE_PAGE
    large = (n_bytes + MAX_LEFT_OVER) // LARGE_PAGE * LARGE_PAGE
    _advise_large(memory.data_ptr() + begin, large)
    return memory[begin : begin + n_bytes].view(dtype).view(shape)


def _advise_large(address: int, n_bytes: int) -> None:
    advise = ctypes.CDLL(None).madvise
    advise(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), MADV_HUGEPAGE)


class WeightArena:
    """Memory for a load's weights: adjacent tensors, so that all are in large pages.

    Otherwise, page faults for small pages would take most of a load, because matrices of some MiB,
    and the ends of larger ones, do not fill large pages. A tensor's memory returns to the system
    once the tensor is garbage, except for small pages that it shares with its neighbours.
    """

    def __init__(self) -> None:
        self._chunk: _Chunk | None = None

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor."""
        n_bytes = prod(shape) * dtype.itemsize
        if sys.platform != "linux" or not n_bytes:
            return torch.empty(shape, dtype=dtype)
        if self._chunk is None or self._chunk.left < n_bytes:
            self.close()
            try:
                self._chunk = _Chunk(max(CHUNK_BYTES, n_bytes))
            except OSError:  # out of address space, for which torch raises the usual error
                return torch.empty(shape, dtype=dtype)
        return self._chunk.tensor(n_bytes).view(dtype).view(shape)

    def close(self) -> None:
        """Return the unused part of the last large page to the system; tensors stay valid."""
        if self._chunk is not None:
            self._chunk.give_back(self._chunk.taken, LARGE_PAGE)
            self._chunk = None


class _Chunk:
    """An address range that is freed with its last tensor; `taken` bytes are in use."""

    def __init__(self, n_bytes: int) -> None:
        # two extra large pages: for alignment, and for the end of the last tensor
        self._map = mmap.mmap(-1, n_bytes + 2 * LARGE_PAGE, flags=mmap.MAP_PRIVATE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._offset = -address % LARGE_PAGE
        self._begin = address + self._offset
        self._n_bytes = n_bytes
        self.taken = 0
        _advise_large(self._begin, n_bytes + LARGE_PAGE)

    @property
    def left(self) -> int:
        return self._n_bytes - self.taken

    def tensor(self, n_bytes: int) -> Tensor:
        begin = self.taken
        self.taken = begin + -(-n_bytes // ALIGNMENT) * ALIGNMENT
        memory = (ctypes.c_uint8 * n_bytes).from_address(self._begin + begin)
        # the tensor's storage owns `memory`, so this runs once all views are garbage
        weakref.finalize(memory, self.give_back, begin, n_bytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def give_back(self, begin: int, n_bytes: int) -> None:
        """Return an interval's whole pages to the system."""
        page = mmap.PAGESIZE
        first = -(-(self._offset + begin) // page) * page
        end = (self._offset + begin + n_bytes) // page * page
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
