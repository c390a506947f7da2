"""Tiles of products with unquantised matrices: functions that hold all sums in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.values import FLOATS, LANES, Value, function
from engine.backends.cpu.kernels.products.float_operands import FloatOperands

BLOCK_ARGUMENTS = ("w", "w_stride", "n_rows", "n_columns", "x", "x_stride", "out", "out_stride")
"""Arguments of the functions of a tile, which begins at these addresses."""

LINE_BYTES = 64
"""Bytes that a prefetch reads."""


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Sizes of what a function computes at once; the registers hold its sums.

    Attributes:
        n_tokens: number of tokens.
        n_outputs: number of rows of the matrix, a power of two; in the transposed product, of
            vectors of columns.
    """

    n_tokens: int
    n_outputs: int


def row_tiles(isa: Isa) -> Sequence[GemmTile]:
    """Return the tiles of `x Wᵀ`, those of many tokens first; the last has one token."""
    if isa.tile_tokens >= 8:
        return [GemmTile(n, 4) for n in (6, 4, 2, 1)]
    return [GemmTile(n, 2) for n in (2, 1)]


def column_tiles(isa: Isa) -> Sequence[GemmTile]:
    """Return the tiles of `x W`, those of many tokens first; the last has one token."""
    if isa.tile_tokens >= 8:
        return GemmTile(4, 3), GemmTile(1, 4)
    return GemmTile(2, 1), GemmTile(1, 2)


def add_rows(module: ir.Module, operands: FloatOperands, tile: GemmTile) -> None:
    """Write `rows_r_m(*BLOCK_ARGUMENTS)`: m tokens times r rows."""
    name = f"rows_{tile.n_outputs}_{tile.n_tokens}"
    code, (w, w_stride, _, n_columns, x, x_stride, out, stride) = function(
        module, name, len(BLOCK_ARGUMENTS)
    )
    code.builder.function.linkage = "internal"
    zero = code.constant(FLOATS, 0.0)
    sums = [[code.variable(zero) for _ in range(tile.n_outputs)] for _ in range(tile.n_tokens)]

    def add(column: Value, n: Value | None = None) -> None:
        places = [w + w_stride * r + column * operands.weight_bytes for r in range(tile.n_outputs)]
        weights = [operands.weights(code, place, n) for place in places]
        for t, totals in enumerate(sums):
            numbers = operands.numbers(code, x + x_stride * t + column * operands.x_bytes, n)
            for weight, total in zip(weights, totals, strict=True):
                total.set(operands.add(code, weight, numbers, total.get()))

    whole = n_columns // operands.step * operands.step
    step_bytes = operands.step * operands.weight_bytes * tile.n_outputs
    with code.loop(code.number(0), whole, operands.step) as column:
        ahead = w + w_stride * tile.n_outputs + column * (operands.weight_bytes * tile.n_outputs)
        for at in range(0, step_bytes, LINE_BYTES):
            code.prefetch(ahead + at, cache=2)
        add(column)
    with code.when(whole < n_columns):
        add(whole, n_columns - whole)
    for t, totals in enumerate(sums):
        found = code.reduce_each([total.get() for total in totals])
        code.store(found, out + stride * t)
    code.builder.ret_void()


def add_columns(module: ir.Module, operands: FloatOperands, tile: GemmTile) -> None:
    """Write `columns_c_m(*BLOCK_ARGUMENTS)`: m tokens times c vectors of 16 columns.

    One vector may have fewer columns: `n_columns` is the number of columns that are left.
    """
    name = f"columns_{tile.n_outputs}_{tile.n_tokens}"
    code, (w, w_stride, n_rows, left, x, x_stride, out, stride) = function(
        module, name, len(BLOCK_ARGUMENTS)
    )
    code.builder.function.linkage = "internal"
    n = code.min_signed(left, code.number(LANES)) if tile.n_outputs == 1 else None
    zero, vector_bytes = code.constant(FLOATS, 0.0), LANES * operands.weight_bytes
    sums = [[code.variable(zero) for _ in range(tile.n_outputs)] for _ in range(tile.n_tokens)]
    with code.loop(code.number(0), n_rows) as row:
        at = w + w_stride * row
        weights = [operands.weights(code, at + c * vector_bytes, n) for c in range(tile.n_outputs)]
        for t, totals in enumerate(sums):
            number = code.splat(code.load(x + x_stride * t + row * 4, FLOATS.element))
            for weight, total in zip(weights, totals, strict=True):
                total.set(operands.add(code, weight, number, total.get()))
    for t, totals in enumerate(sums):
        for c, total in enumerate(totals):
            place = out + stride * t + 4 * LANES * c
            if n is None:
                code.store(total.get(), place)
            else:
                code.store_part(total.get(), place, n)
    code.builder.ret_void()
