"""Reader of planes of quantised matrices in numpy, as `quants.layout` describes them.

From the parts that it reads, the blocks of the file can be written again. Codes are (rows, blocks
of 32, 32), scales (rows, sub-blocks), with the bits that planes hold.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from engine.formats.quants.layout import LAYOUTS, Extent, Layout

Bytes = NDArray[np.uint8]

TYPES = (
    Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K,
    Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4,
)  # fmt: skip
"""Types whose blocks are packed as they stand in a file."""

SCALE_TYPES = {
    "f16": ("<u2", 1), "f16_min": ("<u2", 2), "e8m0": ("u1", 1), "super": ("u1", 1),
    "super_min": ("u1", 2), "super_nibbles": ("u1", 1),
}  # fmt: skip
"""Type of a scale's number and number of kinds (scale, minimum) per sub-block, by layout."""


@dataclass(frozen=True)
class Parts:
    """The parts of some rows that planes hold.

    Attributes:
        codes: codes, uint8 (rows, n_blocks, 32); signed bytes where the layout has eight bits.
        scales: bits of scales, then of minima if there are any, (rows, n_sub_blocks) each.
        supers: bits of the F16 factors of scales, then of minima, (rows, n_supers) each; empty
            without such.
    """

    codes: Bytes
    scales: list[NDArray[np.unsignedinteger]]
    supers: list[NDArray[np.uint16]]


def planes_apart(planes: NDArray[Any], layout: Layout, n_blocks: int, skip: int) -> NDArray[Any]:
    """Return tiles of a CPU, (tiles, bytes), with one plane after the other, as on a GPU."""
    high, scales, supers, _ = layout.offsets(n_blocks, skip)
    result, at = planes.copy(), 0  # the end of a tile, which nothing is stored in, is the same

    def move(n_bytes: int, goal: int) -> None:
        nonlocal at
        result[:, goal : goal + n_bytes] = planes[:, at : at + n_bytes]
        at += n_bytes

    for group in range(-(-(n_blocks + skip) // 8)):
        first, last = max(0, 8 * group - skip), min(n_blocks, 8 * group - skip + 8)
        move(layout.super_bytes, supers + group * layout.super_bytes)
        move((last - first) * layout.scale_bytes, scales + first * layout.scale_bytes)
        for block in range(first, last):
            move(layout.low_bytes, block * layout.low_bytes)
            move(layout.high_bytes, high + block * layout.high_bytes)
    return result


def as_on_a_gpu(planes: Tensor, number: int, extent: Extent) -> Tensor:
    """Return tiles of a CPU (…, n_tiles, bytes) in the order that a GPU has."""
    tiles = planes.numpy().reshape(-1, planes.shape[-1])
    apart = planes_apart(tiles, LAYOUTS[number], extent.n_blocks, extent.skip)
    return torch.from_numpy(apart).view(planes.shape)


def read(planes: Bytes, layout: Layout, n_rows: int, n_blocks: int, skip: int) -> Parts:
    """Read the rows of tiles of a CPU that lie one behind the other."""
    n_factor = {"super": 1, "super_min": 2, "super_nibbles": 2}.get(layout.scale, 0)
    n_super = -(-(n_blocks + skip) // 8)
    kind, n_kind = SCALE_TYPES[layout.scale]
    n_sub = n_blocks * 32 // layout.sub
    sizes = [
        n_blocks * 64 * layout.low,
        n_blocks * 64 * layout.high,
        n_sub * 16 * n_kind * np.dtype(kind).itemsize,
        n_super * 16 * 2 * n_factor,
    ]
    tile_bytes = -(-sum(sizes) // 64) * 64
    tiles = planes_apart(planes.reshape(-(-n_rows // 16), tile_bytes), layout, n_blocks, skip)
    low, high, scales, supers, _ = np.split(tiles, np.cumsum(sizes), axis=1)
    codes = _lines(low, n_blocks, layout.low)
    if layout.high:
        codes |= _lines(high, n_blocks, layout.high) << layout.low
    per_block = 32 // layout.sub
    numbers = _typed(scales, kind).reshape(len(tiles), n_blocks, n_kind, per_block, 16)
    factors = _typed(supers, "<u2").reshape(len(tiles), n_super, n_factor, 16)
    return Parts(
        codes.transpose(0, 3, 1, 2, 4).reshape(-1, n_blocks, 32)[:n_rows],
        [_by_row(numbers[:, :, n].reshape(len(tiles), n_sub, 16))[:n_rows] for n in range(n_kind)],
        [_by_row(factors[:, :, n])[:n_rows] for n in range(n_factor)],
    )


def to_file(parts: Parts, kind: Kind) -> Bytes:
    """Return the rows as a file has them, (rows, bytes); whole blocks of the file only."""
    blocks = WRITERS[kind](parts)
    return blocks.reshape(len(parts.codes), -1)


def _typed(plane: Bytes, kind: str) -> NDArray[np.unsignedinteger]:
    return np.ascontiguousarray(plane).view(kind)


def _by_row(numbers: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return (tiles, n, 16) as (rows, n)."""
    return numbers.transpose(0, 2, 1).reshape(-1, numbers.shape[1])


def _lines(plane: Bytes, n_blocks: int, n_bits: int) -> Bytes:
    """Return the codes of a plane, (tiles, n_blocks, 8 lines, 16 rows, 4 columns)."""
    stored = plane.reshape(len(plane), n_blocks, n_bits, 16, 4)
    result = np.empty((len(plane), n_blocks, 8, 16, 4), np.uint8)
    for line in range(8):
        if n_bits == 4:
            which, shift = line % 4, line // 4 * 4
        else:
            which, shift = divmod(line, 8 // n_bits)
            shift *= n_bits
        result[:, :, line] = stored[:, :, which] >> shift & ((1 << n_bits) - 1)
    return result


def _halves(numbers: NDArray[np.unsignedinteger]) -> Bytes:
    """Return the two bytes of each number in a new last axis."""
    return np.ascontiguousarray(numbers.astype("<u2")[..., None]).view(np.uint8)


def _nibbles(first: Bytes, second: Bytes) -> Bytes:
    return first & 15 | (second & 15) << 4


def _high_word(codes: Bytes) -> Bytes:
    """Return bit 4 of each of 32 codes as the bits of four bytes."""
    return np.packbits(codes >> 4 & 1, axis=-1, bitorder="little")


def _by_32(parts: Parts, *middle: Bytes) -> Bytes:
    """Return blocks of 32: scales, then `middle`, then codes of four bits."""
    codes = parts.codes
    scales = [_halves(numbers) for numbers in parts.scales]
    return np.concatenate([*scales, *middle, _nibbles(codes[..., :16], codes[..., 16:])], -1)


def _q8_0(parts: Parts) -> Bytes:
    return np.concatenate([_halves(parts.scales[0]), parts.codes], -1)


def _mxfp4(parts: Parts) -> Bytes:
    codes = _nibbles(parts.codes[..., :16], parts.codes[..., 16:])
    return np.concatenate([parts.scales[0][..., None], codes], -1)


def _grouped(numbers: NDArray[np.unsignedinteger], n: int) -> Bytes:
    """Return (rows, supers × n) as (rows, supers, n)."""
    return numbers.reshape(len(numbers), -1, n).astype(np.uint8)


def _codes_k(parts: Parts) -> Bytes:
    """Return the codes of super-blocks, (rows, supers, 8, 32)."""
    return parts.codes.reshape(len(parts.codes), -1, 8, 32)


def _merged(codes: Bytes, n_bits: int) -> Bytes:
    """Merge codes of n_bits from 8 / n_bits blocks in the bytes of one: (rows, supers, bytes)."""
    per_byte = 8 // n_bits
    parted = codes.reshape(*codes.shape[:2], -1, per_byte, codes.shape[-1])
    merged = sum((parted[..., n, :] & ((1 << n_bits) - 1)) << (n * n_bits) for n in range(per_byte))
    return np.asarray(merged, np.uint8).reshape(*codes.shape[:2], -1)


def _q2_k(parts: Parts) -> Bytes:
    factors = [_halves(numbers) for numbers in parts.supers]
    codes = _merged(_codes_k(parts), 2)
    return np.concatenate([_grouped(parts.scales[0], 16), codes, *factors], -1)


def _q3_k(parts: Parts) -> Bytes:
    codes, scales = _codes_k(parts), _grouped(parts.scales[0] + 32, 16)
    low = _nibbles(scales[..., :8], scales[..., 8:])
    quarters = scales.reshape(*scales.shape[:2], 4, 4) >> 4
    high = quarters[..., 0, :] | quarters[..., 1, :] << 2
    high |= quarters[..., 2, :] << 4 | quarters[..., 3, :] << 6
    return np.concatenate(
        [_merged(codes >> 2, 1), _merged(codes, 2), low, high, _halves(parts.supers[0])], -1
    )


def _scales_k(parts: Parts) -> Bytes:
    """Return eight scales and eight minima of six bits in 12 bytes."""
    scales, minima = (_grouped(numbers, 8) for numbers in parts.scales)
    return np.concatenate([
        scales[..., :4] | scales[..., 4:] >> 4 << 6,
        minima[..., :4] | minima[..., 4:] >> 4 << 6,
        _nibbles(scales[..., 4:], minima[..., 4:]),
    ], -1)  # fmt: skip


def _q4_k(parts: Parts) -> Bytes:
    factors = [_halves(numbers) for numbers in parts.supers]
    return np.concatenate([*factors, _scales_k(parts), _merged(_codes_k(parts), 4)], -1)


def _q5_k(parts: Parts) -> Bytes:
    factors, codes = [_halves(numbers) for numbers in parts.supers], _codes_k(parts)
    high = _merged(codes >> 4, 1)
    return np.concatenate([*factors, _scales_k(parts), high, _merged(codes, 4)], -1)


def _q6_k(parts: Parts) -> Bytes:
    codes = _codes_k(parts)
    low = codes.reshape(*codes.shape[:2], 2, 2, 64)  # halves, nibbles, 64 columns
    low = _nibbles(low[..., 0, :], low[..., 1, :]).reshape(*codes.shape[:2], 128)
    high = _merged(codes >> 4, 2)
    return np.concatenate([low, high, _grouped(parts.scales[0], 16), _halves(parts.supers[0])], -1)


def _iq4_xs(parts: Parts) -> Bytes:
    codes, scales = _codes_k(parts), _grouped(parts.scales[0] + 32, 8)
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = ((scales.astype(np.uint16) >> 4) << shifts).sum(-1, dtype=np.uint16)
    low = _nibbles(scales[..., ::2], scales[..., 1::2])
    numbers = _nibbles(codes[..., :16], codes[..., 16:]).reshape(*codes.shape[:2], 128)
    return np.concatenate([_halves(parts.supers[0]), _halves(high), low, numbers], -1)


WRITERS: Mapping[Kind, Callable[[Parts], Bytes]] = {
    Kind.Q4_0: _by_32,
    Kind.Q4_1: _by_32,
    Kind.Q5_0: lambda parts: _by_32(parts, _high_word(parts.codes)),
    Kind.Q5_1: lambda parts: _by_32(parts, _high_word(parts.codes)),
    Kind.Q8_0: _q8_0,
    Kind.Q2_K: _q2_k,
    Kind.Q3_K: _q3_k,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
    Kind.IQ4_NL: _by_32,
    Kind.IQ4_XS: _iq4_xs,
    Kind.MXFP4: _mxfp4,
}
