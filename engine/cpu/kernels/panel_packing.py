"""Kernel that packs rows of activations into panels, one group of tokens after the other."""

from __future__ import annotations

from llvmlite import ir

from engine.cpu.kernels import panels, plane_words
from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.panels import ARGUMENTS
from engine.cpu.kernels.parallel_for import add_kernel, ceil_div, piece
from engine.cpu.kernels.team import add_run
from engine.cpu.kernels.values import I64, VOID, function
from engine.quants.extent import panel_block_bytes


def are_words(isa: Isa, x_bytes: int) -> bool:
    """Return whether activations of two bytes are words, as in `engine.cpu.kernels.plane_words`."""
    return x_bytes == 2 and isa.has_word_dots


def build(module: ir.Module, isa: Isa, x_bytes: int = 1) -> None:
    """Write `quantise(team, *ARGUMENTS)`, see `engine.cpu.kernels.panels`.

    The calling thread packs one panel's tokens alone.
    """
    add_run(module)
    add_pack_tokens(module, isa, x_bytes)
    with piece(module, "quantise", ARGUMENTS) as (code, given, index):
        first, stride = index * isa.tile_tokens, given["x_stride"]
        n = code.min_signed(given["n_tokens"] - first, code.number(isa.tile_tokens))
        goal = given["panels"] + first * given["n_blocks"] * panel_block_bytes(x_bytes)
        code.call(
            "pack_tokens", VOID, given["x"] + first * stride, stride, n, given["n_blocks"],
            given["skip"], goal, code.number(0), code.number(1),
        )  # fmt: skip
    add_kernel(module, "quantise", ARGUMENTS, lambda _, g: ceil_div(g["n_tokens"], isa.tile_tokens))


def add_pack_tokens(module: ir.Module, isa: Isa, x_bytes: int = 1) -> None:
    """Write `pack_tokens(x, x_stride, n, n_blocks, skip, panels, pairs, n_used)`.

    Packs up to `isa.tile_tokens` rows: one panel for each bit set in n, the largest first. Row i is
    that of token `pairs[i] / n_used` where `pairs` is an address of 64-bit integers, and row i of x
    where it is 0.
    """
    if are_words(isa, x_bytes):
        plane_words.add_pack_token(module)
    else:
        panels.add_pack_token(module, isa, x_bytes)
    code, (x, stride, n, n_blocks, skip, goal, pairs, n_used) = function(module, "pack_tokens", 8)
    code.builder.function.linkage = "internal"
    token = code.variable(code.number(0))

    def group(size: int) -> None:
        first = token.get()
        with code.loop(code.number(0), code.number(size)) as t:
            number = code.variable(first + t)
            with code.when(pairs.differs(0)):
                number.set(code.load(pairs + (first + t) * 8, I64) // n_used)
            row = x + number.get() * stride
            panel = goal + first * n_blocks * panel_block_bytes(x_bytes)
            code.call("pack_token", VOID, row, n_blocks, skip, panel, code.number(size), t)
        token.set(first + size)

    size = isa.tile_tokens
    while size:
        with code.when((n & size) > 0):
            group(size)
        size //= 2
    code.builder.ret_void()
