"""Readers for GGML block structures: codes and scales of 32 columns, for one row or a tile.

Byte offsets and bit positions follow `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gguf.constants import GGMLQuantizationType as Kind

from engine.backends.cpu.kernels.language.values import (
    I8,
    I16,
    I32,
    I64,
    LANES,
    LINE,
    Code,
    Value,
    concatenated,
    vector,
)
from engine.formats.quants.layout import BLOCK, CODED, Layout

CODES = vector(I8, BLOCK)
HALF = vector(I8, BLOCK // 2)
PIECE = BLOCK // 2
"""Bytes loaded at a time, per row."""

NUMBERS = {1: I8, 2: I16, 4: I32}

SPREAD = 0x00204081
"""Factor that spreads four bits over the lowest bits of four bytes."""


class Columns(Protocol):
    """32 columns in one of the file's blocks, for one row or for all rows in a tile.

    Numbers are integers, one per row; codes are bytes, one per row and column (or two columns).

    Attributes:
        index: index of the 32 columns in the block, known at run time or at compile time.
    """

    @property
    def index(self) -> Any: ...

    def half(self, offset: Any) -> Value:
        """Load 16 bytes per row from an offset in the block."""

    def codes(self, offset: Any) -> Value:
        """Load 32 bytes per row from an offset in the block."""

    def number(self, offset: Any, n_bytes: int = 1) -> Value:
        """Load an unsigned number of one, two or four bytes per row."""

    def shifted(self, codes: Value, shift: Any, mask: int) -> Value:
        """Shift each byte right, then mask it."""

    def bits(self, offset: int) -> Value:
        """Load 32 bits per row as codes: bit c for column c."""

    def either(self, is_last: Any, a: Callable[[], Value], b: Callable[[], Value]) -> Value:
        """Return a if a condition on the index holds; otherwise b."""


@dataclass(frozen=True, slots=True)
class RowColumns:
    """One row's columns; see `Columns`.

    Attributes:
        code: builder of the function that reads them.
        block: address of the block.
        index: index of the 32 columns within the block.
    """

    code: Code
    block: Value
    index: Value

    def half(self, offset: Any) -> Value:
        return self.code.load(self.block + offset, HALF)

    def codes(self, offset: Any) -> Value:
        return self.code.load(self.block + offset, CODES)

    def number(self, offset: Any, n_bytes: int = 1) -> Value:
        return self.code.load(self.block + offset, NUMBERS[n_bytes]).to(I64, signed=False)

    def shifted(self, codes: Value, shift: Value, mask: int) -> Value:
        by = self.code.splat(shift.to(I8), codes.kind.count)
        return (codes >> by) & mask

    def bits(self, offset: int) -> Value:
        words = self.code.splat(self.number(offset, 4).to(I32), BLOCK)
        numbers = self.code.vector_of(vector(I32, BLOCK), range(BLOCK))
        return ((words >> numbers) & 1).to(CODES)

    def either(self, is_last: Value, a: Callable[[], Value], b: Callable[[], Value]) -> Value:
        return self.code.where(is_last, a(), b())


@dataclass(frozen=True, slots=True)
class TileColumns:
    """The columns of all rows in a tile; see `Columns`.

    Codes are in line order: four columns of each row, then the next four. Loaded vectors are cached
    because each block is read for several indices.

    Attributes:
        code: builder of the function that reads them.
        blocks: address of the block in each row.
        type_size: size of a block, in bytes.
        index: index of the 32 columns in the block.
        loaded: four vectors of 32-bit words, by offset.
    """

    code: Code
    blocks: Sequence[Value]
    type_size: int
    index: int = 0
    loaded: dict[int, list[Value]] = field(default_factory=dict)

    def at(self, index: int) -> TileColumns:
        """Return other columns in the same block."""
        return replace(self, index=index)

    def half(self, offset: int) -> Value:
        return concatenated([word.bitcast(LINE) for word in self._words(offset)])

    def codes(self, offset: int) -> Value:
        return concatenated([self.half(offset), self.half(offset + BLOCK // 2)])

    def number(self, offset: int, n_bytes: int = 1) -> Value:
        start = min(offset // PIECE * PIECE, self.type_size - PIECE)
        if (offset - start) % 4 + n_bytes > 4:
            start = offset
        word = self._words(start)[(offset - start) // 4]
        if n_bytes == 4:
            return word
        return (word >> (offset - start) % 4 * 8) & ((1 << 8 * n_bytes) - 1)

    def shifted(self, codes: Value, shift: int, mask: int) -> Value:
        return (codes >> shift) & mask

    def bits(self, offset: int) -> Value:
        words = self.number(offset, 4)
        lines = [
            ((((words >> 4 * line) & 15) * SPREAD) & 0x01010101).bitcast(LINE) for line in range(8)
        ]
        return concatenated(lines)

    def either(self, is_last: bool, a: Callable[[], Value], b: Callable[[], Value]) -> Value:
        return a() if is_last else b()

    def _words(self, offset: int) -> list[Value]:
        """Load 16 bytes per row as four vectors, each with one word per row."""
        if offset not in self.loaded:
            rows = [self.code.load(block + offset, vector(I32, 4)) for block in self.blocks]
            self.loaded[offset] = transposed(rows)
        return self.loaded[offset]


def transposed(rows: Sequence[Value]) -> list[Value]:
    """Transpose 16 rows of four words.

    Rows 4g to 4g + 3 share a quarter of a register, so that no word crosses lanes.
    """
    first, second, third, fourth = (concatenated(rows[k::4]) for k in range(4))
    halves = [
        (_zipped(first, second, 1, half), _zipped(third, fourth, 1, half)) for half in range(2)
    ]
    return [_zipped(*halves[n // 2], 2, n % 2) for n in range(4)]


def _zipped(a: Value, b: Value, n: int, half: int) -> Value:
    """Interleave n words each from a and b, out of the lower or upper half of each quarter."""
    chosen = [
        quarter + half * 2 + step + word + (LANES if other else 0)
        for quarter in range(0, LANES, 4)
        for step in range(0, 2, n)
        for other in (False, True)
        for word in range(n)
    ]
    return a.shuffle(chosen, b)


Read = Callable[[Columns], Value]
"""Function that reads one part of 32 columns."""


@dataclass(frozen=True, slots=True)
class BlockReader:
    """Structure of a GGML type's blocks.

    Attributes:
        type_size: size of a block, in bytes.
        n_blocks: number of 32-column parts in a block.
        low: reads the codes' low bits: 32 bytes, or 16 with two codes each, as in the plane.
        scales: reads a row's entries for the plane of scales, as integers.
        high: reads the codes' high bits, 32 bytes.
        supers: byte offsets of the F16 factors.
    """

    type_size: int
    n_blocks: int
    low: Read
    scales: Callable[[Columns], list[Value]]
    high: Read | None = None
    supers: tuple[int, ...] = ()


def _at(offset: int) -> Read:
    return lambda place: place.half(offset)


def _high_bits(offset: int) -> Read:
    return lambda place: place.bits(offset)


def _halves(*offsets: int) -> Callable[[Columns], list[Value]]:
    return lambda place: [place.number(at, 2) for at in offsets]


def _nibbles_k(offset: int) -> Read:
    """Read nibbles; two parts of 32 columns share 32 bytes."""

    def read(place: Columns) -> Value:
        codes = place.codes(place.index // 2 * 32 + offset)
        return place.shifted(codes, place.index % 2 * 4, 15)

    return read


def _two_bits(offset: int) -> Read:
    """Read two-bit codes; four parts of 32 columns share 32 bytes."""

    def read(place: Columns) -> Value:
        codes = place.codes(place.index // 4 * 32 + offset)
        return place.shifted(codes, place.index % 4 * 2, 3)

    return read


def _one_bit(offset: int) -> Read:
    """Read one-bit codes; eight parts of 32 columns share 32 bytes."""
    return lambda place: place.shifted(place.codes(offset), place.index, 1)


def _low_q6(place: Columns) -> Value:
    """Read low nibbles in Q6_K; parts 0 and 2 of a half block share 32 bytes, as do 1 and 3."""
    half, part = place.index // 4, place.index % 4
    codes = place.codes(half * 64 + part % 2 * 32)
    return place.shifted(codes, part // 2 * 4, 15)


def _scales_k(place: Columns) -> list[Value]:
    """Read a scale and minimum in Q4_K or Q5_K, six bits each; the last four of each are split."""
    low, index = place.index % 4 + 4, place.index
    scale, minimum, rest = place.number(low), place.number(low + 4), place.number(low + 8)
    is_last = index >= 4
    return [
        place.either(is_last, lambda: (rest & 15) | ((scale >> 6) << 4), lambda: scale & 63),
        place.either(is_last, lambda: (rest >> 4) | ((minimum >> 6) << 4), lambda: minimum & 63),
    ]


def _pair(offset: int) -> Callable[[Columns], list[Value]]:
    return lambda place: [place.number(place.index * 2 + (offset + n)) for n in range(2)]


def _scales_q3(place: Columns) -> list[Value]:
    """Read scales in Q3_K: six bits each, minus 32; four bits are in 8 bytes, two in 4 bytes."""
    scales = []
    for n in range(2):
        number = place.index * 2 + n
        low = (place.number(number % 8 + 96) >> (number // 8 * 4)) & 15
        high = (place.number(number % 4 + 104) >> (number // 4 * 2)) & 3
        scales.append((low | (high << 4)) - 32)
    return scales


def _scales_iq4_xs(place: Columns) -> list[Value]:
    """Read a scale in IQ4_XS: six bits, minus 32; four are in 4 bytes, two in a 16-bit number."""
    low = (place.number(place.index // 2 + 4) >> (place.index % 2 * 4)) & 15
    high = (place.number(2, 2) >> (place.index * 2)) & 3
    return [(low | (high << 4)) - 32]


def _coded(layout: Layout) -> BlockReader:
    """Return the block structure that `quants.encode` produces: 32 bytes of codes, then scales."""
    size = 4 if layout.scale == "f32" else 2
    places = range(BLOCK, BLOCK + size * (BLOCK // layout.sub), size)

    def scales(place: Columns) -> list[Value]:
        return [place.number(at, size) for at in places]

    def low(place: Columns) -> Value:
        return place.codes(0) & ((1 << layout.low) - 1)

    def high(place: Columns) -> Value:
        return place.codes(0) >> layout.low

    return BlockReader(places.stop, 1, low, scales, high if layout.high else None)


BLOCK_READERS: Mapping[int, BlockReader] = {
    Kind.Q4_0: BlockReader(18, 1, _at(2), _halves(0)),
    Kind.Q4_1: BlockReader(20, 1, _at(4), _halves(0, 2)),
    Kind.Q5_0: BlockReader(22, 1, _at(6), _halves(0), _high_bits(2)),
    Kind.Q5_1: BlockReader(24, 1, _at(8), _halves(0, 2), _high_bits(4)),
    Kind.Q8_0: BlockReader(34, 1, lambda place: place.codes(2), _halves(0)),
    Kind.Q2_K: BlockReader(84, 8, _two_bits(16), _pair(0), supers=(80, 82)),
    Kind.Q3_K: BlockReader(110, 8, _two_bits(32), _scales_q3, _one_bit(0), (108,)),
    Kind.Q4_K: BlockReader(144, 8, _nibbles_k(16), _scales_k, supers=(0, 2)),
    Kind.Q5_K: BlockReader(176, 8, _nibbles_k(48), _scales_k, _one_bit(16), (0, 2)),
    Kind.Q6_K: BlockReader(210, 8, _low_q6, _pair(192), _two_bits(128), (208,)),
    Kind.IQ4_NL: BlockReader(18, 1, _at(2), _halves(0)),
    Kind.IQ4_XS: BlockReader(
        136, 8, lambda place: place.half(place.index * 16 + 8), _scales_iq4_xs, supers=(0,)
    ),
    Kind.MXFP4: BlockReader(17, 1, _at(1), lambda place: [place.number(0)]),
    **{number: _coded(layout) for number, layout in CODED.items()},
}
"""Block structure of each GGML type."""
