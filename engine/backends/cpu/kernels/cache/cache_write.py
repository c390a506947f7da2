"""Writes keys or values into the KV cache, converted to its type."""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.cache.cache_codec import CODECS, PlainCodec
from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.parallel_for import (
    Named,
    add_kernel,
    ceil_div,
    piece,
    rows_per_piece,
)
from engine.backends.cpu.kernels.language.values import FLOATS, I64, VOID, Code, Value, function
from engine.backends.cpu.kernels.running.team import add_run
from engine.model.forward.pages import PAGE

ARGUMENTS = (
    "x", "token_stride", "head_stride", "n_tokens", "n_heads", "n", "cells", "cells_token_stride",
    "cells_head_stride", "positions", "tables",
)  # fmt: skip
"""Arguments of the kernel. x is F32, (n_tokens, n_heads, n), with strides in bytes; `cells` is the
address of slot 0 and head 0 in the cache. positions, tables: addresses of n_tokens 64-bit integers,
the position of each token and the address of its sequence's table of pages. For block types, n is a
multiple of 32."""


def build(module: ir.Module, isa: Isa, kind: str) -> None:
    """Write `store(team, *ARGUMENTS)` for a type of keys or of values."""
    add_run(module)
    _add_row(module, isa, kind)
    with piece(module, "store", ARGUMENTS) as (code, given, index):
        per_piece = rows_per_piece(code, given["n_heads"] * given["n"])
        stop = code.min_signed((index + 1) * per_piece, given["n_tokens"])
        with code.loop(index * per_piece, stop) as token:
            position, table = (
                code.load(given[name] + token * 8, I64) for name in ("positions", "tables")
            )
            slot = code.load(table + position // PAGE * 8, I64) * PAGE + position % PAGE
            x = given["x"] + token * given["token_stride"]
            cells = given["cells"] + slot * given["cells_token_stride"]
            with code.loop(code.number(0), given["n_heads"]) as head:
                source, goal = (
                    x + head * given["head_stride"], cells + head * given["cells_head_stride"]
                )  # fmt: skip
                code.call("row", VOID, source, given["n"], goal)
    add_kernel(module, "store", ARGUMENTS, _n_pieces)


def _n_pieces(code: Code, given: Named) -> Value:
    per_piece = rows_per_piece(code, given["n_heads"] * given["n"])
    return ceil_div(given["n_tokens"], per_piece)


def _add_row(module: ir.Module, isa: Isa, kind: str) -> None:
    """Write `row(x, n, cells)`: stores one head of one token."""
    code, (x, n, place) = function(module, "row", 3)
    code.builder.function.linkage = "internal"
    codec = CODECS[kind](code, isa)
    n_units = n // codec.width
    with code.loop(code.number(0), n_units) as unit:
        at = x + unit * (4 * codec.width)
        values = [code.load(at + 4 * n, FLOATS) for n in range(0, codec.width, 16)]
        codec.write(values, place + unit * codec.n_bytes)
    if isinstance(codec, PlainCodec):
        with code.when(n % codec.width > 0):
            left = n % codec.width
            value = code.load_part(x + n_units * (4 * codec.width), FLOATS, left)
            codec.write_part(value, place + n_units * codec.n_bytes, left)
    code.builder.ret_void()
