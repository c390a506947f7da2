"""Products with unquantised matrices: F16, BF16 or F32 weights as in the file, sums in F32.

`multiply` gives `x Wᵀ`: each result is the sum of 16 partial sums, added in a fixed order; partial
sum i goes over columns i, i + 16 and so on, from the first to the last. `multiply_transposed` gives
`x W`: each result is one sum over the matrix's rows, from the first to the last. So a token's bits
do not depend on the tokens computed with it. Both take a stack of matrices, one for each head, with
tokens for each.
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
    function,
    vector,
)
from engine.backends.cpu.kernels.running.thread_pool import add_run


class FloatOperands:
    """F16, BF16 or F32 weights, widened to F32, times F32 activations.

    Args:
        kind: type of the weights, "f16", "bf16" or "f32".

    Attributes:
        weight_bytes: bytes of a weight.
        x_bytes: bytes of an activation.
        step: number of columns that are multiplied at once.
    """

    x_bytes, step = 4, LANES

    def __init__(self, isa: Isa, kind: str) -> None:
        self._isa = isa
        self._kind = kind
        self.weight_bytes = 4 if kind == "f32" else 2

    def weights(self, code: Code, address: Value, n: Value | None = None) -> Value:
        """Load `step` weights, or the first n and zeros, as F32."""
        stored = _loaded(code, address, FLOATS if self._kind == "f32" else vector(I16), n)
        if self._kind == "f16":
            return self._isa.f16_to_f32(code, stored)
        if self._kind == "bf16":
            return (stored.to(vector(I32), signed=False) << 16).bitcast(FLOATS)
        return stored

    def numbers(self, code: Code, address: Value, n: Value | None = None) -> Value:
        """Load `step` activations, or the first n and zeros."""
        return _loaded(code, address, FLOATS, n)

    def add(self, code: Code, weights: Value, numbers: Value, total: Value) -> Value:
        """Return the 16 partial sums in `total` with the products of a step added."""
        return code.fma(weights, numbers, total)


def _loaded(code: Code, address: Value, kind: ir.VectorType, n: Value | None) -> Value:
    return code.load(address, kind) if n is None else code.load_part(address, kind, n)


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


NAMES = ("multiply", "multiply_transposed")

ARGUMENTS = (
    "w", "w_stride", "n_rows", "n_columns", "x", "x_stride", "n_tokens", "out", "out_stride",
    "outputs_per_piece", "tokens_per_pass", "n_heads", "w_head", "x_head", "out_head",
)  # fmt: skip
"""Arguments of the products. For each head, w is (n_rows, n_columns), x (n_tokens, n_columns) F32
and out (n_tokens, n_rows) F32; x and out the other way round for the transposed product. Strides
are bytes from row to row; `w_head` and its like are bytes from head to head. A piece is up to
`outputs_per_piece` elements of the results of up to `tokens_per_pass` tokens of one head."""


def build(module: ir.Module, isa: Isa, kind: str) -> None:
    """Write `name(pool, *ARGUMENTS)` for each of `NAMES`, for "f16", "bf16" or "f32" weights."""
    add_run(module)
    operands = FloatOperands(isa, kind)
    _add_rows_kernel(module, isa, operands, "multiply")
    tiles = column_tiles(isa)
    for tile in tiles:
        for count in {tile.n_outputs, 1}:
            add_columns(module, operands, GemmTile(tile.n_tokens, count))

    def emit(code: Code, given: Named, tile: GemmTile, first: Value, last: Value) -> None:
        _emit_columns(code, given, operands.weight_bytes, tile, first, last)

    with piece(module, "multiply_transposed", ARGUMENTS) as (code, given, index):
        _emit_piece(code, given, index, "n_columns", tiles, emit)
    add_kernel(module, "multiply_transposed", ARGUMENTS, _counter("n_columns"))


def _add_rows_kernel(module: ir.Module, isa: Isa, operands: FloatOperands, name: str) -> None:
    tiles = row_tiles(isa)
    for tile in tiles:
        for count in (tile.n_outputs, 1):
            add_rows(module, operands, GemmTile(tile.n_tokens, count))
    with piece(module, name, ARGUMENTS) as (code, given, index):
        _emit_piece(code, given, index, "n_rows", tiles, _emit_rows)
    add_kernel(module, name, ARGUMENTS, _counter("n_rows"))


def _counter(n_outputs: str) -> Callable[[Code, Named], Value]:
    def n_pieces(_: Code, given: Named) -> Value:
        n_passes = ceil_div(given["n_tokens"], given["tokens_per_pass"])
        return given["n_heads"] * n_passes * ceil_div(given[n_outputs], given["outputs_per_piece"])

    return n_pieces


Emit = Callable[[Code, Named, GemmTile, Value, Value], None]
"""Function that writes the tiles of some outputs, from one number to another, for a run of tokens
that begins at the addresses of x and out."""


def _emit_piece(
    code: Code, given: Named, index: Value, n_outputs: str, tiles: Sequence[GemmTile], emit: Emit
) -> None:
    """Write a piece: some outputs of some tokens of one head.

    Neighbouring pieces have the same weights, so that these are read from memory once.
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
        here |= {"first_token": begin, "last_token": end}
        emit(code, here, tile, first, last)
        begin = end


def _emit_rows(code: Code, given: Named, tile: GemmTile, first: Value, last: Value) -> None:
    whole = first + (last - first) // tile.n_outputs * tile.n_outputs
    for n, begin, end in ((tile.n_outputs, first, whole), (1, whole, last)):
        with (
            code.loop(given["first_token"], given["last_token"], tile.n_tokens) as token,
            code.loop(begin, end, n) as row,
        ):
            _call_tile(
                code, given, f"rows_{n}_{tile.n_tokens}", token, row,
                given["w"] + row * given["w_stride"], given["n_columns"],
            )  # fmt: skip


def _emit_columns(
    code: Code, given: Named, weight_bytes: int, tile: GemmTile, first: Value, last: Value
) -> None:
    wide = tile.n_outputs * LANES
    whole = first + (last - first) // wide * wide
    for n, begin, end in ((tile.n_outputs, first, whole), (1, whole, last)):
        with (
            code.loop(given["first_token"], given["last_token"], tile.n_tokens) as token,
            code.loop(begin, end, n * LANES) as column,
        ):
            _call_tile(
                code, given, f"columns_{n}_{tile.n_tokens}", token, column,
                given["w"] + column * weight_bytes, last - column,
            )  # fmt: skip


def _call_tile(
    code: Code, given: Named, name: str, token: Value, output: Value, w: Value, n_columns: Value
) -> None:
    """Write the call of a tile's function.

    Args:
        token: first token.
        output: first element of its result.
        w: address of the weights.
        n_columns: see `BLOCK_ARGUMENTS`.
    """
    x_stride, stride = given["x_stride"], given["out_stride"]
    code.call(
        name, VOID, w, given["w_stride"], given["n_rows"], n_columns, given["x"] + token * x_stride,
        x_stride, given["out"] + token * stride + output * 4, stride,
    )  # fmt: skip
