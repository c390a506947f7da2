"""Activations and unquantised matrices as int16, with one scale per 256 columns.

A processor with int16 dot products (`Isa.has_word_dots`) multiplies int16 twice as fast as F32, and
uses int16 where 8-bit activations are too coarse (`kernels.products.panels`). Every 256 columns of
a row or token share a scale, by which numbers are multiplied before they are rounded. A sum of
products over 256 columns is exact: it fits in 32 bits because, by Cauchy-Schwarz, it is at most the
product of both vectors' lengths, which the scales bound. So a sum does not depend on its order. The
remaining steps are in F32, in column order.

**F16 and BF16 matrices.** Both vectors are at most `MAX_LENGTH` long. Rounding adds at most 8 to a
vector's length, which is at least 8,192 unless all numbers are 0. So a product's error is less than
2^-9 of both lengths, about the same as if both were rounded to F16. A typical integer is 1,400 to
2,900, so the error of a product of two random vectors is 1e-4 (an NMSE of 2e-8; 3e-6 if one vector
is rounded to BF16). Weights' scales are powers of two, so that most BF16 weights, and the larger
F16 weights, stay exact. For each group of 256 columns, a tile of 16 rows has the rows' factors,
`BALANCE` / scale in F32, then the integers: 64 bytes hold two columns per row. For each block of 32
columns, a panel of m tokens has m × 32 integers, then m factors, 1 / (scale × `BALANCE`) in F32;
products read the factors in a group's first block.

**Quantised matrices.** Weights are integers: codes, times their block's integer scale if the type
has one (`MAX_FINE_WEIGHT`). So activations may be `MAX_FINE_LENGTH` long. Rounding adds about
1e-4 of a typical product (an NMSE of 2e-8). For each block of 32 columns, a panel of m tokens has
m × 32 integers, in `COLUMN_ORDER`; then, in F32, m sums of 32 activations, m pairs of sums of 16,
and m factors, 1 / scale, all divided by `BALANCE`. The other bytes of the block are unused.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I16,
    INTS,
    VOID,
    Code,
    Value,
    concatenated,
    internal,
    vector,
)
from engine.backends.cpu.kernels.products.panels import ROUNDER, ROUNDER_BITS, TINY, size_bits
from engine.backends.cpu.kernels.products.tile_reader import BlockGroup
from engine.formats.quants.layout import (
    BLOCK,
    INT16_BLOCK_BYTES,
    INT16_FACTOR_BYTES,
    INT16_PANEL_BYTES,
    SUPER,
    panel_block_bytes,
)

MAX_LENGTH = 46_000
"""Largest length of an int16 vector; the square is less than 2^31, rounding errors included."""

MAX_INT16 = 16_383
"""Largest magnitude of an integer: half the range of int16."""

MAX_FINE_WEIGHT = 4096
"""Largest magnitude of a quantised weight: 32 × 128 in Q6_K."""

MAX_FINE_LENGTH = 32_750
"""Largest length of 256 activations for quantised weights. Multiplied by the length of 256 weights
(16 × `MAX_FINE_WEIGHT`), it is less than 2^31, rounding errors included."""

MAX_FINE_INT16 = 32_767
"""Largest magnitude of such an activation."""

BALANCE = 2.0**21
"""Activations' factors are divided by this; weights' factors, or quantised weights' results, are
multiplied by it. So intermediate sums stay finite for all activations: over 256 columns less
than 2^31 × 2^-21 × 2^128 / (`MAX_FINE_LENGTH` / 16). Factors from `TINY` on keep all their bits."""

GROUP_BYTES = INT16_FACTOR_BYTES + SUPER * INT16_BLOCK_BYTES
"""Bytes per group of 256 columns in a matrix's tile."""

FINE_BLOCK_BYTES = panel_block_bytes(2)
"""Bytes per token and block in a panel for quantised matrices."""

COLUMN_ORDER = [4 * line + column for line in range(BLOCK // 4) for column in (0, 2, 1, 3)]
"""Order of a block's columns in such a panel: an i32 of weights has four columns in its bytes, of
which the even ones become two int16 in place, and the odd ones another two."""

FINE_TOKEN_BYTES = 2 * BLOCK, 4, 8, 4
"""Bytes per token in each part of such a panel's block."""

N_PAIRS = BLOCK // 2
"""Number of column pairs in a block."""


def pair_offset(token: int, pair: int) -> int:
    """Return the offset of two of a token's numbers in a panel's block."""
    return (token * N_PAIRS + pair) * 4


def factor_offset(n_tokens: int, token: int) -> int:
    """Return the offset of a token's factor in the first block of a panel's group."""
    return (n_tokens * N_PAIRS + token) * 4


def fine_factor_offset(n_tokens: int, token: int) -> int:
    """Return `factor_offset` for quantised matrices' panels."""
    return n_tokens * (2 * BLOCK + 12) + 4 * token


def fine_sum_offset(n_tokens: int, token: int, part: int, n_parts: int) -> int:
    """Return the offset of the sum over a block's activations, or over one half of them."""
    start = n_tokens * (2 * BLOCK)
    if n_parts == 1:
        return start + 4 * token
    return start + n_tokens * 4 + (2 * token + part) * 4


def add_pack_token(module: ir.Module) -> None:
    """Emit `pack_token` for F16 and BF16 matrices' panels; see `kernels.products.panels`."""
    add_pack_group(module)

    def pack(x: Value, group: BlockGroup, panel: Value, n: Value, t: Value) -> None:
        count, here = group.last - group.first, x + group.first * (4 * BLOCK)
        goal = panel + group.first * n * INT16_PANEL_BYTES
        x.code.call("pack_group", VOID, here, count, goal, n, t)

    _add_pack_token(module, pack)


def add_pack_fine_token(module: ir.Module) -> None:
    """Emit `pack_token` for quantised matrices' panels; see `kernels.products.panels`."""

    def pack(x: Value, group: BlockGroup, panel: Value, n: Value, t: Value) -> None:
        code, half = x.code, _halves(x)
        steps, factor = _steps_and_factor(
            code, half, group.first * 2, group.last * 2, MAX_FINE_LENGTH, MAX_FINE_INT16
        )
        with code.loop(group.first, group.last) as block:
            at = panel + block * n * FINE_BLOCK_BYTES
            numbers = [integers(half(block * 2 + k) * code.splat(steps)) for k in range(2)]
            joined = concatenated([number.to(vector(I16)) for number in numbers])
            code.store(joined.shuffle(COLUMN_ORDER), at + t * (2 * BLOCK))
            sums = [code.reduce("add", number).to(F32) * factor for number in numbers]
            behind = at + n * (2 * BLOCK)
            code.store(sums[0] + sums[1], behind + t * 4)
            for k in range(2):
                code.store(sums[k], behind + n * 4 + t * 8 + 4 * k)
            code.store(factor, behind + n * 12 + t * 4)

    _add_pack_token(module, pack)


def _add_pack_token(
    module: ir.Module, pack: Callable[[Value, BlockGroup, Value, Value, Value], None]
) -> None:
    """Emit `pack_token`, which packs group by group; `first` and `last` are group boundaries."""
    code, values = internal(module, "pack_token", 8)
    x, n_blocks, skip, panel, n, t, first, last = values
    with code.loop((first + skip) // SUPER, (last + skip + (SUPER - 1)) // SUPER) as index:
        pack(x, BlockGroup.at(index, n_blocks, skip), panel, n, t)
    code.builder.ret_void()


def add_pack_group(module: ir.Module) -> None:
    """Emit `pack_group(x, n_blocks, panel, n, t)`: up to 256 columns for token t of n."""
    code, (x, n_blocks, panel, n, t) = internal(module, "pack_group", 5)
    half = _halves(x)
    steps, factor = _steps_and_factor(code, half, code.number(0), n_blocks * 2)
    with code.loop(code.number(0), n_blocks) as block:
        at = panel + block * n * INT16_PANEL_BYTES
        numbers = [half(block * 2 + k) * code.splat(steps) for k in range(2)]
        code.store(block_of_int16(factor, *numbers), at + t * (2 * BLOCK))
        code.store(factor, at + n * (2 * BLOCK) + t * 4)
    code.builder.ret_void()


def _halves(x: Value) -> Callable[[Value], Value]:
    """Return a function that loads 16 activations by index."""
    return lambda index: x.code.load(x + index * 64, FLOATS)


def _steps_and_factor(
    code: Code, half: Callable[[Value], Value], first: Value, last: Value,
    max_length: int = MAX_LENGTH, max_int16: int = MAX_INT16,
) -> tuple[Value, Value]:  # fmt: skip
    """Return the activations' scale, and 1 / (scale × `BALANCE`); see `scale_of`."""
    size, relative = scale_of(code, half, first, last, max_length, max_int16)
    steps, factor = relative / size, size * (1 / BALANCE) / relative + (size - size)
    return code.where(size < TINY, code.constant(F32, 0.0), steps), factor


def scale_of(
    code: Code, half: Callable[[Value], Value], first: Value, last: Value,
    max_length: int = MAX_LENGTH, max_int16: int = MAX_INT16,
) -> tuple[Value, Value]:  # fmt: skip
    """Return some numbers' largest magnitude, and the int16 magnitude that it becomes.

    Args:
        half: function that loads 16 numbers by index.
        first, last: range of indices.
        max_length: maximum length of the vector as int16.
        max_int16: maximum magnitude as int16.
    """
    most = code.variable(code.constant(INTS, 0))
    with code.loop(first, last) as index:
        most.set(code.maximum(most.get(), size_bits(half(index))))
    size = code.reduce("max", most.get()).bitcast(F32)
    inverse = code.where(size < TINY, code.constant(F32, 0.0), code.constant(F32, 1.0) / size)
    squares = code.variable(code.constant(FLOATS, 0.0))
    with code.loop(first, last) as index:
        number = half(index) * code.splat(inverse)
        squares.set(code.fma(number, number, squares.get()))
    length = code.unary("sqrt", code.reduce("add", squares.get()))
    relative = code.constant(F32, float(max_length)) / length
    return size, code.minimum(relative, code.constant(F32, float(max_int16)))


def integers(values: Value) -> Value:
    """Round to the nearest integers, ties to even."""
    return (values + ROUNDER).bitcast(INTS) - ROUNDER_BITS


def block_of_int16(factor: Value, first: Value, second: Value) -> Value:
    """Round 32 numbers; all become 0 if their factor is NaN, which makes the result NaN anyway."""
    joined = concatenated([integers(n).to(vector(I16)) for n in (first, second)])
    return factor.code.where(factor.equals(factor), joined, factor.code.constant(joined.kind, 0))


assert MAX_FINE_LENGTH < MAX_FINE_INT16
assert BLOCK * SUPER * MAX_FINE_WEIGHT**2 * MAX_FINE_LENGTH**2 < 1 << 62
