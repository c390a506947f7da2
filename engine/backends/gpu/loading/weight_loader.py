"""Loads weights into a GPU: parts of the file are copied there and packed into planes there.

The host never holds more of a model than a few buffers; see `engine.backends.gpu.loading.staging`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.cpu.packing import DTYPES, in_parts, joined_shape, stacks
from engine.backends.gpu.loading.pack import pack
from engine.backends.gpu.loading.staging import Staging
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.formats.quants.layout import LAYOUTS, TILE, Extent, file_blocks, n_tiles
from engine.planning.footprint import arena_key, packed_bytes, sizes_of_pieces, slot_pieces
from engine.planning.memory import aligned_bytes, is_arena, staging_bytes

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensor_bytes import TensorBytes
    from engine.formats.gguf.tensors import TensorInfo
    from engine.model.forward.operands import Weight
    from engine.model.layers.module import Slot
    from engine.model.sharding.placement import Slices

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


Zeros = Callable[[Sequence[int], torch.dtype], Tensor]
"""Function that returns memory of a shape and type on the device, filled with zeros."""

Put = Callable[[slice, int, Tensor], None]
"""Callback: a slice of matrices, their first row, and their bytes (n, n_row, …) on the device."""


def staging_for(
    slots: Sequence[Slot], rank: int, device: torch.device, report: Callable[[int], None]
) -> Staging:
    """Return the staging buffers for a rank's parts of some tensors, of a size that suits them.

    Args:
        report: callback with the number of bytes of the file that were read; may raise to stop.
    """
    total = sum(packed_bytes(slot, piece) for slot in slots for piece in slot_pieces(slot, rank))
    longest = max((slot.tensor.row_bytes for slot in slots), default=0)
    return Staging(device, report, max(staging_bytes(total), longest))


def load_for_gpu(
    file: GGUFFile, slot: Slot, pieces: Sequence[Slices], staging: Staging, arenas: Arenas,
    x_bytes: int,
) -> Weight:  # fmt: skip
    """Load the parts of a matrix that a rank holds, in planes, or unquantised as in the file.

    They are complete once `staging` has ended.

    Args:
        pieces: slices of the file's tensor that the rank holds.
        arenas: memory for the weights.
        x_bytes: bytes of a quantised activation, see `engine.planning.footprint.x_bytes`.
    """
    zeros = partial(arenas.zeros, slot)

    def load(group: Sequence[Slices], dim: int) -> Weight:
        if slot.tensor.type.number in LAYOUTS:
            return _load_planes(file, slot.tensor, group, dim, staging, zeros, x_bytes)
        return _load_plain(file, slot.tensor, group, dim, staging, zeros)

    return in_parts(slot, pieces, load)


def _load_planes(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int, staging: Staging,
    zeros: Zeros, x_bytes: int,
) -> GpuPlanes:  # fmt: skip
    number = tensor.type.number
    extent = Extent.of(pieces[0][-1].start, pieces[0][-1].stop)
    *matrices, n_rows = joined_shape(pieces, dim)[:-1]
    shape = (*matrices, n_tiles(n_rows), extent.tile_bytes(LAYOUTS[number]))
    planes = zeros(shape, torch.uint8)
    out = planes.view(-1, *shape[-2:])

    def put(matrices: slice, first: int, raw: Tensor) -> None:
        pack(raw, number, extent, out[matrices], first)

    columns = _byte_columns(tensor, *file_blocks(tensor.type.block_size, extent))
    send_rows(stacks(file, tensor, pieces, dim), len(out), columns, staging, put)
    return GpuPlanes(planes, number, n_rows, extent, x_bytes)


def _load_plain(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int, staging: Staging,
    zeros: Zeros,
) -> GpuPlain:  # fmt: skip
    dtype, columns = DTYPES[tensor.type.name], pieces[0][-1]
    data = zeros(joined_shape(pieces, dim), dtype)
    out = data.view(-1, *data.shape[-2:])
    wanted = _byte_columns(tensor, columns.start, columns.stop)
    put = partial(_put_bytes, out)
    send_rows(stacks(file, tensor, pieces, dim), len(out), wanted, staging, put)
    return GpuPlain(data)


def send_bytes(raw: TensorBytes, staging: Staging) -> Tensor:
    """Copy bytes (…, n_row, row_bytes) of the file to the device unchanged; wait for them."""
    whole = torch.empty(raw.shape, dtype=torch.uint8, device=staging.device)
    out = whole.view(-1, *raw.shape[-2:])
    everything = slice(0, raw.shape[-1])
    send_rows([(0, raw.stack())], len(out), everything, staging, partial(_put_bytes, out))
    staging.flush()
    return whole


def send_rows(
    source: Iterable[tuple[int, TensorBytes]], n_matrix: int, columns: slice, staging: Staging,
    put: Put,
) -> None:  # fmt: skip
    """Send matrices to the device, several at a time, or some rows of one.

    Args:
        source: stacks of matrices, see `cpu.packing.stacks`; a later stack of the same
            matrix holds more of its rows.
        n_matrix: number of all matrices.
        columns: range of bytes of each row to send.
        put: callback for the bytes on the device.
    """
    begun = [0] * n_matrix
    for offset, stack in source:
        rows = stack[:, :, columns]
        if not rows.nbytes:
            continue
        for matrices, part in _chunks(rows.shape, staging.n_bytes):
            here = slice(offset + matrices.start, offset + matrices.stop)
            staging.send(rows[matrices, part], partial(put, here, begun[offset] + part.start))
        for index in range(offset, offset + len(rows)):
            begun[index] += rows.shape[1]


def _chunks(shape: tuple[int, ...], n_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of matrices and rows that fit into a buffer: whole matrices, or whole tiles."""
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


def _byte_columns(tensor: TensorInfo, first: int, stop: int) -> slice:
    """Return the range of bytes of blocks `first` to `stop` of a row."""
    return slice(first * tensor.type.type_size, stop * tensor.type.type_size)


def _put_bytes(out: Tensor, matrices: slice, first: int, raw: Tensor) -> None:
    out[matrices, first : first + raw.shape[1]] = raw.view(out.dtype)
