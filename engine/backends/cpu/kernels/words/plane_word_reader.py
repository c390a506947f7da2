"""Quantised weights in planes as words of 16 bits, for activations in words.

Codes are whole numbers. Where a type has integer scales and a factor for 256 columns, they are
multiplied by the scale, so that all of these columns add up in integers and are scaled once. Else
those of a scale do: 32 or 16 columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.cpu.kernels.language.values import I16, INTS, LANES, Value, vector
from engine.backends.cpu.kernels.products.tile_reader import BYTES, HALVES, TileReader
from engine.formats.quants.layout import BLOCK, BlockPlaces

WORDS = vector(I16, 2 * LANES)


class WordReader(TileReader):
    """Decodes one block of 16 rows from the planes to words."""

    @property
    def offset(self) -> int:
        return self.layout.zero

    @property
    def centre(self) -> int:
        return 0

    @property
    def n_subs(self) -> int:
        """Number of sub-blocks of a block."""
        return 1 if self.layout.scale == "f16_min" else BLOCK // self.layout.sub

    @property
    def n_scales(self) -> int:
        """Number of vectors of scales of a block: none where they are part of the words."""
        return 0 if self.layout.has_supers else self.n_subs

    @property
    def n_minima(self) -> int:
        """Number of vectors of what is added to a block's weights."""
        return self.n_subs if self.layout.has_minimum else 0

    def words(self, places: BlockPlaces) -> list[Value]:
        """Decode the words of a block, 16 × i32 for each of its pairs of columns.

        They are in the order of `plane_words.COLUMN_ORDER`, and multiplied by integer scales.
        """
        codes = self.codes(places)
        if not self.layout.has_supers:
            return codes
        scales = [
            ((scale & 0xFFFF) | (scale << 16)).bitcast(WORDS)  # for both words of a row
            for scale in self.integer_scales(places)
        ]
        return [
            (words.bitcast(WORDS) * scales[n * len(scales) // len(codes)]).bitcast(INTS)
            for n, words in enumerate(codes)
        ]

    def codes(self, places: BlockPlaces) -> list[Value]:
        """Decode what `words` does, without integer scales."""
        lines, layout = self.lines(places), self.layout
        is_signed = bool(layout.table) or layout.low == 8
        found = []
        for line in lines:
            codes = line.bitcast(WORDS)
            if is_signed:
                halves = [(codes << 8).arithmetic_shift(8), codes.arithmetic_shift(8)]
            else:
                halves = [codes & 255, codes >> 8]
            for words in halves:
                if layout.zero:
                    words = words - layout.zero
                found.append(words.bitcast(INTS))
        return found

    def integer_scales(self, places: BlockPlaces) -> list[Value]:
        """Load the sub-blocks' integer scales, i32 for 16 rows; only where there are some."""
        code, layout = self.code, self.layout
        found = []
        for n in range(BLOCK // layout.sub):
            stored = code.load(places.scales + 16 * n, BYTES)
            wide = stored.to(INTS, signed=layout.signed_scale)
            found.append(wide & 15 if layout.scale == "super_nibbles" else wide)
        return found

    def group_factor(self, places: BlockPlaces) -> Value:
        """Load the factor of 256 columns, F32 for 16 rows; only where there is one."""
        return self.isa.f16_to_f32(self.code, self.code.load(places.supers, HALVES))

    def block_factors(self, places: BlockPlaces) -> Sequence[Value]:
        """Load a block's scales, `n_scales` of them, and its `n_minima` minima; F32 for 16 rows."""
        scales, added = self.scales(places)
        return [*scales[: self.n_scales], *added]
