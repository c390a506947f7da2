"""Reference implementations of `Weight`: dequantised matrices, and matrices packed as in the file.

Both have the same values: a packed matrix is dequantised, exactly, each time it is used. That is
slow, and is chosen only where the dequantised matrices would not fit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.formats.gguf.types import TYPES
from engine.formats.quants.dequantise import dequantise
from engine.model.forward.expert_rows import Groups
from engine.model.forward.weight import ALL

CHUNK_ELEMENTS = 1 << 22
"""Elements of a packed matrix that are dequantised at a time, into memory that is reused."""

_scratch = threading.local()


class DenseWeight:
    """Dequantised matrix, or one per expert or head.

    Args:
        data: F32 values, (n_out, n_in) or (n, n_out, n_in).
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return linear(x, self.data)

    def lookup(self, ids: Tensor) -> Tensor:
        return gathered_rows(ids, len(self.data), lambda rows: self.data.index_select(0, rows))

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        return torch.cat([linear(x[rows], self.data[expert]) for expert, rows in groups])

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        matrices = self.data[:, rows]
        if not transposed:
            matrices = matrices.transpose(1, 2)
        return (x.transpose(0, 1) @ matrices).transpose(0, 1)


class PackedWeight:
    """Matrix in the file's blocks, or one per expert or head; dequantised on each use.

    Args:
        raw: whole blocks, uint8 (n_out, row_bytes) or (n, n_out, row_bytes).
        type_number: number of the GGML type.
        columns: elements of a dequantised row that belong to this rank, as an interval or one by
            one; a cut may lie inside a block.
    """

    def __init__(self, raw: Tensor, type_number: int, columns: slice | Tensor) -> None:
        self.raw = raw
        self.type_number = type_number
        self.columns = columns

    @property
    def n_bytes(self) -> int:
        return self.raw.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        info = TYPES[self.type_number]
        n_held = self.raw.shape[-1] // info.type_size * info.block_size
        step = max(1, CHUNK_ELEMENTS // n_held)
        y = x.new_empty(x.shape[0], self.raw.shape[0])
        for start in range(0, self.raw.shape[0], step):
            raw = self.raw[start : start + step]
            rows = _scratch_rows(raw.shape[0], n_held, raw.device)
            dequantise(raw, self.type_number, out=rows)
            y[:, start : start + step] = self._product(x, rows[:, self.columns])
        return y

    def _product(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the products of x (T, n_in) and dequantised rows (n, n_in), (T, n)."""
        return linear(x, rows)

    def lookup(self, ids: Tensor) -> Tensor:
        def rows_of(rows: Tensor) -> Tensor:
            raw = self.raw.index_select(0, rows)
            return dequantise(raw, self.type_number)[:, self.columns]

        return gathered_rows(ids, len(self.raw), rows_of)

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        return torch.cat([self._expert(expert).matmul(x[rows]) for expert, rows in groups])

    def _expert(self, index: int) -> PackedWeight:
        """Return the matrix of one expert."""
        return PackedWeight(self.raw[index], self.type_number, self.columns)

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        heads = []
        for head, raw in enumerate(self.raw):
            matrix = dequantise(raw[rows], self.type_number)[:, self.columns]
            heads.append(x[:, head] @ (matrix if transposed else matrix.T))
        return torch.stack(heads, dim=1)


def _scratch_rows(n_rows: int, n_columns: int, device: torch.device) -> Tensor:
    """Return this thread's F32 scratch memory as (n_rows, n_columns).

    It is reused, since faulting in new pages costs more than dequantising into them.
    """
    buffer = getattr(_scratch, "buffer", None)
    needed = n_rows * n_columns
    if buffer is None or buffer.numel() < needed or buffer.device != device:
        buffer = torch.empty(max(needed, CHUNK_ELEMENTS), device=device)
        _scratch.buffer = buffer
    rows: Tensor = buffer[:needed].view(n_rows, n_columns)
    return rows


def release_scratch() -> None:
    """Free the working memory of this thread."""
    _scratch.buffer = None


def gathered_rows(ids: Tensor, n_rows: int, rows_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the rows `ids`, with zeros for ids outside 0 to n_rows - 1.

    Args:
        rows_of: function that returns the rows of valid ids.
    """
    is_held = (ids >= 0) & (ids < n_rows)
    rows = rows_of(ids.clamp(0, n_rows - 1))
    return rows.where(is_held[:, None], rows.new_zeros(()))
