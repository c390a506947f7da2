"""Activations as words of 16 bits, where products with quantised matrices need more than a byte.

See `kernels.products.panels` for where that is. Each 256 columns of a token that share a factor
of the weights have a scale, numbers are multiplied by it and rounded. Weights are integers: codes,
times the integer scale of their block where the type has one (`MAX_FINE_WEIGHT`). Scales of activations
are such that a sum of products over 256 columns fits in 32 bits, by Cauchy and Schwarz as in
`kernels.words.words`. So these sums are exact, and their order does not matter. What rounding
adds is some 1e-4 of a typical product (an NMSE of 2e-8).

For each block of 32 columns a panel of m tokens holds m × 32 words, in the order of
`COLUMN_ORDER`; then, in F32, m sums of 32 activations, m pairs of sums of 16, and m factors,
1 / scale. All of these are divided by `BALANCE`. The block's other bytes are free.
"""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I16,
    INTS,
    Value,
    function,
    vector,
)
from engine.backends.cpu.kernels.products.panels import ROUNDER, ROUNDER_BITS, TINY
from engine.backends.cpu.kernels.products.tile_reader import BlockGroup
from engine.backends.cpu.kernels.words.words import joined, scale_of
from engine.formats.quants.layout import BLOCK, SUPER, panel_block_bytes

BLOCK_BYTES = panel_block_bytes(2)
"""Bytes of a token's block in a panel."""

MAX_FINE_WEIGHT = 4096
"""Largest size of a weight: 32 × 128 in Q6_K."""

MAX_FINE_LENGTH = 32_750
"""Largest length of 256 activations in words: times that of as many weights, 16 × `MAX_FINE_WEIGHT`, it
is less than 2^31, also with what rounding adds."""

MAX_FINE_WORD = 32_767
"""Largest word."""

BALANCE = 2.0**21
"""What sums and factors are divided by; finished products are multiplied by it (`balanced`). So
sums are numbers on the way for all activations: over 256 columns less than
2^31 × 2^-21 × 2^128 / (`MAX_FINE_LENGTH` / 16). Factors of `TINY` and more keep all their bits."""

COLUMN_ORDER = [4 * line + column for line in range(BLOCK // 4) for column in (0, 2, 1, 3)]
"""Columns of a block in the order of a panel's words. An i32 of weights has four columns in bytes:
the even ones and the odd ones become two words each where they lie."""

N_PAIRS = BLOCK // 2
"""Pairs of words of a block."""


TOKEN_BYTES = 2 * BLOCK, 4, 8, 4
"""Bytes that a token has of each part of a panel's block."""


def pair(token: int, number: int) -> int:
    """Return the offset of two words of a token in a block of a panel."""
    return (token * N_PAIRS + number) * 4


def sum_of(n_tokens: int, token: int, part: int, n_parts: int) -> int:
    """Return the offset of the sum of a block's activations, or of one of its halves."""
    start = n_tokens * (2 * BLOCK)
    if n_parts == 1:
        return start + 4 * token
    return start + n_tokens * 4 + (2 * token + part) * 4


def factor_of(n_tokens: int, token: int) -> int:
    """Return the offset of a token's factor in a block of a panel."""
    return n_tokens * (2 * BLOCK + 12) + 4 * token


def balanced(total: Value) -> Value:
    """Return finished products, from sums that have the factors of a panel."""
    return total * BALANCE


def add_pack_token(module: ir.Module) -> None:
    """Write `pack_token`, see `kernels.products.panels`; `first` and `last` end groups."""
    code, (x, n_blocks, skip, panel, n, t, first, last) = function(module, "pack_token", 8)
    code.builder.function.linkage = "internal"

    def half(index: Value) -> Value:
        return code.load(x + index * 64, FLOATS)

    def pack(group: BlockGroup) -> None:
        size, relative = scale_of(
            code, half, group.first * 2, group.last * 2, MAX_FINE_LENGTH, MAX_FINE_WORD
        )
        steps, factor = relative / size, size * (1 / BALANCE) / relative + (size - size)
        steps = code.where(size < TINY, code.constant(F32, 0.0), steps)
        with code.loop(group.first, group.last) as block:
            at = panel + block * n * BLOCK_BYTES
            numbers = [_whole(half(block * 2 + k) * code.splat(steps)) for k in range(2)]
            words = joined(*(number.to(vector(I16)) for number in numbers))
            code.store(words.shuffle(COLUMN_ORDER), at + t * (2 * BLOCK))
            sums = [code.reduce("add", number).to(F32) * factor for number in numbers]
            behind = at + n * (2 * BLOCK)
            code.store(sums[0] + sums[1], behind + t * 4)
            for k in range(2):
                code.store(sums[k], behind + n * 4 + t * 8 + 4 * k)
            code.store(factor, behind + n * 12 + t * 4)

    with code.loop((first + skip) // SUPER, (last + skip + (SUPER - 1)) // SUPER) as index:
        pack(BlockGroup.at(index, n_blocks, skip))
    code.builder.ret_void()


def _whole(values: Value) -> Value:
    """Return the nearest integers, ties to even."""
    return (values + ROUNDER).bitcast(INTS) - ROUNDER_BITS


assert MAX_FINE_LENGTH < MAX_FINE_WORD
assert BLOCK * SUPER * MAX_FINE_WEIGHT**2 * MAX_FINE_LENGTH**2 < 1 << 62
