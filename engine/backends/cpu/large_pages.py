"""Memory for weights in large pages, where the system has them; it is faster to fill and read."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from math import prod

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Bytes of a large page."""

WORTHWHILE_BYTES = 2 * LARGE_PAGE
"""Smallest memory for which large pages are requested, in bytes."""

MAX_LEFT_OVER = LARGE_PAGE // 4
"""Most bytes of a tensor's last large page that nothing may be stored in; they take memory."""

MADV_HUGEPAGE = 14
"""Advice for Linux's madvise(2); a system without large pages refuses it, which does no harm."""

CHUNK_BYTES = 256 << 20
"""Bytes of addresses that an arena asks for at a time; they take memory only once written to."""

ALIGNMENT = 128
"""Alignment of an arena's tensors in bytes: whole cache lines."""


def weight_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the CPU, in large pages where that is worthwhile.

    It begins with such a page; the last one is large if little of it is left over.
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
    """Memory of a load's weights: one tensor behind the other, so that large pages hold them all.

    A system call for each small page takes most of the time of a load otherwise: matrices of some
    MiB do not fill large pages, nor do the ends of larger ones. The memory of each tensor goes back
    to the system when nobody uses it any more, whatever becomes of its neighbours; only the small
    pages at its ends stay with these.
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
            except OSError:  # no such addresses; torch says so in the words that all know
                return torch.empty(shape, dtype=dtype)
        return self._chunk.tensor(n_bytes).view(dtype).view(shape)

    def close(self) -> None:
        """Give what is left of the last large page back; tensors stay."""
        if self._chunk is not None:
            self._chunk.give_back(self._chunk.taken, LARGE_PAGE)
            self._chunk = None


class _Chunk:
    """Neighbouring addresses, which the last tensor in them gives back.

    Attributes:
        taken: bytes of tensors and of the gaps between.
    """

    def __init__(self, n_bytes: int) -> None:
        # one more page of each kind: to begin with a large one, and for what follows the last byte
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
        # the tensor's storage holds `memory`, whose end is the end of all views of the tensor
        weakref.finalize(memory, self.give_back, begin, n_bytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def give_back(self, begin: int, n_bytes: int) -> None:
        """Give the whole pages of an interval back to the system."""
        page = mmap.PAGESIZE
        first = -(-(self._offset + begin) // page) * page
        end = (self._offset + begin + n_bytes) // page * page
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
