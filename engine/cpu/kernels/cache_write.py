"""Keys or values into the cache, in its own type."""

from __future__ import annotations

from llvmlite import ir

from engine.cpu.kernels.cache_codec import CODECS, PlainCodec
from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.parallel_for import Named, add_kernel, ceil_div, piece, rows_per_piece
from engine.cpu.kernels.team import add_run
from engine.cpu.kernels.values import FLOATS, I64, VOID, Code, Value, function

ARGUMENTS = (
    "x", "token_stride", "head_stride", "n_tokens", "n_heads", "n", "cells", "cells_token_stride",
    "cells_head_stride", "position",
)  # fmt: skip
"""Of one call: x is F32, (n_tokens, n_heads, n), with strides in bytes; `cells` is where the first
head of position 0 goes, and `position` the address of the first token's. For types of blocks, n is
a multiple of 32."""


def build(module: ir.Module, isa: Isa, kv_type: str) -> None:
    """`store(team, *ARGUMENTS)`."""
    add_run(module)
    _add_row(module, isa, kv_type)
    with piece(module, "store", ARGUMENTS) as (code, given, index):
        per_piece = rows_per_piece(code, given["n_heads"] * given["n"])
        stop = code.least((index + 1) * per_piece, given["n_tokens"])
        start = code.load(given["position"], I64)
        tokens = code.loop(index * per_piece, stop)
        with tokens as token, code.loop(code.number(0), given["n_heads"]) as head:
            x = given["x"] + token * given["token_stride"] + head * given["head_stride"]
            at = (start + token) * given["cells_token_stride"] + head * given["cells_head_stride"]
            code.call("row", VOID, x, given["n"], given["cells"] + at)
    add_kernel(module, "store", ARGUMENTS, _n_pieces)


def _n_pieces(code: Code, given: Named) -> Value:
    per_piece = rows_per_piece(code, given["n_heads"] * given["n"])
    return ceil_div(given["n_tokens"], per_piece)


def _add_row(module: ir.Module, isa: Isa, kv_type: str) -> None:
    """`row(x, n, cells)`: one head of one token."""
    code, (x, n, place) = function(module, "row", 3)
    code.builder.function.linkage = "internal"
    cells = CODECS[kv_type](code, isa)
    n_units = n // cells.width
    with code.loop(code.number(0), n_units) as unit:
        at = x + unit * (4 * cells.width)
        values = [code.load(at + 4 * n, FLOATS) for n in range(0, cells.width, 16)]
        cells.write(values, place + unit * cells.n_bytes)
    if isinstance(cells, PlainCodec):
        with code.when(n % cells.width > 0):
            left = n % cells.width
            value = code.load_part(x + n_units * (4 * cells.width), FLOATS, left)
            cells.write_part(value, place + n_units * cells.n_bytes, left)
    code.builder.ret_void()
