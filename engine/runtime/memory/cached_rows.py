"""Rows of a layer's keys or values on one rank, as bytes: what is copied to and from files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class CachedRows(NamedTuple):
    """Where some rows of keys or values lie. All values may have been in JSON.

    Attributes:
        rank: number of the rank.
        layer: index of the layer in `Rank.states`.
        name: name of the tensor within the layer, such as "k".
        units: first one and the end of neighbouring heads among those of the rank.
        slots: first one and the end of neighbouring slots, for each run of them.
        row_bytes: number of bytes of a row.
    """

    rank: int
    layer: int
    name: str
    units: Sequence[int]
    slots: Sequence[Sequence[int]]
    row_bytes: int

    @property
    def n_rows(self) -> int:
        """Number of rows of each head."""
        return sum(stop - start for start, stop in self.slots)

    def room(self) -> Tensor:
        """Return memory on the host for the rows, uint8 (heads, slots, bytes)."""
        return torch.empty(
            (self.units[1] - self.units[0], self.n_rows, self.row_bytes), dtype=torch.uint8
        )

    def read(self, held: Tensor) -> Tensor:
        """Return a copy of the rows of a rank's tensor (heads, slots, width), see `room`."""
        found = self.room()
        for rows, part in self._parts(held):
            found[:, rows] = part
        return found

    def write(self, held: Tensor, found: Tensor) -> None:
        """Copy rows to a rank's tensor; see `read`."""
        for rows, part in self._parts(held):
            part.copy_(found[:, rows])

    def _parts(self, held: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield which of the rows are neighbours in a rank's tensor, and the bytes there."""
        units, at = held[self.units[0] : self.units[1]].view(torch.uint8), 0
        for start, stop in self.slots:
            yield slice(at, at + stop - start), units[:, start:stop]
            at += stop - start
