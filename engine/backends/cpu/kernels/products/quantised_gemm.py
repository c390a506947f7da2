"""Quantised weights times one- or two-byte activations: operands for `kernels.products.gemm`.

Within a block of 32 columns (or a sub-block of 16), weights are small integers q with a scale, and
activations are bytes with a scale d: `Σ w x = scale × d × Σ q x - minimum × Σ x`, an exact integer
sum and a few floating-point steps. Dot products of bytes over 16 columns are exact. If they fit in
16 bits, so is their sum, each multiplied by its scale in units (`kernels.products.panels`); other
sums are F32. Signed weights have an offset that makes them positive, which the tokens' sums
correct. If loads limit a product, two tiles are multiplied by the same token's numbers.

For int16 activations, see `int16_gemm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    LINE,
    Code,
    Value,
    Variable,
)
from engine.backends.cpu.kernels.products import gemm
from engine.backends.cpu.kernels.products.gemm import VECTOR_BYTES, Operands, Prefetch, Products
from engine.backends.cpu.kernels.products.int16_gemm import QuantisedInt16
from engine.backends.cpu.kernels.products.panel_packing import are_int16
from engine.backends.cpu.kernels.products.panels import SUM_FACTOR, PanelOffsets
from engine.backends.cpu.kernels.products.tile_reader import BlockGroup, TileReader
from engine.formats.quants.layout import SUPER, Layout, panel_block_bytes

N_LINES = 8
"""Number of lines per block, each 16 rows × 4 columns."""

BLOCK_BYTES = (N_LINES + 4) * VECTOR_BYTES
"""Size in bytes of an unpacked block: its lines, then up to four vectors of factors."""

PAIR_TOKENS = 4
"""Number of tokens whose sums with two tiles fit in the registers."""

Factors = tuple[Sequence[Value], Sequence[Value]]
"""A block's scales, and factors for Σ x; see `TileReader.product_factors`."""


def build(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int = 1) -> None:
    """Emit `multiply(pool, *gemm.ARGUMENTS)` for matrices of one layout."""
    gemm.build(module, operands(isa, layout, x_bytes))


def operands(isa: Isa, layout: Layout, x_bytes: int = 1) -> Operands:
    """Return the operands for quantised matrices with a given layout."""
    if are_int16(isa, x_bytes):
        return QuantisedInt16(isa, layout)
    return QuantisedBytes(isa, layout, x_bytes)


class QuantisedBytes(Operands):
    """Quantised matrices and one- or two-byte activations."""

    unpacked_bytes = SUPER * BLOCK_BYTES

    def __init__(self, isa: Isa, layout: Layout, x_bytes: int) -> None:
        super().__init__(isa, panel_block_bytes(x_bytes), layout.tile_bytes(SUPER, 0))
        self._reader, self._layout, self._x_bytes = TileReader(isa, layout), layout, x_bytes
        self.widths = (2, 1) if shares_numbers(self._reader, x_bytes) else (1,)

    @property
    def steps(self) -> Mapping[str, Callable[[Products], None]]:
        return {"multiply": self._multiply}

    def group(self, tile: Value, group: BlockGroup) -> Value:
        found: Value = group.places(self._layout, tile, group.first).supers
        return found

    def tokens_at_once(self, size: int, width: int) -> int:
        return size if width == 1 else PAIR_TOKENS

    def multiply_tile(self, code: Code, tile: Value, group: BlockGroup, products: Products) -> None:
        reader, offsets = self._reader, PanelOffsets(products.size, self._x_bytes)
        with code.loop(group.first, group.last) as block:
            places = group.places(self._layout, tile, block)
            reader.prefetch(group, tile, block, products.size)
            lines = arranged(reader, reader.lines(places), self._x_bytes)
            panel = products.panel + (block - group.first) * offsets.n_bytes
            add_block(
                reader, lines, reader.product_factors(places), panel, offsets, products.sums[0]
            )

    def unpack(self, tile: Value, group: BlockGroup, goal: Value, ahead: Prefetch) -> None:
        code, reader = tile.code, self._reader
        with code.loop(group.first, group.last) as block:
            places = group.places(self._layout, tile, block)
            at = goal + (block - group.first) * BLOCK_BYTES
            scales, added = reader.product_factors(places)
            lines = arranged(reader, reader.lines(places), self._x_bytes)
            for n, values in enumerate([*lines, *scales, *added]):
                code.store(values, at + VECTOR_BYTES * n)

    def _multiply(self, products: Products) -> None:
        code, offsets = products.code, PanelOffsets(products.size, self._x_bytes)
        with code.loop(code.number(0), products.n_blocks) as block:
            panel = products.panel + block * offsets.n_bytes
            parts = [
                BlockPart(*self._loaded(tile + block * BLOCK_BYTES), sums)
                for tile, sums in zip(products.tiles, products.sums, strict=True)
            ]
            if len(parts) > 1:
                add_blocks(self._reader, parts, panel, offsets, products.tokens[0])
            else:
                (part,) = parts
                add_block(self._reader, part.lines, part.factors, panel, offsets, part.sums)

    def _loaded(self, start: Value) -> tuple[list[Value], Factors]:
        code, (n_scales, n_added) = start.code, self._reader.n_factors
        lines = [code.load(start + VECTOR_BYTES * i, INTS) for i in range(N_LINES)]
        factors = start + VECTOR_BYTES * N_LINES
        found = [code.load(factors + VECTOR_BYTES * i, FLOATS) for i in range(n_scales + n_added)]
        return lines, (found[:n_scales], found[n_scales:])

    def result(self, total: Value, panel: Value, size: int, token: int) -> Value:
        unit = panel.code.load(panel + PanelOffsets(size, self._x_bytes).unit(token), F32)
        return total * panel.code.splat(unit)


def arranged(reader: TileReader, lines: list[Value], x_bytes: int) -> list[Value]:
    """Return lines from `TileReader.lines` in the layout for `add_block`."""
    is_joined = reader.isa.joins_halves and _adds_integers(reader, x_bytes)
    return reader.isa.joined(lines) if is_joined else lines


def _adds_integers(reader: TileReader, x_bytes: int) -> bool:
    return reader.n_factors[0] == 1 and x_bytes == 1 and reader.fits_int16


def add_block(
    reader: TileReader,
    lines: Sequence[Value],
    factors: Factors,
    panel: Value,
    offsets: PanelOffsets,
    sums: Sequence[Variable],
) -> None:
    """Multiply one block by a panel's tokens; add the products to the tokens' sums.

    Args:
        lines: the block's weights; see `arranged`.
    """
    block = _Block(reader, lines, panel, offsets)
    scales, added = factors
    if _adds_integers(reader, offsets.x_bytes):
        numbers = block.joined_sums() if reader.isa.joins_halves else block.scaled_sums()
        products = [[number] for number in numbers]
    else:
        products = block.float_sums(len(scales))
    for token, total in enumerate(sums):
        for scale, number in zip(scales, products[token], strict=True):
            total.set(panel.code.fma(scale, number, total.get()))
        for number, x_sum in zip(added, block.x_sums(token, len(added)), strict=True):
            total.set(panel.code.fma(number, x_sum, total.get()))


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A block in a tile: its lines (see `arranged`), its factors, and some tokens' sums."""

    lines: Sequence[Value]
    factors: Factors
    sums: Sequence[Variable]


def shares_numbers(reader: TileReader, x_bytes: int) -> bool:
    """Return whether `add_blocks` is faster than `add_block`.

    It is if loads limit products: with AVX-512, if a block's two halves are scaled in F32.
    """
    return reader.isa.joins_halves and x_bytes == 1 and not _adds_integers(reader, x_bytes)


def add_blocks(
    reader: TileReader, parts: Sequence[BlockPart], panel: Value, offsets: PanelOffsets,
    first_token: int,
) -> None:  # fmt: skip
    """Multiply one block in several tiles by some tokens; add the products to the tokens' sums.

    A token's numbers are loaded once for all tiles. Used only if `shares_numbers`. The bits are the
    same as with `add_block`.
    """
    code, n_tokens = panel.code, len(parts[0].sums)
    tokens = range(first_token, first_token + n_tokens)
    blocks = [_Block(reader, part.lines, panel, offsets) for part in parts]
    halves = [_shared_sums(reader, blocks, half, tokens) for half in range(2)]
    for index, token in enumerate(tokens):
        for tile, part in enumerate(parts):
            scales, added = part.factors
            numbers = [halves[half][tile][index].to(FLOATS) for half in range(2)]
            total = part.sums[index]
            for scale, number in zip(
                scales, blocks[tile].scaled(token, numbers, len(scales)), strict=True
            ):
                total.set(code.fma(scale, number, total.get()))
            for factor, x_sum in zip(added, blocks[tile].x_sums(token, len(added)), strict=True):
                total.set(code.fma(factor, x_sum, total.get()))


def _shared_sums(
    reader: TileReader, blocks: Sequence[_Block], half: int, tokens: Sequence[int]
) -> list[list[Value]]:
    totals = [[block.correction(token, [half]) for token in tokens] for block in blocks]
    for line in range(N_LINES // 2):
        for index, token in enumerate(tokens):
            x = blocks[0].four_numbers(token, half, line)
            for tile, block in enumerate(blocks):
                totals[tile][index] = block.with_line(half, line, x, totals[tile][index])
    return totals


class _Block:
    """A block of weights and the matching part of a panel."""

    def __init__(
        self, reader: TileReader, lines: Sequence[Value], panel: Value, offsets: PanelOffsets
    ) -> None:
        self._code, self._reader = panel.code, reader
        self._lines = [line.bitcast(LINE) for line in lines]
        self._panel, self._offsets = panel, offsets
        self._tokens = range(offsets.n_tokens)

    def scaled_sums(self) -> list[Value]:
        """Return each token's dot product in units, F32; halves are added up as integers."""
        totals = [self._code.constant(INTS, 0) for _ in self._tokens]
        for half in range(2):
            for token, number in enumerate(self._sums([half])):
                units = self._number(self._offsets.units(token, half), I32)
                product = self._reader.isa.word_products(self._code, number, units)
                totals[token] = totals[token] + product
        return [total.to(FLOATS) for total in totals]

    def joined_sums(self) -> list[Value]:
        """Return `scaled_sums` for lines that contain both halves."""
        offsets, code, found = self._offsets, self._code, []
        for token in self._tokens:
            x = [
                self._number(offsets.numbers(token, 0, 0, line), I64)
                for line in range(len(self._lines) // 2)
            ]
            at = offsets.minus_sum(token, 0)
            start = self._number(at, I64) if self._reader.zero_point else code.number(0)
            units = self._number(offsets.units(token, 0), I32)
            total = self._reader.isa.joined_products(code, self._lines, x, start, units)
            found.append(total.to(FLOATS))
        return found

    def float_sums(self, n_scales: int) -> list[list[Value]]:
        """Return each token's dot products in units, F32: one in total, or one per 16 columns."""
        if n_scales == 1 and self._offsets.x_bytes > 1:
            return [
                [number.to(FLOATS) * self._code.splat(self._scale(token, 0))]
                for token, number in enumerate(self._sums(range(2)))
            ]
        halves = [[number.to(FLOATS) for number in self._sums([half])] for half in range(2)]
        return [
            self.scaled(token, numbers, n_scales)
            for token, numbers in enumerate(zip(*halves, strict=True))
        ]

    def scaled(self, token: int, halves: Sequence[Value], n_scales: int) -> list[Value]:
        """Return a token's products with both halves, F32, in units: as one sum or two."""
        first, second = halves
        scale = [self._code.splat(self._scale(token, half)) for half in range(2)]
        if n_scales == 1:
            return [self._code.fma(second, scale[1], first * scale[0])]
        return [first * scale[0], second * scale[1]]

    def four_numbers(self, token: int, half: int, line: int) -> Value:
        return self._number(self._offsets.numbers(token, 0, half, line), I32)

    def with_line(self, half: int, line: int, x: Value, total: Value) -> Value:
        reader, weights = self._reader, self._lines[4 * half + line]
        return reader.isa.dots(self._code, [weights], [[x]], [total], reader.largest_weight)[0]

    def x_sums(self, token: int, n: int) -> list[Value]:
        """Return a token's sum over the block (n = 1) or every 16 columns (n = 2), in units."""
        if n < 2:
            return [self._code.splat(self._number(self._offsets.sum(token), F32))][:n]
        found = []
        for half in range(n):
            stored = self._number(self._offsets.minus_sum(token, half), I32).to(F32)
            found.append(stored * (-1 / SUM_FACTOR) * self._scale(token, half))
        return [self._code.splat(number) for number in found]

    def _sums(self, halves: Sequence[int]) -> list[Value]:
        """Return the integer dot products between one or both halves and each token."""
        code, offsets = self._code, self._offsets
        lines = [(half, n) for half in halves for n in range(4)]
        weights = [self._lines[4 * half + n] for half, n in lines]
        totals = [code.constant(INTS, 0) for _ in self._tokens]
        for part in range(offsets.x_bytes):
            if part == offsets.x_bytes - 1:
                totals = [total + self.correction(t, halves) for t, total in enumerate(totals)]
            x = [
                [self._number(offsets.numbers(t, part, *line), I32) for line in lines]
                for t in self._tokens
            ]
            totals = self._reader.isa.dots(code, weights, x, totals, self._reader.largest_weight)
            if part < offsets.x_bytes - 1:
                totals = [(total << 8) - total for total in totals]  # times BASE
        return totals

    def correction(self, token: int, halves: Sequence[int]) -> Value:
        """Return the correction of a sum for the weights' offset."""
        zero_point = self._reader.zero_point
        if not zero_point:
            return self._code.constant(INTS, 0)
        first, *others = [
            self._number(self._offsets.minus_sum(token, half), I32) for half in halves
        ]
        stored = sum(others, first)
        if zero_point < SUM_FACTOR:
            stored = stored.arithmetic_shift((SUM_FACTOR // zero_point).bit_length() - 1)
        return self._code.splat(stored)

    def _scale(self, token: int, half: int) -> Value:
        return self._number(self._offsets.scale(token, half), F32)

    def _number(self, offset: int, kind: object) -> Value:
        return self._code.load(self._panel + offset, kind)
