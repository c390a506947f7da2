"""Cosines and sines of rotated positions (RoPE) on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ANGLES = 256
"""Number of positions whose angles are computed at once."""

N_BLOCKS = 64
"""Largest number of blocks of positions that are kept."""

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, each (T, 1, n_rot / 2)."""


class RopeAngles:
    """Cosines and sines of one rotation; for single tokens always in the same memory.

    They are computed for a block of positions at once: torch's bits depend on how many numbers it
    computes.

    Args:
        compute: function from positions (T,) to cosines and sines.
    """

    def __init__(self, compute: Callable[[Tensor], Angles]) -> None:
        self._compute = compute
        self._blocks: dict[int, Angles] = {}
        self._of_singles: dict[int, Angles] = {}

    def move(self, positions: Sequence[int]) -> None:
        """Write the angles of some single tokens to their memory, if it has been asked for."""
        held = self._of_singles.get(len(positions))
        if held is not None:
            self._write(positions, held)

    def of_singles(self, positions: Sequence[int]) -> Angles:
        """Return the memory with the angles of the single tokens to which `move` went last."""
        n = len(positions)
        if n not in self._of_singles:
            cos, sin = self._block(0)
            held = self._of_singles[n] = cos[:n].clone(), sin[:n].clone()
            self._write(positions, held)
        return self._of_singles[n]

    def _write(self, positions: Sequence[int], goal: Angles) -> None:
        """Write the angles of positions to some memory."""
        for row, position in enumerate(positions):
            number, index = divmod(position, ANGLES)
            for held, block in zip(goal, self._block(number), strict=True):
                held[row].copy_(block[index])

    def at(self, positions: Sequence[int]) -> Angles:
        """Return the angles of any positions, in memory of their own."""
        numbers = dict.fromkeys(position // ANGLES for position in positions)
        starts = {number: n * ANGLES for n, number in enumerate(numbers)}
        rows = torch.tensor([starts[p // ANGLES] + p % ANGLES for p in positions])
        blocks = [self._block(number) for number in numbers]
        cos, sin = (torch.cat(parts).index_select(0, rows) for parts in zip(*blocks, strict=True))
        return cos, sin

    def _block(self, number: int) -> Angles:
        """Return cosines and sines of a block of positions, each (`ANGLES`, 1, n_rot / 2)."""
        if number not in self._blocks:
            if len(self._blocks) == N_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            positions = torch.arange(number * ANGLES, (number + 1) * ANGLES)
            self._blocks[number] = self._compute(positions)
        return self._blocks[number]
