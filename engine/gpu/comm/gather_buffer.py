"""Memory of the host where ranks on GPUs write slices of logits, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.hardware.host_memory import HostTensor

GATHER_BYTES = 16 << 20
"""Of pinned memory for logits of many rows: these come in several turns."""


class GatherSlice(NamedTuple):
    """What a member shows before slices are joined.

    Attributes:
        n_alike: numbers that all members have in common, if they are of one kind.
    """

    value: Tensor | None
    n_alike: int
    kind: str

    @classmethod
    def of(cls, x: Tensor | None, alike: Tensor | None, kind: str) -> GatherSlice:
        return cls(x, 0 if alike is None else alike.shape[-1], kind)

    @property
    def rows(self) -> int:
        return 0 if self.value is None else self.value.shape[0]

    @property
    def width(self) -> int:
        return 0 if self.value is None else self.value.shape[1]


class GatherBuffer:
    """Memory of the host where slices of rows are joined, and numbers are compared.

    Attributes:
        n_rows: that fit.
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
        """Whether devices write there by themselves."""
        return self._held.is_pinned

    def fits(self, slices: Sequence[GatherSlice]) -> bool:
        """Whether it serves for these as well."""
        rows = min(max(part.rows for part in slices), GATHER_BYTES // (4 * sum(self._widths)))
        return (
            [part.width for part in slices] == self._widths
            and max(part.n_alike for part in slices) <= self._n_alike
            and rows <= self.n_rows
        )

    def part(self, seat: int, n_rows: int) -> Tensor:
        """Of the first so many rows: what one member writes, (n_rows, its width)."""
        start = n_rows * sum(self._widths[:seat])
        width = self._widths[seat]
        return self._held.value[start : start + n_rows * width].view(n_rows, width)

    def whole(self, n_rows: int) -> Tensor:
        """All members' parts of the first so many rows."""
        if n_rows == 1:
            return self._held.value[: sum(self._widths)].view(1, -1)
        return torch.cat([self.part(seat, n_rows) for seat in range(len(self._widths))], dim=-1)

    def alike(self, seat: int) -> Tensor:
        """What one member has in common with others."""
        return self._alike.value[seat, : self._n_alike]
