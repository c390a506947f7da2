"""Quantised activations, as `engine.backends.gpu.kernels.gemv` reads them.

Blocks of 32 columns are those of a matrix' extent; columns before or behind those of the matrix are
zeros. Bytes are rounded as in `cpu.kernels.products.panels`; 16 columns share a scale.
"""

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-100)
"""Least magnitude of 16 columns that is not rounded to zeros; 127 over less might be infinite."""

ROUNDER, ROUNDER_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)
"""Number whose addition rounds to the nearest integer, ties to even, and leaves it in the low bits;
its bits."""


@triton.jit
def halves_of(x, row, lead, n_columns, n_blocks, BLOCKS: tl.constexpr):
    """Load a row's elements (2 * BLOCKS, 16).

    Returns:
        The elements, the index of each half block, and whether there is one.
    """
    half = tl.program_id(1) * (2 * BLOCKS) + tl.arange(0, 2 * BLOCKS)
    column = half[:, None] * 16 + tl.arange(0, 16)[None, :] - lead
    inside = (column >= 0) & (column < n_columns)
    values = tl.load(x + row.to(tl.int64) * n_columns + column, mask=inside, other=0.0)
    return values, half, half < 2 * n_blocks


@triton.jit
def clear(counters, N_COUNTERS: tl.constexpr):
    """Set the counters to zero, by one program, for the products of these rows."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(counters + tl.arange(0, N_COUNTERS), tl.zeros((N_COUNTERS,), tl.int32))


@triton.jit
def rounded(values, LARGEST: tl.constexpr):
    """Return each row of (n, 16) as integers within ±LARGEST, and its scale (n,)."""
    size = tl.max(tl.abs(values), axis=1)
    inverse = tl.where(size < TINY, 0.0, tl.div_rn(1.0 * LARGEST, tl.maximum(size, TINY)))
    whole = tl.fma(values, inverse[:, None], ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS
    unfit = tl.sum(values * 0.0, axis=1)  # NaN where a number is NaN or infinite
    return whole, size * (1.0 / LARGEST) + unfit


@triton.jit
def write_bytes(values, row, half, exists, n_blocks, numbers, facts, X_BYTES: tl.constexpr):
    """Write half blocks of a row, see `halves_of`, in the form of `as_bytes`."""
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
    """Write half blocks of a row, see `halves_of`, in the form of `as_numbers`."""
    place = row.to(tl.int64) * n_blocks * 2 + half
    at = numbers + place[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(at, values, mask=exists[:, None])
    tl.store(facts + place, tl.sum(values, axis=1), mask=exists)


@triton.jit(do_not_specialize=["lead", "n_columns", "n_blocks"])
def as_bytes(x, lead, n_columns, n_blocks, numbers, facts, counters, X_BYTES: tl.constexpr,
             BLOCKS: tl.constexpr, N_COUNTERS: tl.constexpr):  # fmt: skip
    """Quantise rows to bytes; BLOCKS blocks of a row for each program.

    Args:
        x: rows (rows, n_columns), contiguous F32.
        lead, n_columns, n_blocks: see `Extent`.
        numbers: output, bytes (rows, n_blocks, X_BYTES, 32); of two bytes the one of weight 255 is
            first.
        facts: output, 32-bit words (rows, n_blocks, 4): the scales (F32) of 16 columns each, then
            the sums of their integers.
        counters: output, zeros, int32 (N_COUNTERS,).
    """
    clear(counters, N_COUNTERS)
    row = tl.program_id(0)
    values, half, exists = halves_of(x, row, lead, n_columns, n_blocks, BLOCKS)
    write_bytes(values, row, half, exists, n_blocks, numbers, facts, X_BYTES)


@triton.jit(do_not_specialize=["lead", "n_columns", "n_blocks"])
def as_numbers(x, lead, n_columns, n_blocks, numbers, facts, counters, BLOCKS: tl.constexpr,
               N_COUNTERS: tl.constexpr):  # fmt: skip
    """Copy rows into blocks in F32, without rounding; arguments as in `as_bytes`, but:

    Args:
        numbers: output, F32 (rows, n_blocks, 32).
        facts: output, sums of 16 columns, F32 (rows, n_blocks, 2).
    """
    clear(counters, N_COUNTERS)
    row = tl.program_id(0)
    values, half, exists = halves_of(x, row, lead, n_columns, n_blocks, BLOCKS)
    write_numbers(values, row, half, exists, n_blocks, numbers, facts)
