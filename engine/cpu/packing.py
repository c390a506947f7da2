"""From a file's matrices to what the CPU's kernels read, by the threads of the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cpu.kernels import compiled
from engine.cpu.large_pages import weight_memory
from engine.cpu.weights import JoinedColumns, PlainWeight, PlaneWeight
from engine.gguf.types import TYPES
from engine.quants.codes import coded_rows
from engine.quants.extent import Extent, n_tiles
from engine.quants.layout import BLOCK, CODED, LAYOUTS, TILE
from engine.sharding.placement import Shard, Slices

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.cpu.worker import Worker
    from engine.forward.weight import Weight
    from engine.gguf import GGUFFile, TensorInfo
    from engine.layers.module import Slot

    Bytes = NDArray[np.uint8]
    Load = Callable[..., Weight]

CHUNK_BYTES = 8 << 20
"""Of the file that are worked on at a time; cancelling and progress take effect between chunks."""

Report = Callable[[int], None]

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def load_for_kernels(
    file: GGUFFile, slot: Slot, pieces: Sequence[Slices], worker: Worker, report: Report
) -> Weight:
    """The parts of a matrix that a rank holds, as planes, or as short as in the file.

    Args:
        report: called with the bytes of the file that were read; may raise to stop.
    """
    load: Load = _planes if slot.tensor.type.number in LAYOUTS else _plain
    return in_parts(
        slot, pieces, lambda group, dim: load(file, slot.tensor, group, dim, worker, report)
    )


def in_parts(
    slot: Slot, pieces: Sequence[Slices], load: Callable[[Sequence[Slices], int], Weight]
) -> Weight:
    """A matrix as what `load` makes of its pieces; each interval of columns is held by itself.

    Args:
        load: takes pieces, and the dimension along which they are joined.
    """
    dim = slot.placement.dim if isinstance(slot.placement, Shard) else 0
    is_cut_in_columns = dim == len(slot.tensor.shape) - 1
    groups = [[piece] for piece in pieces] if is_cut_in_columns else [list(pieces)]
    parts = [load(group, dim) for group in groups]
    if len(parts) == 1:
        return parts[0]
    return JoinedColumns(parts, [piece[-1].stop - piece[-1].start for piece in pieces])


def _planes(
    file: GGUFFile,
    tensor: TensorInfo,
    pieces: Sequence[Slices],
    dim: int,
    worker: Worker,
    report: Report,
) -> PlaneWeight:
    number = tensor.type.number
    extent = Extent.of(pieces[0][-1].start, pieces[0][-1].stop)
    *matrices, n_rows = joined_shape(pieces, dim)[:-1]
    tile_bytes = extent.tile_bytes(LAYOUTS[number])
    planes = weight_memory((*matrices, n_tiles(n_rows), tile_bytes), torch.uint8)
    if n_rows % TILE:
        planes[..., -1, :] = 0  # the rows that the last tile has too many
    by_matrix = planes.view(-1, *planes.shape[-2:])
    begun = [0] * len(by_matrix)
    for index, raw in _matrices(file, tensor, pieces, dim):
        goal = by_matrix[index]
        for start, chunk in _chunks(raw):
            _pack(chunk, number, extent, goal, begun[index] + start, worker)
            report(len(chunk) * _read_bytes(tensor, extent))
        begun[index] += len(raw)
    return PlaneWeight(planes, number, n_rows, extent, worker)


def _plain(
    file: GGUFFile,
    tensor: TensorInfo,
    pieces: Sequence[Slices],
    dim: int,
    worker: Worker,
    report: Report,
) -> PlainWeight:
    dtype, columns = DTYPES[tensor.type.name], pieces[0][-1]
    data = weight_memory(joined_shape(pieces, dim), dtype)
    by_matrix = data.view(-1, *data.shape[-2:])
    begun = [0] * len(by_matrix)
    size = tensor.type.type_size
    for index, raw in _matrices(file, tensor, pieces, dim):
        for start, chunk in _chunks(raw):
            wanted = chunk[:, columns.start * size : columns.stop * size]
            first = begun[index] + start
            goal = by_matrix[index, first : first + len(chunk)].view(torch.uint8)
            goal.numpy()[:] = wanted
            report(wanted.nbytes)
        begun[index] += len(raw)
    return PlainWeight(data, worker)


def joined_shape(pieces: Sequence[Slices], dim: int) -> tuple[int, ...]:
    """The shape of all pieces joined along one dimension."""
    shapes = [[part.stop - part.start for part in piece] for piece in pieces]
    whole = list(shapes[0])
    if dim < len(whole) - 1:
        whole[dim] = sum(shape[dim] for shape in shapes)
    return tuple(whole)


def _matrices(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int
) -> Iterator[tuple[int, Bytes]]:
    """Each matrix of each piece as whole rows of the file, with its index among the joined ones."""
    for offset, matrices in stacks(file, tensor, pieces, dim):
        for index in range(len(matrices)):
            yield offset + index, matrices[index]


def stacks(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int
) -> Iterator[tuple[int, Bytes]]:
    """The matrices of each piece as whole rows of the file: (n, n_rows, row_bytes).

    Each with the index of its first matrix among the joined ones.
    """
    raw = file.raw(tensor).reshape(*tensor.shape[:-1], -1)
    offset = 0
    for piece in pieces:
        part = raw[piece[:-1]]
        yield offset, part.reshape(-1, *part.shape[-2:]) if part.ndim > 2 else part[None]
        if dim == 0 and part.ndim > 2:
            offset += prod(part.shape[:-2])


def _chunks(rows: Bytes) -> Iterator[tuple[int, Bytes]]:
    """Some rows at a time, with the number of the first."""
    step = max(1, CHUNK_BYTES // max(1, rows.shape[-1]))
    for start in range(0, len(rows), step):
        yield start, rows[start : start + step]


def _read_bytes(tensor: TensorInfo, extent: Extent) -> int:
    """Bytes of the file's blocks that cover a row."""
    first, last = file_blocks(tensor.type.block_size, extent)
    return (last - first) * tensor.type.type_size


def file_blocks(block_size: int, extent: Extent) -> tuple[int, int]:
    """The blocks of a row in the file that cover an extent, as an interval."""
    start = extent.first * BLOCK + extent.lead
    return start // block_size, -(-(start + extent.n_columns) // block_size)


def _pack(
    rows: Bytes, number: int, extent: Extent, goal: Tensor, goal_row: int, worker: Worker
) -> None:
    """Put whole rows of the file into the planes of one matrix, from row `goal_row` on."""
    first, address, row_bytes = extent.first, rows.ctypes.data, rows.strides[0]
    if number in CODED:
        info = TYPES[number]
        begin, end = file_blocks(info.block_size, extent)
        blocks = torch.from_numpy(rows[:, begin * info.type_size : end * info.type_size].copy())
        coded = coded_rows(blocks, number)
        first -= begin * info.block_size // BLOCK
        address, row_bytes = coded.data_ptr(), coded.shape[1]
    worker.team.wake()
    compiled.pack_rows(number)(
        worker.team.address, address, row_bytes, len(rows), goal_row, first, extent.n_blocks,
        goal.data_ptr(), goal.shape[-1],
    )  # fmt: skip
