"""Loading of matrices into the CPU kernels' formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.cpu.kernels.packing import pack
from engine.backends.cpu.plain_weights import PlainWeight
from engine.backends.cpu.weights import FineWeight, Int16Weight, JoinedColumns, PlaneWeight
from engine.formats.gguf.tensors import split_name
from engine.formats.quants.layout import (
    BLOCK,
    LAYOUTS,
    TILE,
    Extent,
    file_blocks,
    n_tiles,
    word_tile_bytes,
)
from engine.model.sharding.placement import Shard, Slices

if TYPE_CHECKING:
    from engine.backends.cpu.file_packing import FilePacker
    from engine.backends.cpu.worker import Worker
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensor_bytes import TensorBytes
    from engine.formats.gguf.tensors import TensorInfo
    from engine.model.forward.operands import Weight
    from engine.model.layers.module import Slot

    Load = Callable[..., Weight]

FINE = ("attn_v.weight",)
"""Names, within a layer, of matrices that use two-byte activations in all models.

For these, using one byte would lose the most precision for the time saved: attention values take
2 to 8 % of the products, and cause 15 to 20 % of the divergence from the exact model."""

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def load_for_kernels(
    file: GGUFFile, slot: Slot, pieces: Sequence[Slices], packer: FilePacker
) -> Weight:
    """Load a rank's pieces of a matrix: as planes, as int16 or as in the file.

    Args:
        packer: reads and packs the file, and reports progress.
    """

    def load(group: Sequence[Slices], dim: int) -> Weight:
        load_as: Load = _planes if slot.tensor.type.number in LAYOUTS else _plain
        if _become_int16(slot.tensor, group, dim, packer.worker):
            load_as = _int16
        return load_as(file, slot.tensor, group, dim, packer)

    return in_parts(slot, pieces, load)


def in_parts(
    slot: Slot, pieces: Sequence[Slices], load: Callable[[Sequence[Slices], int], Weight]
) -> Weight:
    """Load a matrix piece by piece; each interval of columns becomes a separate weight.

    Args:
        load: function that loads pieces, joined along a dimension.
    """
    dim = slot.placement.dim if isinstance(slot.placement, Shard) else 0
    is_cut_in_columns = dim == len(slot.tensor.shape) - 1
    groups = [[piece] for piece in pieces] if is_cut_in_columns else [list(pieces)]
    parts = [load(group, dim) for group in groups]
    if len(parts) == 1:
        return parts[0]
    return JoinedColumns(parts, [piece[-1].stop - piece[-1].start for piece in pieces])


def _planes(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int, packer: FilePacker
) -> PlaneWeight:
    number = tensor.type.number
    extent = Extent.of(pieces[0][-1].start, pieces[0][-1].stop)
    *matrices, n_rows = joined_shape(pieces, dim)[:-1]
    tile_bytes = extent.tile_bytes(LAYOUTS[number])
    planes = packer.memory.tensor((*matrices, n_tiles(n_rows), tile_bytes), torch.uint8)
    columns, cut = _cut_columns(tensor, extent)
    counted = _read_bytes(tensor, extent)
    packing = _Packing(packer, number, columns, cut, counted)
    packing.pack(stacks(file, tensor, pieces, dim), planes, n_rows)
    is_fine = packer.worker.x_bytes == 1 and _name_in_layer(tensor) in FINE
    kind = FineWeight if is_fine else PlaneWeight
    return kind(planes, number, n_rows, extent, packer.worker)


def _name_in_layer(tensor: TensorInfo) -> str:
    """Return a tensor's name within its layer; "" outside layers."""
    place = split_name(tensor.name)
    return place[1] if place else ""


def _become_int16(tensor: TensorInfo, pieces: Sequence[Slices], dim: int, worker: Worker) -> bool:
    """Return whether pieces are loaded as int16; they must form one matrix of whole blocks."""
    *matrices, n_rows, n_columns = joined_shape(pieces, dim)
    is_fit = not matrices and n_rows >= TILE and n_columns % BLOCK == 0
    return is_fit and tensor.type.number in pack.INT16_KINDS and worker.uses_int16


def _int16(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int, packer: FilePacker
) -> Int16Weight:
    number, size, columns = tensor.type.number, tensor.type.type_size, pieces[0][-1]
    n_rows, n_columns = joined_shape(pieces, dim)
    extent = Extent.of(0, n_columns)
    planes = packer.memory.tensor((n_tiles(n_rows), word_tile_bytes(extent.n_blocks)), torch.uint8)
    wanted = slice(columns.start * size, columns.stop * size)
    packing = _Packing(packer, number, wanted, extent, n_columns * size)
    packing.pack(stacks(file, tensor, pieces, dim), planes, n_rows)
    return Int16Weight(planes, number, n_rows, extent, packer.worker)


@dataclass(frozen=True, slots=True)
class _Packing:
    """How a tensor's rows are packed.

    Attributes:
        number: id of the GGML type.
        columns: range of bytes to read from each row.
        cut: columns to pack, relative to these bytes.
        counted: bytes to report per row.
    """

    packer: FilePacker
    number: int
    columns: slice
    cut: Extent
    counted: int

    def pack(self, parts: Iterator[tuple[int, TensorBytes]], planes: Tensor, n_rows: int) -> None:
        """Pack the matrices from `stacks`.

        Args:
            planes: planes for one or more matrices, each of which has `n_rows` rows.
        """
        if n_rows % TILE:
            planes[..., -1, :] = 0  # padding rows in the last tile
        by_matrix = planes.view(-1, *planes.shape[-2:])
        n_done = [0] * len(by_matrix)  # rows packed so far in each matrix
        for first, stack in parts:
            if stack.shape[1] == n_rows and n_rows % TILE == 0 and stack.is_even:
                goal = by_matrix[first : first + len(stack)].flatten(0, 1)
                self._rows(stack.tall(), goal, 0)
                continue
            for index, matrix in enumerate(by_matrix[first : first + len(stack)], first):
                rows = stack[index - first]
                self._rows(rows, matrix, n_done[index])
                n_done[index] += len(rows)

    def _rows(self, rows: TensorBytes, goal: Tensor, goal_row: int) -> None:
        self.packer.pack(rows[:, self.columns], self.number, self.cut, goal, goal_row, self.counted)


def _plain(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int, packer: FilePacker
) -> PlainWeight:
    dtype, columns = DTYPES[tensor.type.name], pieces[0][-1]
    data = packer.memory.tensor(joined_shape(pieces, dim), dtype)
    by_matrix = data.view(-1, *data.shape[-2:])
    n_done = [0] * len(by_matrix)  # rows packed so far in each matrix
    size = tensor.type.type_size
    for index, raw in _matrices(file, tensor, pieces, dim):
        wanted = raw[:, columns.start * size : columns.stop * size]
        target = by_matrix[index, n_done[index] : n_done[index] + len(raw)].view(torch.uint8)
        packer.copy(wanted, target)
        n_done[index] += len(raw)
    return PlainWeight(data, packer.worker)


def joined_shape(pieces: Sequence[Slices], dim: int) -> tuple[int, ...]:
    """Return the shape of all pieces joined along dimension `dim`."""
    shapes = [[part.stop - part.start for part in piece] for piece in pieces]
    whole = list(shapes[0])
    if dim < len(whole) - 1:
        whole[dim] = sum(shape[dim] for shape in shapes)
    return tuple(whole)


def _matrices(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int
) -> Iterator[tuple[int, TensorBytes]]:
    """Yield each piece's matrices: the index among the joined matrices, and the whole rows."""
    for offset, matrices in stacks(file, tensor, pieces, dim):
        for index in range(len(matrices)):
            yield offset + index, matrices[index]


def stacks(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int
) -> Iterator[tuple[int, TensorBytes]]:
    """Yield each piece's matrices as whole rows of the file, (n, n_rows, row_bytes).

    Each is preceded by the index of its first matrix among the joined pieces.
    """
    raw, offset = file.raw(tensor), 0
    for piece in pieces:
        part = raw[piece[:-1]]
        yield offset, part.stack()
        if dim == 0 and part.ndim > 2:
            offset += prod(part.shape[:-2])


def _cut_columns(tensor: TensorInfo, extent: Extent) -> tuple[slice, Extent]:
    """Return the range of bytes to read per row for an extent, and the extent relative to it.

    The range starts at the super-block that contains the extent's first block.
    """
    info = tensor.type
    first = (extent.first - extent.skip) * BLOCK // info.block_size
    last = file_blocks(info.block_size, extent)[1]
    return slice(first * info.type_size, last * info.type_size), replace(extent, first=extent.skip)


def _read_bytes(tensor: TensorInfo, extent: Extent) -> int:
    first, last = file_blocks(tensor.type.block_size, extent)
    return (last - first) * tensor.type.type_size
