"""Rows of activations as `engine.gpu.kernels.gemv` reads them.

Blocks of 32 columns are those of a matrix' extent; columns that lie before or behind the interval
of the matrix are zeros. Bytes are rounded as in `cpu.kernels.panels`, 16 columns on one scale.
"""

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-100)
"""Columns of smaller numbers count as zeros; 127 divided by them might be infinite."""

ROUNDER, ROUNDER_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)
"""Adding it rounds to the nearest, ties to even, and leaves the whole number in the low bits."""


@triton.jit
def halves_of(x, row, lead, n_columns, n_blocks, BLOCKS: tl.constexpr):
    """A row's numbers (2 * BLOCKS, 16), the number of each half block, and whether there is one."""
    half = tl.program_id(1) * (2 * BLOCKS) + tl.arange(0, 2 * BLOCKS)
    column = half[:, None] * 16 + tl.arange(0, 16)[None, :] - lead
    inside = (column >= 0) & (column < n_columns)
    values = tl.load(x + row.to(tl.int64) * n_columns + column, mask=inside, other=0.0)
    return values, half, half < 2 * n_blocks


@triton.jit
def clear(counters, N_COUNTERS: tl.constexpr):
    """Zeros, once, for who counts in the products of these rows."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(counters + tl.arange(0, N_COUNTERS), tl.zeros((N_COUNTERS,), tl.int32))


@triton.jit
def rounded(values, LARGEST: tl.constexpr):
    """The nearest whole numbers within ±LARGEST for each row of (n, 16), and its scale (n,)."""
    size = tl.max(tl.abs(values), axis=1)
    inverse = tl.where(size < TINY, 0.0, tl.div_rn(1.0 * LARGEST, tl.maximum(size, TINY)))
    whole = tl.fma(values, inverse[:, None], ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS
    unfit = tl.sum(values * 0.0, axis=1)  # NaN where a number is, or is infinite
    return whole, size * (1.0 / LARGEST) + unfit


@triton.jit
def write_bytes(values, row, half, exists, n_blocks, numbers, facts, X_BYTES: tl.constexpr):
    """Half blocks of a row, see `halves_of`, in the form of `as_bytes`."""
    block = row.to(tl.int64) * n_blocks + half // 2
    at = numbers + block[:, None] * (32 * X_BYTES) + (half[:, None] % 2 * 16 + tl.arange(0, 16))
    mask = exists[:, None]
    if X_BYTES == 1:
        whole, scale = rounded(values, 127)
        tl.store(at, whole.to(tl.int8), mask=mask)
    else:
        whole, scale = rounded(values, 127 * 255 + 127)
        near = tl.fma(whole.to(tl.float32), 1.0 / 255, ROUNDER)
        upper = near.to(tl.int32, bitcast=True) - ROUNDER_BITS
        tl.store(at, upper.to(tl.int8), mask=mask)
        tl.store(at + 32, (whole - upper * 255).to(tl.int8), mask=mask)
    goal = facts + block * 4 + half % 2
    tl.store(goal, scale.to(tl.int32, bitcast=True), mask=exists)
    tl.store(goal + 2, tl.sum(whole, axis=1), mask=exists)


@triton.jit
def write_numbers(values, row, half, exists, n_blocks, numbers, facts):
    """The same in the form of `as_numbers`."""
    place = row.to(tl.int64) * n_blocks * 2 + half
    at = numbers + place[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(at, values, mask=exists[:, None])
    tl.store(facts + place, tl.sum(values, axis=1), mask=exists)


@triton.jit(do_not_specialize=["lead", "n_columns", "n_blocks"])
def as_bytes(x, lead, n_columns, n_blocks, numbers, facts, counters, X_BYTES: tl.constexpr,
             BLOCKS: tl.constexpr, N_COUNTERS: tl.constexpr):  # fmt: skip
    """BLOCKS blocks of a row for each program.

    Args:
        x: (rows, n_columns), F32, without gaps.
        lead, n_columns, n_blocks: see `Extent`.
        numbers: bytes (rows, n_blocks, X_BYTES, 32); of two bytes the one that counts 255 is first.
        facts: 32-bit words (rows, n_blocks, 4): the scales (F32) of 16 columns each, then the sums
            of their whole numbers.
        counters: (N_COUNTERS,), int32; become zeros.
    """
    clear(counters, N_COUNTERS)
    row = tl.program_id(0)
    values, half, exists = halves_of(x, row, lead, n_columns, n_blocks, BLOCKS)
    write_bytes(values, row, half, exists, n_blocks, numbers, facts, X_BYTES)


@triton.jit(do_not_specialize=["lead", "n_columns", "n_blocks"])
def as_numbers(x, lead, n_columns, n_blocks, numbers, facts, counters, BLOCKS: tl.constexpr,
               N_COUNTERS: tl.constexpr):  # fmt: skip
    """The same in F32, without rounding.

    Args:
        numbers: (rows, n_blocks, 32).
        facts: (rows, n_blocks, 2), sums of 16 columns.
    """
    clear(counters, N_COUNTERS)
    row = tl.program_id(0)
    values, half, exists = halves_of(x, row, lead, n_columns, n_blocks, BLOCKS)
    write_numbers(values, row, half, exists, n_blocks, numbers, facts)
