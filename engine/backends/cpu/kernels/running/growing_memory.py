"""Scratch memory that callers use one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


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
