"""Products of int16 (`int16_panels`): operands for `kernels.products.gemm`.

For each group of 256 columns, the minima times sums of activations are added to a token's sum,
block by block, then the exact integer sum, times the token's factor and the rows' scale. If each
block has its own scales, its integer sums follow its minima.

Two tiles are multiplied at a time, so that they share the loads of a token's numbers, because
processors load two vectors and multiply two per cycle.
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
    INTS,
    Code,
    Value,
    Variable,
)
from engine.backends.cpu.kernels.products import gemm
from engine.backends.cpu.kernels.products.gemm import VECTOR_BYTES, Operands, Prefetch, Products
from engine.backends.cpu.kernels.products.int16_panels import (
    BALANCE,
    FINE_BLOCK_BYTES,
    GROUP_BYTES,
    N_PAIRS,
    factor_offset,
    fine_factor_offset,
    fine_sum_offset,
    pair_offset,
)
from engine.backends.cpu.kernels.products.tile_reader import (
    AHEAD,
    FAR_AHEAD,
    BlockGroup,
    Int16Reader,
)
from engine.formats.quants.layout import (
    INT16_BLOCK_BYTES,
    INT16_FACTOR_BYTES,
    INT16_PANEL_BYTES,
    SUPER,
    Layout,
)

MIN_SUMS = 8
"""Number of independent sums that keep the multiply units busy."""

AT_ONCE = 4
"""Number of tokens whose sums over blocks and over columns fit in the registers."""

Parts = Sequence[Sequence[Sequence[Variable]]]
"""Integer sums for each tile and token: several partial sums if there are few tokens."""


@dataclass(frozen=True, slots=True)
class TileGroup:
    """How a tile's group of columns is read.

    Attributes:
        numbers: loads or decodes a pair of columns, given its block's index in the group and its
            index in the block.
        factor: loads the factor for all columns, if the type has one.
        factors: loads a block's scales, then its minima.
        scales: loads a block's integer scales, i32; None if the numbers include them.
    """

    numbers: Callable[[Value, int], Value]
    factor: Callable[[], Value]
    factors: Callable[[Value], Sequence[Value]] = lambda _: ()
    scales: Callable[[Value], Sequence[Value]] | None = None


class Int16Operands(Operands):
    """Weights and activations as int16."""

    spreads_prefetch = True

    def factor_offset(self, size: int, token: int) -> int:
        """Return the offset of a token's factor in the first block of a panel's group."""
        return factor_offset(size, token)

    def add_products(self, products: Products, tiles: Sequence[TileGroup]) -> None:
        """Emit the products of a group that has one factor for all columns."""
        code, parts = products.code, self._parts(products)
        with code.loop(code.number(0), products.n_blocks) as block:
            at = products.panel + block * (products.size * self.block_bytes)
            products.each_block(block)
            if tiles[0].scales is None:
                self.multiply(products, tiles, at, block, range(N_PAIRS), parts)
            else:
                self._multiply_scaled(products, tiles, at, block, parts)
        self.add_scaled(products, [tile.factor() for tile in tiles], products.panel, parts)

    def _parts(self, products: Products) -> Parts:
        code, n_sums = products.code, len(products.tokens)
        n_parts = max(1, min(4, MIN_SUMS // (len(products.tiles) * n_sums)))
        zero = code.constant(INTS, 0)
        return [
            [[code.variable(zero) for _ in range(n_parts)] for _ in range(n_sums)]
            for _ in products.tiles
        ]

    def multiply(
        self, products: Products, tiles: Sequence[TileGroup], panel: Value, block: Value,
        pairs: Sequence[int], parts: Parts,
    ) -> None:  # fmt: skip
        """Emit the products of some column pairs of a block, which is at `panel`."""
        code = products.code
        for pair in pairs:
            weights = [tile.numbers(block, pair) for tile in tiles]
            for index, token in enumerate(products.tokens):
                x = code.splat(code.load(panel + pair_offset(token, pair), I32))
                for weight, found in zip(weights, parts, strict=True):
                    total = found[index][pair % len(found[index])]
                    total.set(self.isa.word_dots(code, total.get(), weight, x))

    def _multiply_scaled(
        self, products: Products, tiles: Sequence[TileGroup], panel: Value, block: Value,
        parts: Parts,
    ) -> None:  # fmt: skip
        """Emit the products of `multiply` for numbers that do not include their integer scales."""
        scales = [tile.scales(block) for tile in tiles if tile.scales]
        n_scales = len(scales[0])
        size = N_PAIRS // n_scales
        for n in range(n_scales):
            own = self._parts(products)
            self.multiply(products, tiles, panel, block, range(n * size, (n + 1) * size), own)
            for scale, totals, found in zip(scales, parts, own, strict=True):
                for total, numbers in zip(totals, found, strict=True):
                    total[0].set(total[0].get() + _sum(numbers) * scale[n])

    def add_scaled(
        self, products: Products, scales: Sequence[Value], panel: Value, parts: Parts
    ) -> None:
        """Add scaled integer sums; `panel` is the address of any block in the group."""
        code = products.code
        for index, token in enumerate(products.tokens):
            factor = code.splat(code.load(panel + self.factor_offset(products.size, token), F32))
            for scale, sums, found in zip(scales, products.sums, parts, strict=True):
                number = _sum(found[index]).to(scale.kind) * factor
                sums[index].set(code.fma(number, scale, sums[index].get()))


def _sum(parts: Sequence[Variable]) -> Value:
    first, *others = [part.get() for part in parts]
    return sum(others, first)


class MatrixInt16(Int16Operands):
    """F16 and BF16 matrices as int16, which need no unpacking."""

    def __init__(self, isa: Isa) -> None:
        super().__init__(isa, INT16_PANEL_BYTES, GROUP_BYTES)

    @property
    def steps(self) -> Mapping[str, Callable[[Products], None]]:
        return {"multiply": self._multiply}

    def group(self, tile: Value, group: BlockGroup) -> Value:
        return tile + group.index * GROUP_BYTES

    def multiply_tile(self, code: Code, tile: Value, group: BlockGroup, products: Products) -> None:
        self._multiply(products, AHEAD if products.size == 1 else FAR_AHEAD)

    def _multiply(self, products: Products, ahead: int = 0) -> None:
        code = products.code

        def read(tile: Value) -> TileGroup:
            def numbers(block: Value, pair: int) -> Value:
                place = tile + INT16_FACTOR_BYTES + block * INT16_BLOCK_BYTES
                if ahead:
                    code.prefetch(place + (VECTOR_BYTES * pair + ahead), cache=2)
                return code.load(place + VECTOR_BYTES * pair, INTS)

            return TileGroup(numbers, lambda: code.load(tile, FLOATS))

        self.add_products(products, [read(tile) for tile in products.tiles])


class QuantisedInt16(Int16Operands):
    """Quantised matrices and int16 activations.

    For one token, weights are decoded to registers; for more, four tiles are unpacked, so that even
    an expert with few rows decodes its weights only once. An unpacked group in a tile consists of a
    factor, then each block's numbers and factors.
    """

    unpack_tokens = 3
    widths = (2,)

    def __init__(self, isa: Isa, layout: Layout) -> None:
        super().__init__(isa, FINE_BLOCK_BYTES, layout.tile_bytes(SUPER, 0))
        self._reader, self._layout = Int16Reader(isa, layout), layout
        self._n_factors = self._reader.n_scales + self._reader.n_minima
        self._unpacked_block_bytes = VECTOR_BYTES * (N_PAIRS + self._n_factors)
        self.unpacked_bytes = VECTOR_BYTES + SUPER * self._unpacked_block_bytes
        self.panel_sizes, self.tile_sizes = self.tile_sizes, (1,)

    @property
    def steps(self) -> Mapping[str, Callable[[Products], None]]:
        if not self._layout.has_supers:
            return {"multiply": lambda products: self._multiply(products, self._unpacked(products))}
        found: dict[str, Callable[[Products], None]] = {}
        if self._layout.has_minimum:
            found["minima"] = lambda products: self._add_minima(products, self._unpacked(products))
        found["multiply"] = lambda products: self.add_products(products, self._unpacked(products))
        return found

    def n_grouped(self, code: Code, n_tokens: Value) -> Value:
        return code.where(n_tokens.equals(1), code.number(0), n_tokens)

    def group(self, tile: Value, group: BlockGroup) -> Value:
        found: Value = group.places(self._layout, tile, group.first).supers
        return found

    def tokens_at_once(self, size: int, width: int) -> int:
        return min(size, AT_ONCE if self._reader.n_scales else size)

    def factor_offset(self, size: int, token: int) -> int:
        return fine_factor_offset(size, token)

    def result(self, total: Value, panel: Value, size: int, token: int) -> Value:
        return total * BALANCE

    def multiply_tile(self, code: Code, tile: Value, group: BlockGroup, products: Products) -> None:
        reader, layout = self._reader, self._layout
        decoded: list[tuple[Value, list[Value]]] = []

        def numbers(block: Value, pair: int) -> Value:
            if not decoded or decoded[-1][0] is not block:
                reader.prefetch(group, tile, group.first + block, 1)
                places = group.places(layout, tile, group.first + block)
                decoded.append((block, reader.codes(places)))
            return decoded[-1][1][pair]

        def factor() -> Value:
            return reader.group_factor(group.places(layout, tile, group.first))

        def factors(block: Value) -> Sequence[Value]:
            return reader.block_factors(group.places(layout, tile, group.first + block))

        def scales(block: Value) -> Sequence[Value]:
            return reader.integer_scales(group.places(layout, tile, group.first + block))

        own = scales if layout.has_supers else None
        self._multiply(products, [TileGroup(numbers, factor, factors, own)])

    def unpack(self, tile: Value, group: BlockGroup, goal: Value, ahead: Prefetch) -> None:
        code, reader = tile.code, self._reader
        with code.loop(group.first, group.last) as block:
            ahead.emit_part(block - group.first, group.last - group.first)
            places = group.places(self._layout, tile, block)
            at = goal + VECTOR_BYTES + (block - group.first) * self._unpacked_block_bytes
            for n, values in enumerate([*reader.numbers(places), *reader.block_factors(places)]):
                code.store(values, at + VECTOR_BYTES * n)
        if self._layout.has_supers:
            places = group.places(self._layout, tile, group.first)
            code.store(reader.group_factor(places), goal)

    def _unpacked(self, products: Products) -> Sequence[TileGroup]:
        code = products.code

        def read(tile: Value) -> TileGroup:
            def at(block: Value) -> Value:
                return tile + VECTOR_BYTES + block * self._unpacked_block_bytes

            def factors(block: Value) -> Sequence[Value]:
                start = at(block) + VECTOR_BYTES * N_PAIRS
                return [code.load(start + VECTOR_BYTES * n, FLOATS) for n in range(self._n_factors)]

            return TileGroup(
                lambda block, pair: code.load(at(block) + VECTOR_BYTES * pair, INTS),
                lambda: code.load(tile, FLOATS), factors,
            )  # fmt: skip

        return [read(tile) for tile in products.tiles]

    def _multiply(self, products: Products, tiles: Sequence[TileGroup]) -> None:
        if self._reader.n_scales:
            self._add_blocks(products, tiles)
            return
        if self._reader.n_minima:
            self._add_minima(products, tiles)
        self.add_products(products, tiles)

    def _add_minima(self, products: Products, tiles: Sequence[TileGroup]) -> None:
        code = products.code
        with code.loop(code.number(0), products.n_blocks) as block:
            panel = products.panel + block * (products.size * self.block_bytes)
            self._add_block_minima(products, tiles, panel, block)

    def _add_blocks(self, products: Products, tiles: Sequence[TileGroup]) -> None:
        code, n_scales = products.code, self._reader.n_scales
        size = N_PAIRS // n_scales
        with code.loop(code.number(0), products.n_blocks) as block:
            panel = products.panel + block * (products.size * self.block_bytes)
            products.each_block(block)
            self._add_block_minima(products, tiles, panel, block)
            for n in range(n_scales):
                parts = self._parts(products)
                self.multiply(products, tiles, panel, block, range(n * size, (n + 1) * size), parts)
                scales = [tile.factors(block)[n] for tile in tiles]
                self.add_scaled(products, scales, panel, parts)

    def _add_block_minima(
        self, products: Products, tiles: Sequence[TileGroup], panel: Value, block: Value
    ) -> None:
        code, n_minima = products.code, self._reader.n_minima
        if not n_minima:
            return
        minima = [tile.factors(block)[self._reader.n_scales :] for tile in tiles]
        for n in range(n_minima):
            for index, token in enumerate(products.tokens):
                at = fine_sum_offset(products.size, token, n, n_minima)
                x = code.splat(code.load(panel + at, F32))
                for sums, found in zip(products.sums, minima, strict=True):
                    sums[index].set(code.fma(found[n], x, sums[index].get()))


def build(module: ir.Module, isa: Isa) -> None:
    """Emit `multiply(pool, *gemm.ARGUMENTS)` for F16 and BF16 matrices."""
    gemm.build(module, MatrixInt16(isa))
