"""Packs F16 and BF16 rows of a file into tiles of int16 (`kernels.products.int16_panels`)."""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import F32, I32, INTS, Code, Value, vector
from engine.backends.cpu.kernels.packing.block_readers import transposed
from engine.backends.cpu.kernels.packing.pack import ARGUMENTS
from engine.backends.cpu.kernels.products.float_operands import FloatOperands
from engine.backends.cpu.kernels.products.int16_panels import (
    BALANCE,
    GROUP_BYTES,
    block_of_int16,
    scale_of,
)
from engine.backends.cpu.kernels.products.panels import TINY
from engine.backends.cpu.kernels.running.team import add_run
from engine.formats.quants.layout import BLOCK, SUPER, TILE, WORD_BLOCK_BYTES, WORD_FACTOR_BYTES

KINDS = {1: "f16", 30: "bf16"}
"""Kernel names of the types that become words, by the number of the GGML type."""

EXPONENT = 0x7F80_0000
"""Bits of the exponent of a positive F32 number; with them alone it is a power of two."""


LINE_BYTES = 64
"""Bytes of the words of a block of a row, and those of two columns of a tile's rows."""

BUFFER_ROW = SUPER * LINE_BYTES
"""Bytes of the words of a group of a row."""


def build(module: ir.Module, isa: Isa, type_number: int) -> None:
    """Write `pack(team, *ARGUMENTS)`; other rows of the tiles are left as they are.

    A group of columns of all rows becomes words in a buffer, from which whole lines are written.
    """
    add_run(module)
    operands = FloatOperands(isa, KINDS[type_number])
    with piece(module, "pack", ARGUMENTS) as (code, given, index):
        number = given["goal_row"] // TILE + index
        begin = number * TILE - given["goal_row"]  # of the tile, as a row of `raw`
        first = code.where(begin < 0, code.number(0), begin)
        end = code.min_signed(given["n_rows"], begin + TILE)
        tile = given["planes"] + number * given["tile_bytes"]
        words = code.stack_buffer(INTS, TILE * SUPER)
        with code.loop(code.number(0), given["n_blocks"], SUPER) as block:
            n_blocks = code.min_signed(given["n_blocks"] - block, code.number(SUPER))
            group = tile + block // SUPER * GROUP_BYTES
            goal = group + WORD_FACTOR_BYTES
            with code.loop(first, end) as row:
                raw = given["raw"] + row * given["row_bytes"] + block * (2 * BLOCK)
                place = row - begin
                factor = _emit_row(code, operands, raw, n_blocks, words + place * BUFFER_ROW)
                code.store(factor, group + place * 4)
            is_whole = (end - first).equals(TILE)
            with code.loop(code.number(0), code.where(is_whole, n_blocks, code.number(0))) as index:
                _emit_block(code, words + index * LINE_BYTES, goal + index * WORD_BLOCK_BYTES)
            with code.loop(first, code.where(is_whole, first, end)) as row:
                place = row - begin
                _emit_column(code, words + place * BUFFER_ROW, n_blocks, goal + place * 4)
    add_kernel(
        module, "pack", ARGUMENTS, lambda _, g: ceil_div(g["goal_row"] % TILE + g["n_rows"], TILE)
    )


def _emit_row(
    code: Code, operands: FloatOperands, raw: Value, n_blocks: Value, words: Value
) -> Value:
    """Write the rounding of a group of columns of a row to words; return their factor."""

    def half(index: Value) -> Value:
        return operands.weights(code, raw + index * 32)

    size, relative = scale_of(code, half, code.number(0), n_blocks * 2)
    zero, one = (code.constant(F32, number) for number in (0.0, 1.0))
    steps = ((relative / size).bitcast(I32) & EXPONENT).bitcast(F32)
    steps, factor = (
        code.where(size < TINY, zero, number)
        for number in (
            steps,
            one / steps * BALANCE + (size - size),
        )  # NaN where the size is infinite
    )
    with code.loop(code.number(0), n_blocks) as block:
        halves = [half(block * 2 + k) * code.splat(steps) for k in range(2)]
        code.store(block_of_int16(factor, *halves), words + block * LINE_BYTES)
    return factor


def _emit_block(code: Code, words: Value, goal: Value) -> None:
    """Write the words of a block of all 16 rows, two columns of each to a line."""
    kind = vector(I32, 4)
    for part in range(0, LINE_BYTES, 16):
        rows = [code.load(words + (row * BUFFER_ROW + part), kind) for row in range(TILE)]
        for pair, line in enumerate(transposed(rows)):
            code.store(line, goal + (part // 4 + pair) * LINE_BYTES)


def _emit_column(code: Code, words: Value, n_blocks: Value, goal: Value) -> None:
    """Write the words of a group of one row to its places in the lines."""
    with code.loop(code.number(0), n_blocks * (BLOCK // 2)) as pair:
        code.store(code.load(words + pair * 4, I32), goal + pair * LINE_BYTES)
