"""Products with unquantised matrices: F16, BF16 or F32 weights as in the file, sums in F32.

`multiply` gives `x Wᵀ`: each result is the sum of 16 partial sums, added in a fixed order; partial
sum i goes over columns i, i + 16 and so on, from the first to the last. `multiply_transposed` gives
`x W`: each result is one sum over the matrix's rows, from the first to the last. So a token's bits
do not depend on the tokens computed with it. Both take a stack of matrices, one for each head, with
tokens for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import LANES, VOID, Code, Value
from engine.backends.cpu.kernels.products.float_operands import FloatOperands
from engine.backends.cpu.kernels.products.float_tiles import (
    GemmTile,
    add_columns,
    add_rows,
    column_tiles,
    row_tiles,
)
from engine.backends.cpu.kernels.running.team import add_run

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
    """Write `name(team, *ARGUMENTS)` for each of `NAMES`, for "f16", "bf16" or "f32" weights."""
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
    """Write the kernel of `x Wᵀ`."""
    tiles = row_tiles(isa)
    for tile in tiles:
        for count in (tile.n_outputs, 1):
            add_rows(module, operands, GemmTile(tile.n_tokens, count))
    with piece(module, name, ARGUMENTS) as (code, given, index):
        _emit_piece(code, given, index, "n_rows", tiles, _emit_rows)
    add_kernel(module, name, ARGUMENTS, _counter("n_rows"))


def _counter(n_outputs: str) -> Callable[[Code, Named], Value]:
    """Return a function that counts the pieces of a kernel whose results have so many elements."""

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
    """Write the tiles of some rows of the matrix, the last rows one by one."""
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
    """Write the tiles of some columns of the matrix, the last ones 16 at a time or fewer."""
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
        n_columns: see `kernels.products.float_tiles`.
    """
    x_stride, stride = given["x_stride"], given["out_stride"]
    code.call(
        name, VOID, w, given["w_stride"], given["n_rows"], n_columns, given["x"] + token * x_stride,
        x_stride, given["out"] + token * stride + output * 4, stride,
    )  # fmt: skip
