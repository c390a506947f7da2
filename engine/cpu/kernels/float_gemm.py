"""Products with unquantised matrices: F16, BF16 or F32 weights as in the file, sums in F32.

`multiply` gives `x Wᵀ`: each result is the sum of two vectors of 16 partial sums, added in a fixed
order, then of the last columns one by one. `multiply_transposed` gives `x W`: each result is one
sum over the matrix's rows, from the first to the last. So a token's bits do not depend on the
tokens computed with it.

Both take a stack of matrices, one for each head, with tokens for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

NAMES = ("multiply", "multiply_transposed")

ARGUMENTS = (
    "w", "w_stride", "n_rows", "n_columns", "x", "x_stride", "n_tokens", "out", "out_stride",
    "outputs_per_piece", "tokens_per_pass", "n_heads", "w_head", "x_head", "out_head",
)  # fmt: skip
"""Arguments of both kernels. For each head, w is (n_rows, n_columns), x (n_tokens, n_columns) F32
and out (n_tokens, n_rows) F32; the other way round for the transposed product. Strides are bytes
from row to row; `w_head` and its like are bytes from head to head. A piece is up to
`outputs_per_piece` elements of the results of up to `tokens_per_pass` tokens of one head."""


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Sizes of what a function computes at once; the registers hold its sums.

    Attributes:
        n_tokens: number of tokens.
        n_outputs: number of rows of the matrix; in the transposed product, of vectors of columns.
    """

    n_tokens: int
    n_outputs: int


def build(module: ir.Module, isa: Isa, kind: str) -> None:
    """Write `name(team, *ARGUMENTS)` for each of `NAMES`, for weights of one type of `SIZES`."""
    add_run(module)
    for tile in _tiles(isa):
        for count in {tile.n_outputs, 1}:
            _add_block(module, isa, kind, GemmTile(tile.n_tokens, count))
            _add_columns(module, isa, kind, GemmTile(tile.n_tokens, count))
    for name, n_outputs, emit in (
        ("multiply", "n_rows", _emit_rows),
        ("multiply_transposed", "n_columns", _emit_columns),
    ):
        with piece(module, name, ARGUMENTS) as (code, given, index):
            sizes = {"w_size": code.number(SIZES[kind])}
            _emit_piece(code, isa, {**given, **sizes}, index, n_outputs, emit)
        add_kernel(module, name, ARGUMENTS, _counter(n_outputs))


def _tiles(isa: Isa) -> tuple[GemmTile, GemmTile]:
    """Return the tile of several tokens and that of one."""
    return (
        (GemmTile(4, 3), GemmTile(1, 4))
        if isa.tile_tokens >= 8
        else (GemmTile(2, 1), GemmTile(1, 2))
    )


def _counter(n_outputs: str) -> Callable[[Code, Named], Value]:
    """Return a function that counts the pieces of a kernel whose results have so many elements."""

    def n_pieces(_: Code, given: Named) -> Value:
        n_passes = ceil_div(given["n_tokens"], given["tokens_per_pass"])
        return given["n_heads"] * n_passes * ceil_div(given[n_outputs], given["outputs_per_piece"])

    return n_pieces


def _weights(code: Code, isa: Isa, kind: str, address: Value, n: int) -> Value:
    """Load n weights as F32."""
    if kind == "f32":
        return code.load(address, vector(F32, n))
    return _widened(code, isa, kind, code.load(address, vector(I16, n)))


def _widened(code: Code, isa: Isa, kind: str, bits: Value) -> Value:
    """Convert 16-bit weights to F32."""
    n = bits.kind.count
    if kind == "f16":
        return isa.f16_to_f32(code, bits)
    return (bits.to(vector(I32, n), signed=False) << 16).bitcast(vector(F32, n))


BLOCK_ARGUMENTS = ("w", "w_stride", "n_rows", "n_columns", "x", "x_stride", "out", "out_stride")
"""Arguments of the functions of a tile, which begins at these addresses."""


def _add_block(module: ir.Module, isa: Isa, kind: str, tile: GemmTile) -> None:
    """Write `rows_r_m(*BLOCK_ARGUMENTS)`: m tokens times r rows."""
    name = f"rows_{tile.n_outputs}_{tile.n_tokens}"
    code, (w, w_stride, _, n_columns, x, x_stride, out, stride) = function(
        module, name, len(BLOCK_ARGUMENTS)
    )
    code.builder.function.linkage = "internal"
    size = SIZES[kind]
    zero = code.constant(FLOATS, 0.0)
    sums = [
        [[code.variable(zero) for _ in range(N_SUMS)] for _ in range(tile.n_tokens)]
        for _ in range(tile.n_outputs)
    ]
    whole = n_columns // STEP * STEP
    with code.loop(code.number(0), whole, STEP) as column:
        rows = [w + w_stride * r + column * size for r in range(tile.n_outputs)]
        if tile.n_tokens == 1:
            for row in rows:
                for at in range(0, STEP * size, 64):
                    code.prefetch(row + (AHEAD + at))
        for n in range(N_SUMS):
            weights = [_weights(code, isa, kind, row + n * LANES * size, LANES) for row in rows]
            for t in range(tile.n_tokens):
                numbers = code.load(x + x_stride * t + column * 4 + n * LANES * 4, FLOATS)
                for r in range(tile.n_outputs):
                    total = sums[r][t][n]
                    total.set(code.fma(weights[r], numbers, total.get()))
    for r in range(tile.n_outputs):
        for t in range(tile.n_tokens):
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


def _add_columns(module: ir.Module, isa: Isa, kind: str, tile: GemmTile) -> None:
    """Write `columns_c_m(*BLOCK_ARGUMENTS)`: m tokens times c vectors of 16 columns.

    One vector may have fewer columns: `n_columns` is the number of columns that are left.
    """
    name = f"columns_{tile.n_outputs}_{tile.n_tokens}"
    code, (w, w_stride, n_rows, left, x, x_stride, out, stride) = function(
        module, name, len(BLOCK_ARGUMENTS)
    )
    code.builder.function.linkage = "internal"
    is_partial, size = tile.n_outputs == 1, SIZES[kind]
    n = code.min_signed(left, code.number(LANES))
    zero = code.constant(FLOATS, 0.0)
    sums = [[code.variable(zero) for _ in range(tile.n_outputs)] for _ in range(tile.n_tokens)]
    with code.loop(code.number(0), n_rows) as row:
        at = w + w_stride * row
        if is_partial:
            bits = code.load_part(at, FLOATS if kind == "f32" else vector(I16), n)
            weights = [bits if kind == "f32" else _widened(code, isa, kind, bits)]
        else:
            places = [at + c * LANES * size for c in range(tile.n_outputs)]
            weights = [_weights(code, isa, kind, place, LANES) for place in places]
        for t in range(tile.n_tokens):
            number = code.splat(code.load(x + x_stride * t + row * 4, F32))
            for weight, total in zip(weights, sums[t], strict=True):
                total.set(code.fma(weight, number, total.get()))
    for t in range(tile.n_tokens):
        for c, total in enumerate(sums[t]):
            place = out + stride * t + 4 * LANES * c
            if is_partial:
                code.store_part(total.get(), place, n)
            else:
                code.store(total.get(), place)
    code.builder.ret_void()


Emit = Callable[[Code, Named, GemmTile, Value, Value], None]
"""Function that writes the tiles of some outputs, from one number to another, for a run of tokens
that begins at the addresses of x and out."""


def _emit_piece(
    code: Code, isa: Isa, given: Named, index: Value, n_outputs: str, emit: Emit
) -> None:
    """Write a piece: some outputs of some tokens of one head."""
    n_runs = ceil_div(given[n_outputs], given["outputs_per_piece"])
    n_passes = ceil_div(given["n_tokens"], given["tokens_per_pass"])
    first = index % n_runs * given["outputs_per_piece"]
    last = code.min_signed(first + given["outputs_per_piece"], given[n_outputs])
    head = index // n_runs // n_passes
    token = index // n_runs % n_passes * given["tokens_per_pass"]
    stop = code.min_signed(token + given["tokens_per_pass"], given["n_tokens"])
    here = {**given}
    for name in ("w", "x", "out"):
        here[name] = given[name] + head * given[f"{name}_head"]
    begin = token
    for tile in _tiles(isa):
        end = begin + (stop - begin) // tile.n_tokens * tile.n_tokens
        here |= {"first_token": begin, "last_token": end}
        emit(code, here, tile, first, last)
        begin = end


def _emit_rows(code: Code, given: Named, tile: GemmTile, first: Value, last: Value) -> None:
    """Write the tiles of some rows of the matrix, the last rows one by one."""
    whole = first + (last - first) // tile.n_outputs * tile.n_outputs
    _emit_tiles(code, given, tile, first, whole, "rows")
    if tile.n_outputs > 1:
        _emit_tiles(code, given, GemmTile(tile.n_tokens, 1), whole, last, "rows")


def _emit_columns(code: Code, given: Named, tile: GemmTile, first: Value, last: Value) -> None:
    """Write the tiles of some columns of the matrix, the last ones 16 at a time or fewer."""
    wide = tile.n_outputs * LANES
    whole = first + (last - first) // wide * wide
    _emit_tiles(code, given, tile, first, whole, "columns")
    _emit_tiles(code, given, GemmTile(tile.n_tokens, 1), whole, last, "columns")


def _emit_tiles(
    code: Code, given: Named, tile: GemmTile, first: Value, last: Value, name: str
) -> None:
    """Write the calls of a tile's function for outputs from `first` on, below `last`."""
    w, x, out, x_stride, stride = (given[n] for n in ("w", "x", "out", "x_stride", "out_stride"))
    is_row = name == "rows"
    step = tile.n_outputs * (1 if is_row else LANES)
    tokens = given["first_token"], given["last_token"]
    with code.loop(*tokens, tile.n_tokens) as token, code.loop(first, last, step) as output:
        place = w + output * (given["w_stride"] if is_row else given["w_size"])
        code.call(
            f"{name}_{tile.n_outputs}_{tile.n_tokens}", VOID, place, given["w_stride"],
            given["n_rows"], given["n_columns"] if is_row else last - output, x + token * x_stride,
            x_stride, out + token * stride + output * 4, stride,
        )  # fmt: skip
