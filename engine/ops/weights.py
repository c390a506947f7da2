"""Matrices as a rank holds them: dequantised, or still packed as in the file.

Both give the same numbers: a packed matrix is dequantised, exactly, each time it is used. That is
slow, and is chosen only where the dequantised matrices would not fit.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.quants import dequantise

CHUNK_ELEMENTS = 1 << 24
"""Packed matrices are dequantised this many elements at a time, to bound the extra memory."""


class Weight(Protocol):
    """A matrix (n_out, n_in), or one per expert."""

    @property
    def n_bytes(self) -> int:
        """Bytes held."""
        ...

    def matmul(self, x: Tensor) -> Tensor:
        """`x Wᵀ` for x (T, n_in) in F32; (T, n_out)."""
        ...

    def lookup(self, ids: Tensor, n_rows: int) -> Tensor | None:
        """Rows `ids` (T,) as (T, n_in); rows outside 0…n_rows-1 are zero, None if all are."""
        ...

    def expert(self, index: int) -> Weight:
        """The matrix of one expert, as a view."""
        ...


class DenseWeight:
    """F32 values.

    Args:
        data: (n_out, n_in) or (n_expert, n_out, n_in), F32.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return linear(x, self.data)

    def lookup(self, ids: Tensor, n_rows: int) -> Tensor | None:
        return _lookup(ids, n_rows, lambda rows: self.data[rows])

    def expert(self, index: int) -> DenseWeight:
        return DenseWeight(self.data[index])


class PackedWeight:
    """The file's bytes, dequantised on use.

    Args:
        raw: uint8, (n_out, row_bytes) or (n_expert, n_out, row_bytes): whole blocks.
        type_number: the GGML type.
        columns: the elements of a dequantised row that belong to this rank; a cut may lie inside
            a block.
    """

    def __init__(self, raw: Tensor, type_number: int, columns: slice) -> None:
        self.raw = raw
        self.type_number = type_number
        self.columns = columns

    @property
    def n_bytes(self) -> int:
        return self.raw.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        n_in = self.columns.stop - self.columns.start
        step = max(1, CHUNK_ELEMENTS // n_in)
        parts = [linear(x, self._rows(raw)) for raw in self.raw.split(step)]  # type: ignore[no-untyped-call]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def lookup(self, ids: Tensor, n_rows: int) -> Tensor | None:
        return _lookup(ids, n_rows, lambda rows: self._rows(self.raw[rows]))

    def expert(self, index: int) -> PackedWeight:
        return PackedWeight(self.raw[index], self.type_number, self.columns)

    def _rows(self, raw: Tensor) -> Tensor:
        return dequantise(raw, self.type_number)[..., self.columns]


def _lookup(ids: Tensor, n_rows: int, rows_of: object) -> Tensor | None:
    """Gather the rows that are here and leave zeros for the others."""
    assert callable(rows_of)
    here = (ids >= 0) & (ids < n_rows)
    if not bool(here.any()):
        return None
    if bool(here.all()):
        whole: Tensor = rows_of(ids)
        return whole
    found: Tensor = rows_of(ids[here])
    result = found.new_zeros((ids.shape[0], found.shape[1]))
    result[here] = found
    return result
