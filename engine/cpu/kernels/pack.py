"""Packs the blocks of a file into planes: the same bits in another order.

For each GGML type, a `BlockReader` reads the codes and the scales of 32 columns from a block. Byte
offsets and bit positions are those of GGML's block structures (`ggml-common.h`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gguf.constants import GGMLQuantizationType as Kind
from llvmlite import ir

from engine.cpu.kernels.parallel_for import Named, add_kernel, ceil_div, piece
from engine.cpu.kernels.team import add_run
from engine.cpu.kernels.tile_reader import BlockGroup
from engine.cpu.kernels.values import I8, I16, I32, I64, Code, Value, vector
from engine.quants.layout import BLOCK, CODED, LAYOUTS, SUPER, TILE, Layout

CODES = vector(I8, BLOCK)
HALF = vector(I8, BLOCK // 2)


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """32 columns of a row within a block of the file.

    Attributes:
        code: builder of the function that reads them.
        block: address of the block.
        index: index of the 32 columns in the block.
    """

    code: Code
    block: Value
    index: Value

    def bytes(self, offset: Value | int, kind: object = HALF) -> Value:
        """Load a value from an offset in the block, 16 bytes by default."""
        return self.code.load(self.block + offset, kind)

    def byte(self, offset: Value | int) -> Value:
        """Load one byte as an unsigned 64-bit number."""
        return self.code.load(self.block + offset, I8).to(I64, signed=False)

    def shifted(self, codes: Value, shift: Value, mask: int) -> Value:
        """Shift each byte right and mask it."""
        by = self.code.splat(shift.to(I8), codes.kind.count)
        return (codes >> by) & mask


Read = Callable[[BlockColumns], Value]
"""Function that reads one part of 32 columns."""


@dataclass(frozen=True, slots=True)
class BlockReader:
    """The structure of a GGML type's blocks.

    Attributes:
        type_size: size of a block, in bytes.
        n_blocks: number of 32-column parts of a block.
        low: reads the low bits of the codes: 32 bytes, or 16 with two codes each as in the plane.
        scales: reads a row's entries in the plane of scales, as 64-bit numbers.
        high: reads the high bits of the codes, 32 bytes; None if there are none.
        supers: byte offsets of the F16 factors.
    """

    type_size: int
    n_blocks: int
    low: Read
    scales: Callable[[BlockColumns], list[Value]]
    high: Read | None = None
    supers: tuple[int, ...] = ()


def _at(offset: int, kind: object = HALF) -> Read:
    """Read bytes at a fixed offset."""
    return lambda place: place.bytes(offset, kind)


def _high_bits(offset: int) -> Read:
    """Read one bit for each column from a 32-bit number: bit c for column c."""

    def read(place: BlockColumns) -> Value:
        bits = place.code.splat(place.bytes(offset, I32), BLOCK)
        numbers = place.code.vector_of(vector(I32, BLOCK), range(BLOCK))
        return ((bits >> numbers) & 1).to(CODES)

    return read


def _halves(*offsets: int) -> Callable[[BlockColumns], list[Value]]:
    """Read F16 scales at fixed offsets."""
    return lambda place: [place.bytes(at, I16).to(I64, signed=False) for at in offsets]


def _nibbles_k(offset: int) -> Read:
    """Read nibbles; two parts of 32 columns share 32 bytes."""

    def read(place: BlockColumns) -> Value:
        codes = place.bytes(place.index // 2 * 32 + offset, CODES)
        return place.shifted(codes, place.index % 2 * 4, 15)

    return read


def _two_bits(offset: int) -> Read:
    """Read two-bit codes; four parts of 32 columns share 32 bytes."""

    def read(place: BlockColumns) -> Value:
        codes = place.bytes(place.index // 4 * 32 + offset, CODES)
        return place.shifted(codes, place.index % 4 * 2, 3)

    return read


def _one_bit(offset: int) -> Read:
    """Read one-bit codes; eight parts of 32 columns share 32 bytes."""
    return lambda place: place.shifted(place.bytes(offset, CODES), place.index, 1)


def _low_q6(place: BlockColumns) -> Value:
    """Read the low nibbles of Q6_K; parts 0 and 2 of a half block share 32 bytes, as do 1 and 3."""
    half, part = place.index // 4, place.index % 4
    codes = place.bytes(half * 64 + part % 2 * 32, CODES)
    return place.shifted(codes, part // 2 * 4, 15)


def _scales_k(place: BlockColumns) -> list[Value]:
    """Read scale and minimum of Q4_K and Q5_K, six bits each; two are apart in the last four."""
    low, index = place.index % 4 + 4, place.index
    scale, minimum, rest = place.byte(low), place.byte(low + 4), place.byte(low + 8)
    is_last = index >= 4
    where = place.code.where
    return [
        where(is_last, (rest & 15) | ((scale >> 6) << 4), scale & 63),
        where(is_last, (rest >> 4) | ((minimum >> 6) << 4), minimum & 63),
    ]


def _pair(offset: int) -> Callable[[BlockColumns], list[Value]]:
    """Read one byte of scale for each 16 columns."""
    return lambda place: [place.byte(place.index * 2 + (offset + n)) for n in range(2)]


def _scales_q3(place: BlockColumns) -> list[Value]:
    """Read the scales of Q3_K: six bits each, minus 32; four are in 8 bytes, two in 4 bytes."""
    scales = []
    for n in range(2):
        number = place.index * 2 + n
        low = (place.byte(number % 8 + 96) >> (number // 8 * 4)) & 15
        high = (place.byte(number % 4 + 104) >> (number // 4 * 2)) & 3
        scales.append((low | (high << 4)) - 32)
    return scales


def _scales_iq4_xs(place: BlockColumns) -> list[Value]:
    """Read the scale of IQ4_XS: six bits, minus 32; four are in 4 bytes, two in a 16-bit number."""
    low = (place.byte(place.index // 2 + 4) >> (place.index % 2 * 4)) & 15
    high = (place.bytes(2, I16).to(I64, signed=False) >> (place.index * 2)) & 3
    return [(low | (high << 4)) - 32]


def _coded(layout: Layout) -> BlockReader:
    """Return the structure of rows from `engine.quants.codes`: 32 bytes of codes, then scales."""
    size, kind = (4, I32) if layout.scale == "f32" else (2, I16)
    places = range(BLOCK, BLOCK + size * (BLOCK // layout.sub), size)

    def scales(place: BlockColumns) -> list[Value]:
        return [place.bytes(at, kind).to(I64, signed=False) for at in places]

    def low(place: BlockColumns) -> Value:
        return place.bytes(0, CODES) & ((1 << layout.low) - 1)

    def high(place: BlockColumns) -> Value:
        return place.bytes(0, CODES) >> layout.low

    return BlockReader(places.stop, 1, low, scales, high if layout.high else None)


BLOCK_READERS: Mapping[int, BlockReader] = {
    Kind.Q4_0: BlockReader(18, 1, _at(2), _halves(0)),
    Kind.Q4_1: BlockReader(20, 1, _at(4), _halves(0, 2)),
    Kind.Q5_0: BlockReader(22, 1, _at(6), _halves(0), _high_bits(2)),
    Kind.Q5_1: BlockReader(24, 1, _at(8), _halves(0, 2), _high_bits(4)),
    Kind.Q8_0: BlockReader(34, 1, _at(2, CODES), _halves(0)),
    Kind.Q2_K: BlockReader(84, 8, _two_bits(16), _pair(0), supers=(80, 82)),
    Kind.Q3_K: BlockReader(110, 8, _two_bits(32), _scales_q3, _one_bit(0), (108,)),
    Kind.Q4_K: BlockReader(144, 8, _nibbles_k(16), _scales_k, supers=(0, 2)),
    Kind.Q5_K: BlockReader(176, 8, _nibbles_k(48), _scales_k, _one_bit(16), (0, 2)),
    Kind.Q6_K: BlockReader(210, 8, _low_q6, _pair(192), _two_bits(128), (208,)),
    Kind.IQ4_NL: BlockReader(18, 1, _at(2), _halves(0)),
    Kind.IQ4_XS: BlockReader(
        136, 8, lambda p: p.bytes(p.index * 16 + 8), _scales_iq4_xs, supers=(0,)
    ),
    Kind.MXFP4: BlockReader(17, 1, _at(1), lambda place: [place.byte(0)]),
    **{number: _coded(layout) for number, layout in CODED.items()},
}
"""Structure of each GGML type's blocks."""

ARGUMENTS = (
    "raw", "row_bytes", "n_rows", "goal_row", "first", "n_blocks", "planes", "tile_bytes",
)  # fmt: skip
"""Arguments of the kernel. `raw` is the address of the first wanted row in the file, with rows
`row_bytes` apart; of each, `n_blocks` blocks of 32 columns from block `first` on are packed. The
first row becomes row `goal_row` of the planes, whose tiles are `tile_bytes` apart."""


def build(module: ir.Module, type_number: int) -> None:
    """Write `pack(team, *ARGUMENTS)`; other rows of the tiles are left as they are."""
    add_run(module)
    with piece(module, "pack", ARGUMENTS) as (code, given, index):
        _emit_tile(code, LAYOUTS[type_number], BLOCK_READERS[type_number], given, index)
    add_kernel(
        module, "pack", ARGUMENTS, lambda _, g: ceil_div(g["goal_row"] % TILE + g["n_rows"], TILE)
    )


def _emit_tile(code: Code, layout: Layout, source: BlockReader, given: Named, index: Value) -> None:
    """Write a piece: the rows of one tile; tile 0 holds row `goal_row`."""
    raw, row_bytes, n_rows, goal_row, first, n_blocks, planes, tile_bytes = given.values()
    tile_number = goal_row // TILE + index
    begin = tile_number * TILE - goal_row  # of the tile, as a row of `raw`
    begin_here = code.where(begin < 0, code.number(0), begin)
    tile = planes + tile_number * tile_bytes
    skip = first % SUPER
    with code.loop(begin_here, code.min_signed(n_rows, begin + TILE)) as raw_row:
        row, start = raw_row - begin, raw + raw_row * row_bytes
        with code.loop(code.number(0), n_blocks) as block:
            whole = first + block
            number = whole // source.n_blocks
            here = BlockColumns(code, start + number * source.type_size, whole % source.n_blocks)
            places = BlockGroup.of(block, n_blocks, skip).places(layout, tile, block)
            _store_low(layout, source.low(here), places.low + row * 4)
            if source.high is not None:
                _store_lines(source.high(here), layout.high, places.high + row * 4)
            _store_scales(layout, source.scales(here), places.scales, row)
            for part, offset in enumerate(source.supers):
                factor = code.load(here.block + offset, I16)
                code.store(factor, places.supers + (part * 2 * TILE) + row * 2)


def _store_low(layout: Layout, codes: Value, goal: Value) -> None:
    """Store the low bits of one row's codes in the lines of a block."""
    if layout.low == 4:
        if codes.kind.count == BLOCK:
            codes = codes.shuffle(range(16)) | (codes.shuffle(range(16, 32)) << 4)
        _store_words(codes, goal)
    elif layout.low == 2:
        _store_lines(codes, 2, goal)
    else:
        _store_words(codes, goal)


def _store_lines(codes: Value, n_bits: int, goal: Value) -> None:
    """Store 32 codes of `n_bits` bits; each stored line has those of 8 / n_bits lines."""
    words, per_line = codes.bitcast(vector(I32, 8)), 8 // n_bits
    for line in range(n_bits):
        word = words[line * per_line]
        for n in range(1, per_line):
            word = word | (words[line * per_line + n] << (n * n_bits))
        codes.code.store(word, goal + 64 * line)


def _store_words(codes: Value, goal: Value) -> None:
    """Store each four bytes in a line of their own."""
    words = codes.bitcast(vector(I32, codes.kind.count // 4))
    for n in range(words.kind.count):
        codes.code.store(words[n], goal + 64 * n)


def _store_scales(layout: Layout, numbers: list[Value], scales: Value, row: Value) -> None:
    """Store one row's scales in the plane of scales."""
    kind = {"f32": I32, "f16": I16, "f16_min": I16}.get(layout.scale, I8)
    size = kind.width // 8
    for part, number in enumerate(numbers):
        number.code.store(number.to(kind), scales + part * size * TILE + row * size)
