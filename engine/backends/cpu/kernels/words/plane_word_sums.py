"""Sums of products of 256 columns in words, of some tiles with some tokens.

What is written to a token's sum for each group of columns, in this order, so that its bits do not
depend on the tokens computed with it: minima times sums of activations, block by block, and the
exact integer sums, each times the token's factor and the rows' scale. Where a block has scales of
its own, its integer sums follow its minima; else those of the group are behind all minima. A
token's sum is the product divided by `plane_words.BALANCE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.backends.cpu.kernels.language.values import F32, I32, INTS, Value, Variable
from engine.backends.cpu.kernels.words.plane_word_reader import WordReader
from engine.backends.cpu.kernels.words.plane_words import (
    BLOCK_BYTES,
    N_PAIRS,
    factor_of,
    pair,
    sum_of,
)

MIN_SUMS = 8
"""Number of sums that processors add to at a time; fewer wait for each other."""


@dataclass(frozen=True, slots=True)
class TileGroup:
    """A group of columns of a tile, and where its products are added.

    Attributes:
        words: loads or decodes the words of a pair of columns of a block, by the block's index in
            the group and the pair's number.
        factors: loads a block's scales, then its minima.
        factor: loads the factor of all columns, where the type has one.
        sums: sums of some tokens.
        scales: loads a block's integer scales, i32, where its words are not multiplied by them yet.
    """

    words: Callable[[Value, int], Value]
    factors: Callable[[Value], Sequence[Value]]
    factor: Callable[[], Value]
    sums: Sequence[Variable]
    scales: Callable[[Value], Sequence[Value]] | None = None


class GroupSums:
    """Writer of the sums of a group.

    Args:
        reader: says what the type has.
        n_tokens: number of tokens of the panel.
        first_token: first token that is multiplied.
        each_block: writes what else is done with each block, given its index in the group.
    """

    def __init__(
        self, reader: WordReader, n_tokens: int, first_token: int = 0,
        each_block: Callable[[Value], None] | None = None,
    ) -> None:  # fmt: skip
        self._reader, self._code = reader, reader.code
        self._n_tokens, self._first = n_tokens, first_token
        self._each_block = each_block

    def emit(self, tiles: Sequence[TileGroup], panel: Value, n_blocks: Value) -> None:
        """Write all of a group.

        Args:
            panel: address of the group's first block in the panel.
            n_blocks: number of the group's blocks.
        """
        if self._reader.n_scales:
            self._emit_blocks(tiles, panel, n_blocks)
            return
        if self._reader.n_minima:
            self.emit_minima(tiles, panel, n_blocks)
        self.emit_products(tiles, panel, n_blocks)

    def emit_minima(self, tiles: Sequence[TileGroup], panel: Value, n_blocks: Value) -> None:
        """Write the products of a group's minima with sums of activations."""
        with self._code.loop(self._code.number(0), n_blocks) as block:
            self._add_minima(tiles, panel + block * (self._n_tokens * BLOCK_BYTES), block)

    def emit_products(self, tiles: Sequence[TileGroup], panel: Value, n_blocks: Value) -> None:
        """Write the products of a group whose columns have one factor."""
        parts = self._parts(tiles)
        with self._code.loop(self._code.number(0), n_blocks) as block:
            at = panel + block * (self._n_tokens * BLOCK_BYTES)
            self._add_others(block)
            if tiles[0].scales is None:
                self._multiply(tiles, at, block, range(N_PAIRS), parts)
            else:
                self._multiply_scaled(tiles, at, block, parts)
        self._add_scaled([tile.factor() for tile in tiles], tiles, panel, parts)

    def _emit_blocks(self, tiles: Sequence[TileGroup], panel: Value, n_blocks: Value) -> None:
        """Write a group whose blocks have scales of their own."""
        n_scales = self._reader.n_scales
        size = N_PAIRS // n_scales
        with self._code.loop(self._code.number(0), n_blocks) as block:
            at = panel + block * (self._n_tokens * BLOCK_BYTES)
            self._add_others(block)
            self._add_minima(tiles, at, block)
            for n in range(n_scales):
                parts = self._parts(tiles)
                self._multiply(tiles, at, block, range(n * size, (n + 1) * size), parts)
                scales = [tile.factors(block)[n] for tile in tiles]
                self._add_scaled(scales, tiles, at, parts)

    def _add_others(self, block: Value) -> None:
        """Write what else is done with a block."""
        if self._each_block:
            self._each_block(block)

    def _add_minima(self, tiles: Sequence[TileGroup], panel: Value, block: Value) -> None:
        """Write the products of a block's minima, the block being at `panel`."""
        code, n_minima = self._code, self._reader.n_minima
        if not n_minima:
            return
        minima = [tile.factors(block)[self._reader.n_scales :] for tile in tiles]
        for n in range(n_minima):
            for index in range(len(tiles[0].sums)):
                at = sum_of(self._n_tokens, self._first + index, n, n_minima)
                x = code.splat(code.load(panel + at, F32))
                for tile, found in zip(tiles, minima, strict=True):
                    total = tile.sums[index]
                    total.set(code.fma(found[n], x, total.get()))

    def _parts(self, tiles: Sequence[TileGroup]) -> list[list[list[Variable]]]:
        """Return integer sums of 0 for each tile and token, several where there are few of them."""
        code, n_sums = self._code, len(tiles[0].sums)
        n_parts = max(1, min(4, MIN_SUMS // (len(tiles) * n_sums)))
        zero = code.constant(INTS, 0)
        return [
            [[code.variable(zero) for _ in range(n_parts)] for _ in range(n_sums)] for _ in tiles
        ]

    def _multiply(
        self, tiles: Sequence[TileGroup], panel: Value, block: Value, pairs: Sequence[int],
        parts: Sequence[Sequence[Sequence[Variable]]],
    ) -> None:  # fmt: skip
        """Write the products of some pairs of columns of a block, which is at `panel`."""
        code = self._code
        for number in pairs:
            weights = [tile.words(block, number) for tile in tiles]
            for index in range(len(tiles[0].sums)):
                x = code.splat(code.load(panel + pair(self._first + index, number), I32))
                for weight, found in zip(weights, parts, strict=True):
                    total = found[index][number % len(found[index])]
                    total.set(self._reader.isa.word_dots(code, total.get(), weight, x))

    def _multiply_scaled(
        self, tiles: Sequence[TileGroup], panel: Value, block: Value,
        parts: Sequence[Sequence[Sequence[Variable]]],
    ) -> None:  # fmt: skip
        """Write what `_multiply` does, for words that are not multiplied by their scales yet."""
        scales = [tile.scales(block) for tile in tiles if tile.scales]
        n_scales = len(scales[0])
        size = N_PAIRS // n_scales
        for n in range(n_scales):
            own = self._parts(tiles)
            self._multiply(tiles, panel, block, range(n * size, (n + 1) * size), own)
            for scale, totals, found in zip(scales, parts, own, strict=True):
                for total, numbers in zip(totals, found, strict=True):
                    first, *others = [number.get() for number in numbers]
                    total[0].set(total[0].get() + sum(others, first) * scale[n])

    def _add_scaled(
        self, scales: Sequence[Value], tiles: Sequence[TileGroup], panel: Value,
        parts: Sequence[Sequence[Sequence[Variable]]],
    ) -> None:  # fmt: skip
        """Write the addition of scaled integer sums; `panel` is any block of the group."""
        code = self._code
        for index in range(len(tiles[0].sums)):
            at = factor_of(self._n_tokens, self._first + index)
            factor = code.splat(code.load(panel + at, F32))
            for scale, tile, found in zip(scales, tiles, parts, strict=True):
                first, *others = [part.get() for part in found[index]]
                number = sum(others, first).to(scale.kind) * factor
                tile.sums[index].set(code.fma(number, scale, tile.sums[index].get()))
