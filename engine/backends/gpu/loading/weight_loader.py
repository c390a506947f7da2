"""Loads weights into a GPU: parts of the file are copied to it and packed into planes there.

The host keeps only a few buffers of a model in memory; see `engine.backends.gpu.loading.staging`.
Packing reorders the same bits as the CPU's packer (`cpu.kernels.packing.pack`), but with torch, so
it works on any device. It takes some rows at a time, so that `PACK_BYTES` of scratch are enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from typing import TYPE_CHECKING

import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.backends.cpu.packing import DTYPES, in_parts, joined_shape, stacks
from engine.backends.gpu.loading.staging import Staging
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.formats.quants import block_formats, dequantise
from engine.formats.quants.block_formats import five_bits, read_field, unpack_planes
from engine.formats.quants.dequantise import QUANTS, Quant
from engine.formats.quants.encode import codes_and_scales
from engine.formats.quants.layout import (
    BLOCK,
    CODED,
    LAYOUTS,
    TILE,
    Extent,
    Layout,
    file_blocks,
    n_tiles,
)
from engine.planning.footprint import arena_key, packed_bytes, sizes_of_pieces, slot_pieces
from engine.planning.memory import PACK_BYTES, aligned_bytes, is_arena, staging_bytes

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensor_bytes import TensorBytes
    from engine.formats.gguf.tensors import TensorInfo
    from engine.model.forward.operands import Weight
    from engine.model.layers.module import Slot
    from engine.model.sharding.placement import Slices

WEIGHT_BYTES = 8  # max. bytes that packing needs per weight, for any type

PIECE_WEIGHTS = PACK_BYTES // WEIGHT_BYTES
"""Weights to pack at a time: enough for operations to last longer than their launches."""

Read = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class BlockFields:
    """Fields in a type's blocks, as functions of blocks uint8 (n, type_size).

    Attributes:
        codes: codes, uint8 (n, block_size), with the bits for both planes.
        scales: scales, with the order and width of their plane, for 32 columns together.
        supers: byte offsets of the F16 factors in a super-block.
    """

    codes: Read
    scales: Read
    supers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlaneParts:
    """Contents of the planes for some rows in some matrices.

    Attributes:
        low, high: words of codes (n, n_row, n_blocks, lines); None if there is no such plane.
        scales: scales (n, n_row, n_blocks, parts).
        supers: factors for super-blocks, int16 (n, n_row, n_supers, parts), or None.
    """

    low: Tensor
    high: Tensor | None
    scales: Tensor
    supers: Tensor | None


def pack(raw: Tensor, type_number: int, extent: Extent, out: Tensor, out_row: int = 0) -> None:
    """Write rows from the file into planes; other rows in the planes stay as they are.

    Args:
        raw: some rows of each matrix, uint8 (n, n_row, row_bytes), with the blocks in the file
            that cover the extent.
        out: planes, uint8 (n, n_tile, tile_bytes), on the same device.
        out_row: index of the row in the planes at which to start writing.
    """
    quant, n_row = QUANTS[type_number], raw.shape[1]
    n_weights = raw.shape[2] // quant.type_size * quant.block_size
    fitting = max(1, PIECE_WEIGHTS // max(1, n_weights))
    step = n_row if fitting >= n_row else max(TILE, fitting // TILE * TILE)
    n = max(1, fitting // max(1, n_row))
    if not raw.numel():
        return
    for outs, some in zip(torch.split(out, n), torch.split(raw, n), strict=True):
        for first in range(0, n_row, step):
            parts = _parts(some[:, first : first + step], type_number, extent)
            _store(parts, LAYOUTS[type_number], extent, outs, out_row + first)


def _parts(raw: Tensor, type_number: int, extent: Extent) -> PlaneParts:
    quant, layout = QUANTS[type_number], LAYOUTS[type_number]
    blocks, rows = raw.reshape(-1, quant.type_size), raw.shape[:2]
    codes, scales = _codes_and_scales(blocks, type_number, quant, layout)
    per_block = quant.block_size // BLOCK
    first = extent.first % per_block
    wanted = slice(first, first + extent.n_blocks)
    words = codes.reshape(*rows, -1, BLOCK)[:, :, wanted].contiguous().view(torch.int32)
    of_blocks = scales.reshape(len(blocks) * per_block, -1)
    return PlaneParts(
        _lines(words, layout.low),
        _lines(words >> layout.low, layout.high) if layout.high else None,
        of_blocks.view(*rows, -1, of_blocks.shape[1])[:, :, wanted],
        _supers(blocks, BLOCK_FIELDS[type_number].supers, rows) if layout.has_supers else None,
    )


def _codes_and_scales(
    blocks: Tensor, type_number: int, quant: Quant, layout: Layout
) -> tuple[Tensor, Tensor]:
    if type_number in CODED:
        codes, scales = codes_and_scales(blocks, quant, layout)
        return codes, scales.view(torch.int32 if layout.scale == "f32" else torch.int16)
    source = BLOCK_FIELDS[type_number]
    return source.codes(blocks), source.scales(blocks)


def _supers(blocks: Tensor, offsets: tuple[int, ...], rows: torch.Size) -> Tensor:
    factors = torch.cat([read_field(blocks, at, at + 2, torch.int16) for at in offsets], dim=1)
    return factors.view(*rows, -1, len(offsets))


def _lines(words: Tensor, n_bits: int) -> Tensor:
    """Return a plane's lines (…, n_bits), given a block's eight words (…, 8).

    Each byte in the words is a code; its lowest n_bits bits are stored.
    """
    if n_bits == 8:
        return words
    codes = words & (((1 << n_bits) - 1) * 0x01010101)
    per_line = 8 // n_bits
    if n_bits == 4:
        parts = codes.view(*codes.shape[:-1], per_line, n_bits).unbind(-2)
    else:
        parts = codes.view(*codes.shape[:-1], n_bits, per_line).unbind(-1)
    return reduce(torch.bitwise_or, (part << (n * n_bits) for n, part in enumerate(parts)))


def _store(parts: PlaneParts, layout: Layout, extent: Extent, out: Tensor, out_row: int) -> None:
    high, scales, supers, tile_bytes = layout.offsets(extent.n_blocks, extent.skip)
    planes_of = ((parts.low, 0), (parts.high, high), (parts.scales, scales), (parts.supers, supers))
    assert out.shape[-1] == tile_bytes, "the planes have another extent"
    for found, start in planes_of:
        if found is not None:
            _scatter(found, out, start, out_row)


def _scatter(found: Tensor, out: Tensor, start: int, out_row: int) -> None:
    """Write a plane's content (n, n_row, a, b) in tile order, (n, tiles, a, b, 16).

    `start` is the plane's byte offset in a tile.
    """
    n, n_row, a, b = found.shape
    stop = start + a * b * TILE * found.itemsize
    plane = out[..., start:stop].view(found.dtype).view(*out.shape[:2], a, b, TILE)
    for rows, tiles, lanes in _spans(out_row, n_row):
        some = found[:, rows].reshape(n, tiles.stop - tiles.start, -1, a, b)
        plane[:, tiles, :, :, lanes] = some.permute(0, 1, 3, 4, 2)


def _spans(out_row: int, n_row: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield three slices: rows, the tiles that they fill, and the rows within each of these tiles.

    The rows in each item fill whole tiles, or part of one.
    """
    row = 0
    while row < n_row:
        tile, lane = divmod(out_row + row, TILE)
        if lane or n_row - row < TILE:
            n = min(TILE - lane, n_row - row)
            yield slice(row, row + n), slice(tile, tile + 1), slice(lane, lane + n)
        else:
            n = (n_row - row) // TILE * TILE
            yield slice(row, row + n), slice(tile, tile + n // TILE), slice(0, TILE)
        row += n


def _nibbles(start: int) -> Read:
    return lambda blocks: unpack_planes(blocks[:, start:], 4)


def _halves(*offsets: int) -> Read:
    return lambda blocks: _supers(blocks, offsets, torch.Size([len(blocks)]))


def _five(start: int) -> Read:
    """Return a reader for five-bit codes: four bytes of fifth bits, then 16 bytes of the others."""
    return lambda blocks: five_bits(blocks[:, start : start + 4], blocks[:, start + 4 :])


def _bytes(start: int, stop: int) -> Read:
    return lambda blocks: blocks[:, start:stop]


def _six_bits(blocks: Tensor) -> Tensor:
    return torch.stack(block_formats.six_bits(blocks), dim=-1)


BLOCK_FIELDS: Mapping[int, BlockFields] = {
    Kind.Q4_0: BlockFields(_nibbles(2), _halves(0)),
    Kind.Q4_1: BlockFields(_nibbles(4), _halves(0, 2)),
    Kind.Q5_0: BlockFields(_five(2), _halves(0)),
    Kind.Q5_1: BlockFields(_five(4), _halves(0, 2)),
    Kind.Q8_0: BlockFields(_bytes(2, 34), _halves(0)),
    Kind.Q2_K: BlockFields(block_formats.q2_k_codes, _bytes(0, 16), (80, 82)),
    Kind.Q3_K: BlockFields(block_formats.q3_k_codes, block_formats.q3_k_scales, (108,)),
    Kind.Q4_K: BlockFields(block_formats.q4_k_codes, _six_bits, (0, 2)),
    Kind.Q5_K: BlockFields(block_formats.q5_k_codes, _six_bits, (0, 2)),
    Kind.Q6_K: BlockFields(block_formats.q6_k_codes, _bytes(192, 208), (208,)),
    Kind.IQ4_NL: BlockFields(_nibbles(2), _halves(0)),
    Kind.IQ4_XS: BlockFields(dequantise.iq4_xs_codes, dequantise.iq4_xs_scales, (0,)),
    Kind.MXFP4: BlockFields(_nibbles(1), _bytes(0, 1)),
}
"""Fields for all types that are packed as in the file; offsets as in `ggml-common.h`."""


STORAGE = "kernels"  # storage of the matrices; see `engine.planning.plan.DevicePlan`


class Arenas:
    """Memory for a rank's parts of tensors; freed once all tensors that share it are freed.

    Args:
        slots: tensors that will be loaded, each once.
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
        """Return zeroed memory for one part of a tensor."""
        key = arena_key(slot, STORAGE)
        if key not in self._left:
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        n_bytes = prod(shape) * dtype.itemsize
        free = self._open.pop(key, None)
        if free is None:
            free = torch.zeros(self._left[key], dtype=torch.uint8, device=self._device)
        found, rest = free[:n_bytes], free[aligned_bytes(n_bytes) :]
        if len(rest):
            self._open[key] = rest  # otherwise, only the tensors keep the memory alive
        return found.view(dtype).view(*shape)


Zeros = Callable[[Sequence[int], torch.dtype], Tensor]
"""Function that returns zeroed device memory with a given shape and type."""

Put = Callable[[slice, int, Tensor], None]
"""Callback with a slice of matrices, the first row, and their bytes (n, n_row, …) on the device."""


def staging_for(
    slots: Sequence[Slot], rank: int, device: torch.device, report: Callable[[int], None]
) -> Staging:
    """Return staging buffers of a suitable size for a rank's parts of the tensors.

    `report` is called with the number of bytes read from the file; it may raise to stop.
    """
    total = sum(packed_bytes(slot, piece) for slot in slots for piece in slot_pieces(slot, rank))
    longest = max((slot.tensor.row_bytes for slot in slots), default=0)
    return Staging(device, report, max(staging_bytes(total), longest))


def load_for_gpu(
    file: GGUFFile, slot: Slot, pieces: Sequence[Slices], staging: Staging, arenas: Arenas,
    x_bytes: int,
) -> Weight:  # fmt: skip
    """Load a rank's parts of a matrix, in planes, or unquantised as in the file.

    They are complete once `staging` has finished.

    Args:
        pieces: the rank's slices of the file's tensor.
        x_bytes: bytes per quantised activation; see `engine.planning.footprint.x_bytes`.
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
    """Copy bytes (…, n_row, row_bytes) from the file to the device unchanged; wait for them."""
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
        source: stacks of matrices; see `cpu.packing.stacks`; a later stack for the same matrix has
            more of its rows.
        n_matrix: total number of matrices.
        columns: range of bytes to send from each row.
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
    return slice(first * tensor.type.type_size, stop * tensor.type.type_size)


def _put_bytes(out: Tensor, matrices: slice, first: int, raw: Tensor) -> None:
    out[matrices, first : first + raw.shape[1]] = raw.view(out.dtype)
