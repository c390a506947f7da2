"""Reused memory for large results.

The C library returns tensors of some MiB to the system as soon as they are freed, and faulting in
new pages took a tenth of a prompt's time. Here, memory returns to the thread that allocated it once
a result and all its views are garbage.
"""

from __future__ import annotations

import threading
import weakref
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.cpu.large_pages import weight_memory

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_RESULT_BYTES = 256 << 10
"""Minimum size, in bytes, of results in reused memory; the C library reuses smaller blocks."""

MAX_KEPT = 256 << 20
"""Maximum number of unused bytes that a thread keeps."""

MAX_SPARE = 2
"""Maximum ratio of a block's size to its result's size."""

Bytes = NDArray[np.uint8]


class FreeBlocks:
    """One thread's unused blocks of memory; other threads may add blocks."""

    def __init__(self) -> None:
        self._blocks: list[Bytes] = []

    def take(self, n_bytes: int) -> Bytes:
        """Return the smallest free block of at least `n_bytes`, or a new one."""
        most = n_bytes * MAX_SPARE
        fitting = [block for block in self._blocks if n_bytes <= block.nbytes <= most]
        if not fitting:
            return weight_memory((n_bytes,), torch.uint8).numpy()
        found = min(fitting, key=lambda block: block.nbytes)
        self._blocks = [block for block in self._blocks if block is not found]
        return found

    def add(self, block: Bytes) -> None:
        """Add a free block; drop the oldest ones beyond `MAX_KEPT`."""
        self._blocks.append(block)
        while sum(block.nbytes for block in self._blocks) > MAX_KEPT:
            self._blocks.pop(0)

    def clear(self) -> None:
        """Free all blocks."""
        self._blocks = []

    @property
    def n_bytes(self) -> int:
        """Total size of the free blocks, in bytes."""
        return sum(block.nbytes for block in self._blocks)


class _OfThread(threading.local):
    """Each thread's free blocks."""

    def __init__(self) -> None:
        self.free = FreeBlocks()
        _all_threads.add(self.free)


_all_threads: weakref.WeakSet[FreeBlocks] = weakref.WeakSet()
_thread = _OfThread()


def free_blocks() -> FreeBlocks:
    """Return the calling thread's free blocks."""
    return _thread.free


def free_results() -> None:
    """Free all threads' unused memory."""
    for free in list(_all_threads):
        free.clear()


def result(*shape: int) -> Tensor:
    """Return an uninitialised F32 tensor, in reused memory if it is large."""
    n_bytes = 4 * prod(shape)
    if n_bytes < MIN_RESULT_BYTES:
        return torch.empty(shape)
    free = _thread.free
    block = free.take(n_bytes)
    lent = block[:n_bytes].view(np.float32)  # the tensor refers to this view, not to block
    weakref.finalize(lent, free.add, block).atexit = False
    return torch.from_numpy(lent).view(shape)


class GrowingMemory:
    """Scratch memory that grows to the largest requested size.

    Args:
        allocate: returns an uninitialised tensor with n elements.

    Attributes:
        memory: the current tensor.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self.memory = allocate(0)

    def tensor(self, n: int) -> Tensor:
        """Return a tensor with at least n elements, valid until the next call."""
        if self.memory.numel() < n:
            self.memory = self._allocate(n)
        return self.memory

    def release(self) -> None:
        """Free the memory."""
        self.memory = self._allocate(0)
