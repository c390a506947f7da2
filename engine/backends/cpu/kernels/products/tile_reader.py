"""Decoding of quantised weights from planes, in blocks of 16 rows × 32 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.backends.cpu.kernels.language.isa import MAX_ACTIVATION, Isa
from engine.backends.cpu.kernels.language.values import (
    FLOATS,
    I8,
    I16,
    INTS,
    LINE,
    Code,
    Value,
    vector,
)
from engine.backends.cpu.kernels.products.panels import SUM_FACTOR
from engine.formats.quants.layout import BLOCK, LINE_BYTES, SUPER, TILE, BlockPlaces, Layout

AHEAD, FAR_AHEAD = 6144, 8192
"""Prefetch distances into L2, in bytes, for one token and for several. For one token on AMD
processors, a greater distance (or prefetching into L1) is slower than no prefetch at all."""

BYTES_AHEAD = 2048
"""Prefetch distance for one token and 8-bit weights."""

EACH_BYTE = 0x01010101
"""Factor that copies the lowest byte to all bytes of an i32."""

BYTES, HALVES, INT16S = vector(I8, TILE), vector(I16, TILE), vector(I16, 2 * TILE)


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks that share super-block factors in K-quants.

    Attributes:
        index: index of the group in its tile.
        first, last: range of the blocks.
    """

    index: Value
    first: Value
    last: Value

    @classmethod
    def at(cls, index: Value, n_blocks: Value, skip: Value) -> BlockGroup:
        """Return the group at an index.

        Args:
            skip: number of blocks missing at the start of the first group.
        """
        code, first = index.code, index * SUPER - skip
        last = code.min_signed(first + SUPER, n_blocks)
        return cls(index, code.where(first < 0, code.number(0), first), last)

    @classmethod
    def of(cls, block: Value, n_blocks: Value, skip: Value) -> BlockGroup:
        """Return a block's group."""
        return cls.at((block + skip) // SUPER, n_blocks, skip)

    def places(self, layout: Layout, tile: Value, block: Value) -> BlockPlaces:
        """Return the addresses of a block's parts in a tile."""
        return layout.places(tile, self.index, self.first, self.last, block)


class TileReader:
    """Decodes one block of 16 rows from the planes."""

    def __init__(self, isa: Isa, layout: Layout) -> None:
        self.isa = isa
        self.layout = layout

    def prefetch(self, group: BlockGroup, tile: Value, block: Value, n_tokens: int) -> None:
        """Prefetch a block's share of the group that is some KiB ahead.

        This includes the scales, which are stored apart from the codes; otherwise each group
        would wait for them once. That wait is cheaper than prefetching scales only for one token
        and 8-bit weights, which need no decoding.

        Args:
            tile: address of the tile.
            block: the block being read.
            n_tokens: number of tokens to multiply.
        """
        layout, code = self.layout, tile.code
        if layout.low == 8 and n_tokens == 1:
            at = group.places(layout, tile, block).low + BYTES_AHEAD
            n_lines = layout.low_bytes // LINE_BYTES
        else:
            n_lines = -(-layout.tile_bytes(SUPER, 0) // (SUPER * LINE_BYTES))
            at = group.places(layout, tile, group.first).supers
            at += (block - group.first) * (n_lines * LINE_BYTES)
            at += FAR_AHEAD if n_tokens > 1 else AHEAD
        for line in range(n_lines):
            code.prefetch(at + line * LINE_BYTES, cache=2)

    def lines(self, places: BlockPlaces) -> list[Value]:
        """Decode a block's eight lines: each 16 rows × 4 columns, as i32 of four bytes."""
        layout, code = self.layout, places.low.code
        per_line = 8 // layout.low
        stored = [code.load(places.low + 64 * n, INTS) for n in range(8 // per_line)]
        step = 8 // per_line if layout.low == 4 else 1
        lines = []
        for line in range(8):
            source, place = (
                (line % step, line // step) if layout.low == 4 else divmod(line, per_line)
            )
            lines.append(self._part(stored[source], layout.low, place * layout.low))
        if layout.high:
            lines = self._with_high(lines, places)
        if layout.table:
            return [self._looked_up(line) for line in lines]
        added = self.offset - layout.zero
        if layout.low == 8:
            return [line ^ added * EACH_BYTE for line in lines]
        return [line + added * EACH_BYTE for line in lines] if added else lines

    def _part(self, stored: Value, n_bits: int, shift: int) -> Value:
        if n_bits == 8:
            return stored
        mask = ((1 << n_bits) - 1) * EACH_BYTE
        return ((stored >> shift) if shift else stored) & mask

    def _with_high(self, lines: list[Value], places: BlockPlaces) -> list[Value]:
        n_bits, low = self.layout.high, self.layout.low
        per_line = 8 // n_bits
        stored = [places.high.code.load(places.high + 64 * n, INTS) for n in range(n_bits)]
        result = []
        for number, line in enumerate(lines):
            source, place = divmod(number, per_line)
            mask = (((1 << n_bits) - 1) << low) * EACH_BYTE
            shift = low - place * n_bits
            bits = stored[source] << shift if shift >= 0 else stored[source] >> -shift
            result.append(line | (bits & mask))
        return result

    def _looked_up(self, line: Value) -> Value:
        table = [value + self.offset for value in self.layout.table]
        table = [value - 256 if value > 127 else value for value in table]
        return self.isa.table_lookup(line.code, table, line.bitcast(LINE)).bitcast(INTS)

    @property
    def offset(self) -> int:
        """Offset of the bytes in `lines` from the numbers that scales multiply."""
        if self.isa.signed_weights or not self.zero_point:
            return self.layout.zero
        return self.zero_point - self.centre

    @property
    def centre(self) -> int:
        """Number subtracted before scaling, so that sums stay small."""
        return 16 if self.layout.has_minimum and self.layout.low + self.layout.high > 4 else 0

    @property
    def zero_point(self) -> int:
        """Number that products subtract from the bytes in `lines`: 0 or a power of two."""
        layout = self.layout
        if self.isa.signed_weights:
            return layout.zero + self.centre
        has_sign = layout.zero or layout.table or layout.low == 8 or self.centre
        return SUM_FACTOR if has_sign else 0

    @property
    def fits_int16(self) -> bool:
        """Whether dot products with bytes over 16 columns fit in 16 bits."""
        layout = self.layout
        if layout.table:
            size = max(map(abs, layout.table))
        else:
            most, zero = (1 << (layout.low + layout.high)) - 1, layout.zero + self.centre
            size = 128 if layout.low == 8 else max(zero, most - zero)
        return 16 * MAX_ACTIVATION * size < 1 << 15

    @property
    def largest_weight(self) -> int:
        """Argument `largest` for `Isa.dots`."""
        layout = self.layout
        if not layout.table and layout.low < 8:
            return int((1 << (layout.low + layout.high)) - 1)
        if not self.isa.signed_weights:
            return 255
        return -max(map(abs, layout.table), default=128)

    def scales(self, places: BlockPlaces) -> tuple[list[Value], list[Value]]:
        """Load the sub-blocks' scales, and the negated minima if there are any, F32 for 16 rows."""
        layout, code = self.layout, places.scales.code
        if layout.scale == "f16_min":
            scale, minimum = (
                self.isa.f16_to_f32(code, code.load(places.scales + at, HALVES)) for at in (0, 32)
            )
            return [scale], [minimum]
        if layout.has_supers:
            scales, added = self._super_scales(places)
        else:
            scales, added = [self._own_scale(places, n) for n in range(BLOCK // layout.sub)], []
        return scales, added

    def product_factors(self, places: BlockPlaces) -> tuple[list[Value], list[Value]]:
        """Load the sub-blocks' scales, and the factors for Σ x if there are any."""
        scales, added = self.scales(places)
        if self.centre:
            added = [
                minimum + scale * float(self.centre)
                for scale, minimum in zip(scales, added, strict=True)
            ]
        return scales, added

    @property
    def n_factors(self) -> tuple[int, int]:
        """Number of vectors in each of the two lists from `product_factors`."""
        layout = self.layout
        n_scales = 1 if layout.scale == "f16_min" else BLOCK // layout.sub
        return n_scales, n_scales if layout.has_minimum else 0

    def _own_scale(self, places: BlockPlaces, sub: int) -> Value:
        """Load a sub-block's scale (F16, F32 or an exponent), in a type without factors."""
        code: Code = places.scales.code
        if self.layout.scale == "f16":
            return self.isa.f16_to_f32(code, code.load(places.scales + 32 * sub, HALVES))
        if self.layout.scale == "f32":
            return code.load(places.scales + 64 * sub, FLOATS)
        exponent = code.load(places.scales + 16 * sub, BYTES).to(INTS, signed=False)
        tiny = code.constant(INTS, 0x00200000) << exponent
        return code.where(exponent < 2, tiny, (exponent - 1) << 23).bitcast(FLOATS)

    def _super_scales(self, places: BlockPlaces) -> tuple[list[Value], list[Value]]:
        """Load the sub-blocks' scales and negated minima (if any), times F16 factors."""
        layout, code = self.layout, places.scales.code
        subs = range(BLOCK // layout.sub)
        factor = self.isa.f16_to_f32(code, code.load(places.supers, HALVES))
        stored = [code.load(places.scales + 16 * n, BYTES) for n in subs]
        if layout.scale == "super":
            signed = layout.signed_scale
            return [factor * s.to(INTS, signed=signed).to(FLOATS) for s in stored], []
        minimum = self.isa.f16_to_f32(code, code.load(places.supers + 32, HALVES)) * -1.0
        if layout.scale == "super_nibbles":
            wide = [s.to(INTS, signed=False) for s in stored]
            scales, minima = [w & 15 for w in wide], [w >> 4 for w in wide]
        else:
            scales = [s.to(INTS, signed=False) for s in stored]
            at = places.scales + 16 * len(subs)
            minima = [code.load(at + 16 * n, BYTES).to(INTS, signed=False) for n in subs]
        return [factor * s.to(FLOATS) for s in scales], [minimum * m.to(FLOATS) for m in minima]


class Int16Reader(TileReader):
    """Decodes one block of 16 rows from the planes to int16.

    If a type has integer scales and a factor for 256 columns, codes are multiplied by their scale,
    so that all 256 columns are added up as integers and scaled once; otherwise, only 32 or 16 are.
    """

    @property
    def offset(self) -> int:
        return self.layout.zero

    @property
    def centre(self) -> int:
        return 0

    @property
    def n_subs(self) -> int:
        """Number of sub-blocks per block."""
        return 1 if self.layout.scale == "f16_min" else BLOCK // self.layout.sub

    @property
    def n_scales(self) -> int:
        """Number of scale vectors per block: 0 if the numbers include the scales."""
        return 0 if self.layout.has_supers else self.n_subs

    @property
    def n_minima(self) -> int:
        """Number of vectors of minima per block."""
        return self.n_subs if self.layout.has_minimum else 0

    def numbers(self, places: BlockPlaces) -> list[Value]:
        """Decode a block: 16 × i32 for each pair of columns, multiplied by integer scales.

        Columns are in the order of `int16_panels.COLUMN_ORDER`.
        """
        codes = self.codes(places)
        if not self.layout.has_supers:
            return codes
        scales = [
            ((scale & 0xFFFF) | (scale << 16)).bitcast(INT16S)  # for a row's two numbers
            for scale in self.integer_scales(places)
        ]
        return [
            (pair.bitcast(INT16S) * scales[n * len(scales) // len(codes)]).bitcast(INTS)
            for n, pair in enumerate(codes)
        ]

    def codes(self, places: BlockPlaces) -> list[Value]:
        """Decode a block like `numbers`, but without multiplying by integer scales."""
        lines, layout = self.lines(places), self.layout
        is_signed = bool(layout.table) or layout.low == 8
        found = []
        for line in lines:
            codes = line.bitcast(INT16S)
            if is_signed:
                halves = [(codes << 8).arithmetic_shift(8), codes.arithmetic_shift(8)]
            else:
                halves = [codes & 255, codes >> 8]
            for numbers in halves:
                if layout.zero:
                    numbers = numbers - layout.zero
                found.append(numbers.bitcast(INTS))
        return found

    def integer_scales(self, places: BlockPlaces) -> list[Value]:
        """Load the sub-blocks' integer scales, i32 for 16 rows; only if the type has them."""
        code, layout = places.scales.code, self.layout
        found = []
        for n in range(BLOCK // layout.sub):
            stored = code.load(places.scales + 16 * n, BYTES)
            wide = stored.to(INTS, signed=layout.signed_scale)
            found.append(wide & 15 if layout.scale == "super_nibbles" else wide)
        return found

    def group_factor(self, places: BlockPlaces) -> Value:
        """Load the factor for 256 columns, F32 for 16 rows, if the type has one."""
        code = places.supers.code
        return self.isa.f16_to_f32(code, code.load(places.supers, HALVES))

    def block_factors(self, places: BlockPlaces) -> Sequence[Value]:
        """Load a block's scales, `n_scales` of them, and its `n_minima` minima; F32 for 16 rows."""
        scales, added = self.scales(places)
        return [*scales[: self.n_scales], *added]


def for_each_group(
    code: Code, n_blocks: Value, skip: Value, body: Callable[[BlockGroup], None]
) -> None:
    """Emit a loop over a tile's groups."""
    with code.loop(code.number(0), (n_blocks + skip + (SUPER - 1)) // SUPER) as index:
        body(BlockGroup.at(index, n_blocks, skip))
