"""Rows of a rank's matrices as the file has them, dequantised by torch: what kernels must agree to.

They come from the file's blocks, so that packing and copying are checked as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.backends.cpu.weights import JoinedColumns
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.formats.quants.dequantise import dequantise
from engine.formats.quants.layout import TILE
from engine.model.sharding.placement import Shard, Slices
from engine.planning.footprint import slot_pieces

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.model.layers.module import Slot

Part = GpuPlanes | GpuPlain
"""Matrix that kernels read, or one per expert or head."""


class MatrixRows(NamedTuple):
    """Some rows of a matrix.

    Attributes:
        at: numbers of the rows, int64 (n,).
        values: their numbers, F32 (n, columns).
    """

    at: Tensor
    values: Tensor


class _Place(NamedTuple):
    """Place of a matrix in the file: the tensor, and the slices of it, joined along `dim`."""

    slot: Slot
    pieces: Sequence[Slices]
    dim: int


class FileRows:
    """Reader of some rows of a rank's matrices: the first tile, one in the middle, and the last.

    Args:
        file: file of the model.
        slots: tensors of the model, and the attributes that hold the rank's parts of them.
        rank: number of the rank.
        device: device of the rank.
    """

    def __init__(
        self, file: GGUFFile, slots: Iterable[Slot], rank: int, device: torch.device
    ) -> None:
        self._file, self._device = file, device
        self._places: dict[int, _Place] = {}
        self._known: dict[tuple[int, int | None], MatrixRows] = {}
        for slot in slots:
            held, pieces = getattr(slot.owner, slot.attribute), slot_pieces(slot, rank)
            dim = slot.placement.dim if isinstance(slot.placement, Shard) else 0
            if isinstance(held, JoinedColumns):
                for part, piece in zip(held.parts, pieces, strict=True):
                    self._places[id(part)] = _Place(slot, [piece], dim)
            elif isinstance(held, GpuPlanes | GpuPlain):
                self._places[id(held)] = _Place(slot, pieces, dim)

    def some(self, part: Part, matrix: int | None = None) -> MatrixRows:
        """Return some rows of a matrix.

        Args:
            matrix: index among the matrices of experts or heads; None if there is one alone.
        """
        key = id(part), matrix
        if key not in self._known:
            rows = chosen_rows(part.n_rows)
            self._known[key] = MatrixRows(
                torch.from_numpy(rows).to(self._device), self.read(part, rows, matrix)
            )
        return self._known[key]

    def read(self, part: Part, rows: np.ndarray, matrix: int | None = None) -> Tensor:
        """Return rows of a matrix in F32, (n, columns)."""
        slot, pieces, dim = self._places[id(part)]
        kind, columns = slot.tensor.type, pieces[0][-1]
        wanted = [rows] if matrix is None else [np.array(matrix), rows]
        at = [
            _in_file(local, pieces, axis, is_joined=axis == dim)
            for axis, local in enumerate(wanted)
        ]
        first, last = columns.start // kind.block_size, -(-columns.stop // kind.block_size)
        raw = self._file.raw(slot.tensor)[(*map(int, at[:-1]),)]
        raw = raw[:, first * kind.type_size : last * kind.type_size]
        runs = np.split(at[-1], np.flatnonzero(np.diff(at[-1]) != 1) + 1)
        blocks = np.concatenate([raw[int(run[0]) : int(run[-1]) + 1].read() for run in runs])
        start = columns.start - first * kind.block_size
        values = dequantise(torch.from_numpy(blocks).to(self._device), kind.number)
        return values[:, start : start + columns.stop - columns.start]


def chosen_rows(n_rows: int) -> np.ndarray:
    """Return the rows of the first tile, one in the middle, and the last, which may be ragged."""
    tiles = {0, (n_rows - 1) // TILE // 2, (n_rows - 1) // TILE}
    rows = [np.arange(TILE * tile, min(TILE * (tile + 1), n_rows)) for tile in sorted(tiles)]
    return np.concatenate(rows)


def _in_file(
    local: np.ndarray, pieces: Sequence[Slices], axis: int, *, is_joined: bool
) -> np.ndarray:
    """Return where a rank's indices along an axis are in the file's tensor."""
    some = pieces if is_joined else pieces[:1]
    places = np.concatenate([np.arange(piece[axis].start, piece[axis].stop) for piece in some])
    found: np.ndarray = places[local]
    return found
