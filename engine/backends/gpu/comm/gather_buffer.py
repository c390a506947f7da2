"""Pinned host memory into which ranks on GPUs gather slices of logits, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.hardware.host_memory import HostTensor
from engine.planning.buffers import GATHER_BYTES


class GatherSlice(NamedTuple):
    """One member's part of a gather, as shown to the other members.

    Attributes:
        value: the member's slice (rows, width); None if it has none.
        n_alike: number of values that must be the same on all members of one kind, 0 for none.
        kind: kind of device: only devices of one kind compute the same bits.
    """

    value: Tensor | None
    n_alike: int
    kind: str

    @classmethod
    def of(cls, x: Tensor | None, alike: Tensor | None, kind: str) -> GatherSlice:
        """Return the part of a member that gives x, and shows `alike` for comparison."""
        return cls(x, 0 if alike is None else alike.shape[-1], kind)

    @property
    def rows(self) -> int:
        """Number of rows of the slice; 0 without one."""
        return 0 if self.value is None else self.value.shape[0]

    @property
    def width(self) -> int:
        """Number of columns of the slice; 0 without one."""
        return 0 if self.value is None else self.value.shape[1]


class GatherBuffer:
    """Host memory where slices of rows are gathered, and values compared between members.

    Attributes:
        n_rows: number of rows that fit.
    """

    def __init__(self, slices: Sequence[GatherSlice], device: torch.device) -> None:
        self._widths = [part.width for part in slices]
        self._n_alike = max(part.n_alike for part in slices)
        total = sum(self._widths)
        most = max(1, GATHER_BYTES // (4 * total))
        self.n_rows = min(most, max(part.rows for part in slices))
        self._held = HostTensor((self.n_rows * total,), torch.float32, device)
        shape = (len(slices), max(1, self._n_alike))
        self._alike = HostTensor(shape, torch.float32, device)

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is pinned, so that devices write there by themselves."""
        return self._held.is_pinned

    def fits(self, slices: Sequence[GatherSlice]) -> bool:
        """Return whether the buffer can gather these slices as well."""
        rows = min(max(part.rows for part in slices), GATHER_BYTES // (4 * sum(self._widths)))
        return (
            [part.width for part in slices] == self._widths
            and max(part.n_alike for part in slices) <= self._n_alike
            and rows <= self.n_rows
        )

    def part(self, seat: int, n_rows: int) -> Tensor:
        """Return the memory that one member writes for the first n_rows rows, (n_rows, width)."""
        start = n_rows * sum(self._widths[:seat])
        width = self._widths[seat]
        return self._held.value[start : start + n_rows * width].view(n_rows, width)

    def whole(self, n_rows: int) -> Tensor:
        """Return the first n_rows rows, gathered from all members."""
        if n_rows == 1:
            return self._held.value[: sum(self._widths)].view(1, -1)
        return torch.cat([self.part(seat, n_rows) for seat in range(len(self._widths))], dim=-1)

    def alike(self, seat: int) -> Tensor:
        """Return the memory for one member's values that are compared with the others'."""
        return self._alike.value[seat, : self._n_alike]
