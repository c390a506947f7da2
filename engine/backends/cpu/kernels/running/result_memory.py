"""Memory for large results, which the next ones use again.

The C library gives tensors of some MiB back to the system as soon as they are freed, so that each
pass over a prompt waited for new pages, a tenth of its time. Here memory returns to the thread that
asked for it once nothing refers to a result any more, views of it included.
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
"""Smallest result whose memory is kept, in bytes; the C library keeps that of smaller ones."""

MAX_KEPT = 256 << 20
"""Most bytes that a thread keeps while nothing uses them."""

MAX_SPARE = 2
"""How many times as large as a result the memory may be that it gets."""

Bytes = NDArray[np.uint8]


class FreeBlocks:
    """Blocks of memory that nothing uses, of one thread; others may add to them."""

    def __init__(self) -> None:
        self._blocks: list[Bytes] = []

    def take(self, n_bytes: int) -> Bytes:
        """Return a block of at least `n_bytes`: the smallest that is free, or a new one."""
        most = n_bytes * MAX_SPARE
        fitting = [block for block in self._blocks if n_bytes <= block.nbytes <= most]
        if not fitting:
            return weight_memory((n_bytes,), torch.uint8).numpy()
        found = min(fitting, key=lambda block: block.nbytes)
        self._blocks = [block for block in self._blocks if block is not found]
        return found

    def add(self, block: Bytes) -> None:
        """Keep a block that is free again; those that were freed first go if it is too much."""
        self._blocks.append(block)
        while sum(block.nbytes for block in self._blocks) > MAX_KEPT:
            self._blocks.pop(0)

    def clear(self) -> None:
        """Free all blocks."""
        self._blocks = []

    @property
    def n_bytes(self) -> int:
        """Bytes of all free blocks."""
        return sum(block.nbytes for block in self._blocks)


class _OfThread(threading.local):
    """The free blocks of each thread."""

    def __init__(self) -> None:
        self.free = FreeBlocks()
        _all_threads.add(self.free)


_all_threads: weakref.WeakSet[FreeBlocks] = weakref.WeakSet()
_thread = _OfThread()


def free_blocks() -> FreeBlocks:
    """Return the free blocks of the calling thread."""
    return _thread.free


def free_results() -> None:
    """Free the memory of results that no thread uses."""
    for free in list(_all_threads):
        free.clear()


def result(*shape: int) -> Tensor:
    """Return an uninitialised F32 tensor; large ones are in memory that is used again."""
    n_bytes = 4 * prod(shape)
    if n_bytes < MIN_RESULT_BYTES:
        return torch.empty(shape)
    free = _thread.free
    block = free.take(n_bytes)
    lent = block[:n_bytes].view(np.float32)  # the tensor's memory refers to this view, not to block
    weakref.finalize(lent, free.add, block).atexit = False
    return torch.from_numpy(lent).view(shape)


class GrowingMemory:
    """Memory that grows to the largest size that was asked for.

    Args:
        allocate: returns an uninitialised tensor of n elements.

    Attributes:
        memory: the memory, of which callers use the first elements.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self.memory = allocate(0)

    def tensor(self, n: int) -> Tensor:
        """Return memory for n elements or more, valid until the next call."""
        if self.memory.numel() < n:
            self.memory = self._allocate(n)
        return self.memory

    def release(self) -> None:
        """Free the memory."""
        self.memory = self._allocate(0)
