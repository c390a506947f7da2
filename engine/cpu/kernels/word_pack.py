"""Packs F16 and BF16 rows of a file into tiles of words (`engine.cpu.kernels.words`)."""

from __future__ import annotations

from llvmlite import ir

from engine.cpu.kernels.float_operands import FloatOperands
from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.pack import ARGUMENTS
from engine.cpu.kernels.panels import TINY
from engine.cpu.kernels.parallel_for import add_kernel, ceil_div, piece
from engine.cpu.kernels.team import add_run
from engine.cpu.kernels.values import F32, I32, INTS, Code, Value
from engine.cpu.kernels.words import GROUP_BYTES, joined, scale_of, whole
from engine.quants.extent import WORD_BLOCK_BYTES, WORD_FACTOR_BYTES
from engine.quants.layout import BLOCK, SUPER, TILE

KINDS = {1: "f16", 30: "bf16"}
"""Kernel names of the types that become words, by the number of the GGML type."""

EXPONENT = 0x7F80_0000
"""Bits of the exponent of a positive F32 number; with them alone it is a power of two."""


def build(module: ir.Module, isa: Isa, type_number: int) -> None:
    """Write `pack(team, *ARGUMENTS)`; other rows of the tiles are left as they are."""
    add_run(module)
    operands = FloatOperands(isa, KINDS[type_number])
    with piece(module, "pack", ARGUMENTS) as (code, given, index):
        number = given["goal_row"] // TILE + index
        begin = number * TILE - given["goal_row"]  # of the tile, as a row of `raw`
        first = code.where(begin < 0, code.number(0), begin)
        end = code.min_signed(given["n_rows"], begin + TILE)
        tile = given["planes"] + number * given["tile_bytes"]
        with code.loop(first, end) as row:
            raw = given["raw"] + row * given["row_bytes"]
            _emit_row(code, operands, raw, given["n_blocks"], tile + (row - begin) * 4)
    add_kernel(
        module, "pack", ARGUMENTS, lambda _, g: ceil_div(g["goal_row"] % TILE + g["n_rows"], TILE)
    )


def _emit_row(
    code: Code, operands: FloatOperands, raw: Value, n_blocks: Value, goal: Value
) -> None:
    """Write the packing of a row; `goal` is where its first factor belongs."""

    def half(index: Value) -> Value:
        return operands.weights(code, raw + index * 32)

    with code.loop(code.number(0), n_blocks, SUPER) as first:
        last = code.min_signed(first + SUPER, n_blocks)
        group = goal + first // SUPER * GROUP_BYTES
        size, relative = scale_of(code, half, first * 2, last * 2)
        zero, one = (code.constant(F32, number) for number in (0.0, 1.0))
        steps = ((relative / size).bitcast(I32) & EXPONENT).bitcast(F32)
        steps, factor = (
            code.where(size < TINY, zero, number)
            for number in (steps, one / steps + (size - size))  # NaN where the size is infinite
        )
        code.store(factor, group)
        with code.loop(first, last) as block:
            words = [whole(half(block * 2 + k) * code.splat(steps)) for k in range(2)]
            pairs = joined(*words).bitcast(INTS)
            at = group + WORD_FACTOR_BYTES + (block - first) * WORD_BLOCK_BYTES
            for pair in range(BLOCK // 2):
                code.store(pairs[pair], at + 64 * pair)
