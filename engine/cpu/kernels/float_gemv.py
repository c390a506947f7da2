"""GEMV with unquantised matrices: F16, BF16 or F32 weights as in the file, sums in F32.

Each result is the sum of two vectors of 16 partial sums, added in a fixed order, then of the last
columns one by one. So a token's bits do not depend on the tokens computed with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from llvmlite import ir

from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.parallel_for import Named, add_kernel, ceil_div, piece
from engine.cpu.kernels.team import add_run
from engine.cpu.kernels.values import (
    F32,
    FLOATS,
    I16,
    I32,
    LANES,
    VOID,
    Code,
    Value,
    Variable,
    function,
    vector,
)

N_SUMS = 2
"""Vectors of partial sums of one result."""

STEP = N_SUMS * LANES
"""Columns of one step."""

AHEAD = 16384
"""Distance at which weights are prefetched, in bytes."""

SIZES: Mapping[str, int] = {"f16": 2, "bf16": 2, "f32": 4}
"""Bytes of a weight, by type."""

ARGUMENTS = (
    "w",
    "w_stride",
    "n_rows",
    "n_columns",
    "x",
    "x_stride",
    "n_tokens",
    "out",
    "out_stride",
    "rows_per_piece",
)
"""Arguments of the kernel. w is (n_rows, n_columns), x (n_tokens, n_columns) F32, out (n_tokens,
n_rows) F32; strides are bytes from row to row."""


def build(module: ir.Module, isa: Isa, kind: str) -> None:
    """Write `multiply(team, *ARGUMENTS)` for weights of one type, a key of `SIZES`."""
    add_run(module)
    for n_tokens, n_rows in _tiles(isa):
        for count in {n_rows, 1}:
            _add_block(module, isa, kind, count, n_tokens)
    with piece(module, "multiply", ARGUMENTS) as (code, given, index):
        _emit_piece(code, isa, given, index)
    add_kernel(
        module, "multiply", ARGUMENTS, lambda _, g: ceil_div(g["n_rows"], g["rows_per_piece"])
    )


def _tiles(isa: Isa) -> tuple[tuple[int, int], ...]:
    """Return the numbers of tokens and rows of a tile; the registers hold its sums."""
    return ((4, 2), (1, 4)) if isa.tile_tokens >= 8 else ((2, 1), (1, 2))


def _weights(code: Code, isa: Isa, kind: str, address: Value, n: int) -> Value:
    """Load n weights as F32."""
    if kind == "f32":
        return code.load(address, vector(F32, n))
    bits = code.load(address, vector(I16, n))
    if kind == "f16":
        return isa.f16_to_f32(code, bits)
    return (bits.to(vector(I32, n), signed=False) << 16).bitcast(vector(F32, n))


def _add_block(module: ir.Module, isa: Isa, kind: str, n_rows: int, n_tokens: int) -> None:
    """Write `block_r_m(w, w_stride, n_columns, x, x_stride, out, out_stride)`: r rows, m tokens."""
    code, (w, w_stride, n_columns, x, x_stride, out, stride) = function(
        module, f"block_{n_rows}_{n_tokens}", 7
    )
    code.builder.function.linkage = "internal"
    size = SIZES[kind]
    zero = code.constant(FLOATS, 0.0)
    sums = [
        [[code.variable(zero) for _ in range(N_SUMS)] for _ in range(n_tokens)]
        for _ in range(n_rows)
    ]
    whole = n_columns // STEP * STEP
    with code.loop(code.number(0), whole, STEP) as column:
        rows = [w + w_stride * r + column * size for r in range(n_rows)]
        if n_tokens == 1:
            for row in rows:
                for at in range(0, STEP * size, 64):
                    code.prefetch(row + (AHEAD + at))
        for n in range(N_SUMS):
            weights = [_weights(code, isa, kind, row + n * LANES * size, LANES) for row in rows]
            for t in range(n_tokens):
                numbers = code.load(x + x_stride * t + column * 4 + n * LANES * 4, FLOATS)
                for r in range(n_rows):
                    total = sums[r][t][n]
                    total.set(code.fma(weights[r], numbers, total.get()))
    for r in range(n_rows):
        for t in range(n_tokens):
            total = code.variable(_added(code, sums[r][t]))
            with code.loop(whole, n_columns) as column:
                weight = _weights(code, isa, kind, w + w_stride * r + column * size, 1)[0]
                number = code.load(x + x_stride * t + column * 4, F32)
                total.set(code.fma(weight, number, total.get()))
            code.store(total.get(), out + stride * t + 4 * r)
    code.builder.ret_void()


def _added(code: Code, sums: list[Variable]) -> Value:
    """Add up the partial sums of a result."""
    a, b = (total.get() for total in sums)
    return code.reduce("add", a + b)


def _emit_piece(code: Code, isa: Isa, given: Named, index: Value) -> None:
    """Write a piece: some rows times all tokens."""
    w, w_stride, x, x_stride = (given[name] for name in ("w", "w_stride", "x", "x_stride"))
    n_columns, n_tokens = given["n_columns"], given["n_tokens"]
    out, stride = given["out"], given["out_stride"]
    first = index * given["rows_per_piece"]
    last = code.min_signed(first + given["rows_per_piece"], given["n_rows"])

    def rows(
        first: Value, last: Value, n_row: int, tokens: tuple[Value, Value], n_token: int
    ) -> None:
        with code.loop(first, last, n_row) as row, code.loop(*tokens, n_token) as token:
            code.call(
                f"block_{n_row}_{n_token}", VOID, w + row * w_stride, w_stride, n_columns,
                x + token * x_stride, x_stride, out + token * stride + row * 4, stride,
            )  # fmt: skip

    begin: Value = code.number(0)
    for n_token, n_row in _tiles(isa):
        end = begin + (n_tokens - begin) // n_token * n_token
        whole_tiles = first + (last - first) // n_row * n_row
        rows(first, whole_tiles, n_row, (begin, end), n_token)
        if n_row > 1:
            rows(whole_tiles, last, 1, (begin, end), n_token)
        begin = end
