"""Memory of a rank's weights on a GPU: matrices that are cut alike lie in one piece of it.

Torch's allocator rounds each of its pieces up, which costs 2 % of a card for a large model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.planning.footprint import arena_key, sizes_of_pieces, slot_pieces
from engine.planning.rounding import aligned_bytes, is_arena

if TYPE_CHECKING:
    from engine.model.layers.module import Slot

STORAGE = "kernels"
"""Storage of the matrices, see `engine.planning.plan.DevicePlan`."""


class Arenas:
    """Memory for a rank's parts of some tensors; a part of it is freed with all that share it.

    Args:
        slots: tensors that will be loaded, each once.
        rank: number of the rank.
    """

    def __init__(self, slots: Sequence[Slot], rank: int, device: torch.device) -> None:
        self._device = device
        totals: Counter[object] = Counter()
        for slot in slots:
            sizes = sizes_of_pieces(slot, slot_pieces(slot, rank), STORAGE)
            totals[arena_key(slot, STORAGE)] += sum(map(aligned_bytes, sizes))
        del totals[None]
        self._left = {key: total for key, total in totals.items() if is_arena(total)}
        self._open: dict[object, Tensor] = {}

    def zeros(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for a part of a tensor, filled with zeros."""
        key = arena_key(slot, STORAGE)
        if key not in self._left:
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        n_bytes = prod(shape) * dtype.itemsize
        free = self._open.pop(key, None)
        if free is None:
            free = torch.zeros(self._left[key], dtype=torch.uint8, device=self._device)
        found, rest = free[:n_bytes], free[aligned_bytes(n_bytes) :]
        if len(rest):
            self._open[key] = rest  # else only the tensors hold the memory
        return found.view(dtype).view(*shape)
