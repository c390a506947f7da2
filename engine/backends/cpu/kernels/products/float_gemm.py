"""F32 GEMM with F16, BF16 or F32 matrices, stored as in the file.

`x Wᵀ` adds up 16 partial sums over the columns; `x W` goes through the matrix's rows. Both proceed
in order, so that a token's bits do not depend on the other tokens. Both take a stack of matrices,
one per head, with tokens for each. As rows are neither packed nor in tiles, these are not operands
for the nest in `kernels.products.gemm`, which would also add in a different order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import (
    FLOATS,
    I16,
    I32,
    LANES,
    VOID,
    Code,
    Value,
    internal,
    vector,
)
from engine.backends.cpu.kernels.running.thread_pool import add_run


class FloatWeights:
    """F16, BF16 or F32 weights, which are widened to F32.

    Args:
        kind: "f16", "bf16" or "f32".

    Attributes:
        n_bytes: bytes per weight.
    """

    def __init__(self, isa: Isa, kind: str) -> None:
        self._isa = isa
        self._kind = kind
        self.n_bytes = 4 if kind == "f32" else 2

    def load(self, code: Code, address: Value, n: Value | None = None) -> Value:
        """Load 16 weights, or n weights followed by zeros, as F32."""
        stored = _loaded(code, address, FLOATS if self._kind == "f32" else vector(I16), n)
        if self._kind == "f16":
            return self._isa.f16_to_f32(code, stored)
        if self._kind == "bf16":
            return (stored.to(vector(I32), signed=False) << 16).bitcast(FLOATS)
        return stored


def _loaded(code: Code, address: Value, kind: ir.VectorType, n: Value | None) -> Value:
    return code.load(address, kind) if n is None else code.load_part(address, kind, n)


TILE_ARGUMENTS = ("w", "w_stride", "n_rows", "n_columns", "x", "x_stride", "out", "out_stride")
"""Arguments of a tile's functions; the tile starts at these addresses."""

LINE_BYTES = 64
"""Bytes loaded per prefetch."""


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Size of a register tile.

    Attributes:
        n_tokens: number of tokens.
        n_outputs: number of matrix rows, a power of two; in the transposed product, number of
            column vectors.
    """

    n_tokens: int
    n_outputs: int


def _row_tiles(isa: Isa) -> Sequence[GemmTile]:
    if isa.tile_tokens >= 8:
        return [GemmTile(n, 4) for n in (6, 4, 2, 1)]
    return [GemmTile(n, 2) for n in (2, 1)]


def _column_tiles(isa: Isa) -> Sequence[GemmTile]:
    if isa.tile_tokens >= 8:
        return GemmTile(4, 3), GemmTile(1, 4)
    return GemmTile(2, 1), GemmTile(1, 2)


def _add_rows(module: ir.Module, kind: FloatWeights, tile: GemmTile) -> None:
    """Emit `rows_r_m(*TILE_ARGUMENTS)`: m tokens times r rows."""
    name = f"rows_{tile.n_outputs}_{tile.n_tokens}"
    code, (w, w_stride, _, n_columns, x, x_stride, out, stride) = internal(
        module, name, len(TILE_ARGUMENTS)
    )
    zero = code.constant(FLOATS, 0.0)
    sums = [[code.variable(zero) for _ in range(tile.n_outputs)] for _ in range(tile.n_tokens)]

    def add(column: Value, n: Value | None = None) -> None:
        places = [w + w_stride * r + column * kind.n_bytes for r in range(tile.n_outputs)]
        weights = [kind.load(code, place, n) for place in places]
        for t, totals in enumerate(sums):
            numbers = _loaded(code, x + x_stride * t + column * 4, FLOATS, n)
            for weight, total in zip(weights, totals, strict=True):
                total.set(code.fma(weight, numbers, total.get()))

    whole = n_columns // LANES * LANES
    with code.loop(code.number(0), whole, LANES) as column:
        ahead = w + w_stride * tile.n_outputs + column * (kind.n_bytes * tile.n_outputs)
        for at in range(0, LANES * kind.n_bytes * tile.n_outputs, LINE_BYTES):
            code.prefetch(ahead + at, cache=2)
        add(column)
    with code.when(whole < n_columns):
        add(whole, n_columns - whole)
    for t, totals in enumerate(sums):
        code.store(code.reduce_each([total.get() for total in totals]), out + stride * t)
    code.builder.ret_void()


def _add_columns(module: ir.Module, kind: FloatWeights, tile: GemmTile) -> None:
    """Emit `columns_c_m(*TILE_ARGUMENTS)`: m tokens times c vectors of 16 columns.

    A single vector may have fewer: `n_columns` is the number of remaining columns.
    """
    name = f"columns_{tile.n_outputs}_{tile.n_tokens}"
    code, (w, w_stride, n_rows, left, x, x_stride, out, stride) = internal(
        module, name, len(TILE_ARGUMENTS)
    )
    n = code.min_signed(left, code.number(LANES)) if tile.n_outputs == 1 else None
    zero, vector_bytes = code.constant(FLOATS, 0.0), LANES * kind.n_bytes
    sums = [[code.variable(zero) for _ in range(tile.n_outputs)] for _ in range(tile.n_tokens)]
    with code.loop(code.number(0), n_rows) as row:
        at = w + w_stride * row
        weights = [kind.load(code, at + c * vector_bytes, n) for c in range(tile.n_outputs)]
        for t, totals in enumerate(sums):
            number = code.splat(code.load(x + x_stride * t + row * 4, FLOATS.element))
            for weight, total in zip(weights, totals, strict=True):
                total.set(code.fma(weight, number, total.get()))
    for t, totals in enumerate(sums):
        for c, total in enumerate(totals):
            place = out + stride * t + 4 * LANES * c
            if n is None:
                code.store(total.get(), place)
            else:
                code.store_part(total.get(), place, n)
    code.builder.ret_void()


NAMES = ("multiply", "multiply_transposed")

ARGUMENTS = (
    "w", "w_stride", "n_rows", "n_columns", "x", "x_stride", "n_tokens", "out", "out_stride",
    "outputs_per_piece", "tokens_per_pass", "n_heads", "w_head", "x_head", "out_head",
)  # fmt: skip
"""Arguments of the products. For each head, w is (n_rows, n_columns), x (n_tokens, n_columns) F32
and out (n_tokens, n_rows) F32, with x and out swapped for the transposed product. Strides are bytes
from row to row; `w_head`, `x_head` and `out_head` are bytes from head to head. A piece computes up
to `outputs_per_piece` result elements for up to `tokens_per_pass` tokens in one head."""


def build(module: ir.Module, isa: Isa, kind: str) -> None:
    """Emit `name(pool, *ARGUMENTS)` for each of `NAMES`, for "f16", "bf16" or "f32" weights."""
    add_run(module)
    weights = FloatWeights(isa, kind)
    for name, n_outputs, tiles, add_tile in (
        ("multiply", "n_rows", _row_tiles(isa), _add_rows),
        ("multiply_transposed", "n_columns", _column_tiles(isa), _add_columns),
    ):
        for tile in tiles:
            for count in sorted({tile.n_outputs, 1}, reverse=True):
                add_tile(module, weights, GemmTile(tile.n_tokens, count))
        with piece(module, name, ARGUMENTS) as (code, given, index):
            _emit_piece(code, given, index, n_outputs, tiles, weights.n_bytes)
        add_kernel(module, name, ARGUMENTS, _counter(n_outputs))


def _counter(n_outputs: str) -> Callable[[Code, Named], Value]:
    def n_pieces(_: Code, given: Named) -> Value:
        n_passes = ceil_div(given["n_tokens"], given["tokens_per_pass"])
        return given["n_heads"] * n_passes * ceil_div(given[n_outputs], given["outputs_per_piece"])

    return n_pieces


def _emit_piece(
    code: Code, given: Named, index: Value, n_outputs: str, tiles: Sequence[GemmTile], w_bytes: int
) -> None:
    """Emit a piece: some outputs for some tokens in one head.

    Neighbouring pieces use the same weights, so that these are read from memory once.
    """
    n_runs = ceil_div(given[n_outputs], given["outputs_per_piece"])
    n_passes = ceil_div(given["n_tokens"], given["tokens_per_pass"])
    token = index % n_passes * given["tokens_per_pass"]
    first = index // n_passes % n_runs * given["outputs_per_piece"]
    last = code.min_signed(first + given["outputs_per_piece"], given[n_outputs])
    head = index // n_passes // n_runs
    stop = code.min_signed(token + given["tokens_per_pass"], given["n_tokens"])
    here = {**given}
    for name in ("w", "x", "out"):
        here[name] = given[name] + head * given[f"{name}_head"]
    begin = token
    for tile in tiles:
        end = begin + (stop - begin) // tile.n_tokens * tile.n_tokens
        unit = 1 if n_outputs == "n_rows" else LANES
        whole = first + (last - first) // (tile.n_outputs * unit) * (tile.n_outputs * unit)
        for n, first_output, last_output in ((tile.n_outputs, first, whole), (1, whole, last)):
            with (
                code.loop(begin, end, tile.n_tokens) as token,
                code.loop(first_output, last_output, n * unit) as output,
            ):
                if unit == 1:
                    name, n_columns = "rows", given["n_columns"]
                    w = here["w"] + output * given["w_stride"]
                else:
                    name, n_columns, w = "columns", last - output, here["w"] + output * w_bytes
                x_stride, stride = given["x_stride"], given["out_stride"]
                code.call(
                    f"{name}_{n}_{tile.n_tokens}", VOID, w, given["w_stride"], given["n_rows"],
                    n_columns, here["x"] + token * x_stride, x_stride,
                    here["out"] + token * stride + output * 4, stride,
                )  # fmt: skip
        begin = end
