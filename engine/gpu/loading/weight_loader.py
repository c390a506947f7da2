"""Weights of a GPU: a part of the file at a time goes there and is packed there.

The host never has more of a model than a few buffers; see `engine.gpu.loading.staging`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cpu.packing import DTYPES, file_blocks, in_parts, joined_shape, stacks
from engine.gpu.loading.pack import pack
from engine.gpu.loading.staging import Staging
from engine.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.planning.footprint import LOAD_BUFFER_BYTES, packed_bytes, slot_pieces
from engine.quants.extent import Extent, n_tiles
from engine.quants.layout import LAYOUTS, TILE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.forward.weight import Weight
    from engine.gguf import GGUFFile, TensorInfo
    from engine.layers.module import Slot
    from engine.sharding.placement import Slices

    Bytes = NDArray[np.uint8]

Put = Callable[[slice, int, Tensor], None]
"""Is given which matrices, the first row, and the bytes (n, n_row, …) of these on the device."""

WORTHWHILE = 16
"""Buffers are no larger than this part of what is sent: their pages must be made and pinned."""

LEAST_BYTES = 1 << 20


def staging_for(
    slots: Sequence[Slot], rank: int, device: torch.device, report: Callable[[int], None]
) -> Staging:
    """Buffers for a rank's parts of some tensors, as large as is worth it.

    Args:
        report: called with the bytes of the file that were read; may raise to stop.
    """
    total = sum(packed_bytes(slot, piece) for slot in slots for piece in slot_pieces(slot, rank))
    n_bytes = min(LOAD_BUFFER_BYTES, max(LEAST_BYTES, total // WORTHWHILE))
    longest = max((slot.tensor.row_bytes for slot in slots), default=0)
    return Staging(device, report, max(n_bytes, longest))


def load_for_gpu(
    file: GGUFFile, slot: Slot, pieces: Sequence[Slices], staging: Staging, x_bytes: int
) -> Weight:
    """The parts of a matrix that a rank holds, as planes, or as short as in the file.

    They are complete once `staging` has ended.

    Args:
        x_bytes: of a quantised activation, see `engine.planning.footprint.x_bytes`.
    """

    def load(group: Sequence[Slices], dim: int) -> Weight:
        if slot.tensor.type.number in LAYOUTS:
            return _planes(file, slot.tensor, group, dim, staging, x_bytes)
        return _plain(file, slot.tensor, group, dim, staging)

    return in_parts(slot, pieces, load)


def _planes(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int, staging: Staging,
    x_bytes: int,
) -> GpuPlanes:  # fmt: skip
    number = tensor.type.number
    extent = Extent.of(pieces[0][-1].start, pieces[0][-1].stop)
    *matrices, n_rows = joined_shape(pieces, dim)[:-1]
    shape = (*matrices, n_tiles(n_rows), extent.tile_bytes(LAYOUTS[number]))
    planes = torch.zeros(shape, dtype=torch.uint8, device=staging.device)
    goal = planes.view(-1, *shape[-2:])

    def put(matrices: slice, first: int, raw: Tensor) -> None:
        pack(raw, number, extent, goal[matrices], first)

    columns = _columns(tensor, *file_blocks(tensor.type.block_size, extent))
    send_rows(stacks(file, tensor, pieces, dim), len(goal), columns, staging, put)
    return GpuPlanes(planes, number, n_rows, extent, x_bytes)


def _plain(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int, staging: Staging
) -> GpuPlain:
    dtype, columns = DTYPES[tensor.type.name], pieces[0][-1]
    data = torch.empty(joined_shape(pieces, dim), dtype=dtype, device=staging.device)
    goal = data.view(-1, *data.shape[-2:])
    wanted = _columns(tensor, columns.start, columns.stop)
    put = partial(_put_bytes, goal)
    send_rows(stacks(file, tensor, pieces, dim), len(goal), wanted, staging, put)
    return GpuPlain(data)


def send_bytes(raw: Bytes, staging: Staging) -> Tensor:
    """Bytes (…, n_row, row_bytes) of the file as they are, on the device."""
    whole = torch.empty(raw.shape, dtype=torch.uint8, device=staging.device)
    goal = whole.view(-1, *raw.shape[-2:])
    everything = slice(0, raw.shape[-1])
    stack = raw.reshape(-1, *raw.shape[-2:])
    send_rows([(0, stack)], len(goal), everything, staging, partial(_put_bytes, goal))
    staging.flush()
    return whole


def send_rows(
    source: Iterable[tuple[int, Bytes]], n_matrix: int, columns: slice, staging: Staging, put: Put
) -> None:
    """Bring matrices to the device, some at a time, or some rows of one.

    Args:
        source: see `engine.cpu.packing.stacks`; what follows on the same matrix are more rows.
        n_matrix: of all together.
        columns: the bytes of each row that are wanted.
    """
    begun = [0] * n_matrix
    for offset, stack in source:
        rows = stack[..., columns]
        if not rows.size:
            continue
        for matrices, part in _chunks(rows.shape, staging.n_bytes):
            here = slice(offset + matrices.start, offset + matrices.stop)
            staging.send(rows[matrices, part], partial(put, here, begun[offset] + part.start))
        for index in range(offset, offset + len(rows)):
            begun[index] += rows.shape[1]


def _chunks(shape: tuple[int, ...], n_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Whole matrices where several fit into so many bytes, else rows of each, by the tile."""
    n, n_row, row_bytes = shape
    fitting = n_bytes // row_bytes
    if n_row <= fitting:
        for first in range(0, n, fitting // n_row):
            yield slice(first, min(n, first + fitting // n_row)), slice(0, n_row)
        return
    step = fitting // TILE * TILE or fitting
    for index in range(n):
        for first in range(0, n_row, step):
            yield slice(index, index + 1), slice(first, min(n_row, first + step))


def _columns(tensor: TensorInfo, first: int, stop: int) -> slice:
    """The bytes of some blocks of a row."""
    return slice(first * tensor.type.type_size, stop * tensor.type.type_size)


def _put_bytes(goal: Tensor, matrices: slice, first: int, raw: Tensor) -> None:
    goal[matrices, first : first + raw.shape[1]] = raw.view(goal.dtype)
