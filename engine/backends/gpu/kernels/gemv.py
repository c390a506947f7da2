"""Gemv kernels: few rows times quantised matrices; each weight is read once for all rows.

A program multiplies up to eight rows. Those of further rows follow right behind it, so that they
find its weights in the cache. Large matrices have a program for each tile. The columns of small
ones are split into parts (split K): each program stores its sums, and the last one of a tile adds
them in order.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels import elementwise
from engine.backends.gpu.kernels.asm import atomic_add
from engine.backends.gpu.kernels.gemv_tile import tile_sums
from engine.backends.gpu.kernels.quantise import write_bytes, write_numbers

FULL = tl.constexpr(8)
"""Most rows of a program, whose sums registers hold."""


@triton.jit
def place_of(n_row, M: tl.constexpr):
    """Return which work a program does: its number among those of the same rows, and the rows.

    Returns:
        That number; the group of M rows; its first row; and how many programs each group has.
    """
    program = tl.program_id(0)
    if M < FULL:
        return program, 0, 0, 0
    else:
        n_group = tl.cdiv(n_row, M)
        group = program % n_group
        return program // n_group, group, group * M, tl.num_programs(0) // n_group


@triton.jit
def part_of(part, n_parts, n_blocks, ITEMS: tl.constexpr):
    """Return the range of blocks of one of several parts; all but the last have whole steps."""
    size = tl.cdiv(tl.cdiv(n_blocks, ITEMS // 4), n_parts) * (ITEMS // 4)
    return tl.minimum(part * size, n_blocks), tl.minimum((part + 1) * size, n_blocks)


@triton.jit
def distinct_rows(first, n_row, M: tl.constexpr):
    """Return a tuple of M row numbers of x: those from `first` on, then the last one again."""
    rows = ()
    for m in tl.static_range(M):
        rows = rows + (tl.minimum(first + m, n_row - 1),)
    return rows


@triton.jit
def of_all_parts(sums, program, part, n_parts, scratch, counter):
    """Return whether this is the tile's last program, and for that one the sums over all parts.

    Args:
        sums: tuple of sums over this program's part, F32 (16,) each.
        program: index of this program's sums in `scratch`, F32 (programs, sums, 16).
        counter: address of a zero that all parts of the tile share; it is zero again in the end.
    """
    is_last = n_parts == 1
    if n_parts > 1:
        at = scratch + program * (16 * len(sums)) + tl.arange(0, 16)
        for n in tl.static_range(len(sums)):
            tl.store(at + 16 * n, sums[n])
        tl.debug_barrier()  # all threads have written before one counts the program
        is_last = atomic_add(counter, 1, "acq_rel") == n_parts - 1
        if is_last:
            tl.store(counter, 0)
            sums = added_parts(sums, scratch + (program - part) * (16 * len(sums)), n_parts)
    return is_last, sums


@triton.jit
def added_parts(sums, scratch, n_parts):
    """Return the total of the stored sums of all parts, added in their order."""
    totals = ()
    for _ in tl.static_range(len(sums)):
        totals = totals + (tl.zeros((16,), tl.float32),)
    for part in range(n_parts):
        at = scratch + part * (16 * len(sums)) + tl.arange(0, 16)
        found = ()
        for n in tl.static_range(len(sums)):
            found = found + (totals[n] + tl.load(at + 16 * n, cache_modifier=".cg"),)
        totals = found
    return totals


@triton.jit
def write_row(value, tile, out, bias, residual, n_rows, m, n_row, HAS_BIAS: tl.constexpr,
              HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    """Write 16 results of row m plus bias and residual; nothing where there is no such row."""
    column = tile * 16 + tl.arange(0, 16)
    inside = (column < n_rows) & (m < n_row)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0)
    at = m * n_rows + column
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(out + at, value, mask=inside)


@triton.jit(do_not_specialize=[
    "rows0", "rows1", "rows2", "parts0", "parts1", "parts2", "n_row", "tile_bytes",
    "n_blocks", "skip",
])  # fmt: skip
def products(planes0, planes1, planes2, out0, out1, out2, bias0, bias1, bias2, residual, x, facts,
             scratch, counters, rows0, rows1, rows2, parts0, parts1, parts2, n_row, tile_bytes,
             n_blocks, skip, COUNT: tl.constexpr, M: tl.constexpr, HAS_BIAS: tl.constexpr,
             HAS_RESIDUAL: tl.constexpr, ITEMS: tl.constexpr, UNROLL: tl.constexpr,
             X_BYTES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
             TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr, SIGNED: tl.constexpr,
             ASM: tl.constexpr):  # fmt: skip
    """Compute `x Wᵀ + bias + residual` for up to three matrices of one type and extent.

    A program multiplies one part of one tile. Programs are ordered by matrix, tile, part.

    Args:
        planes: bytes (n_tile, tile_bytes); any pointer for matrices from COUNT on.
        out: results of each matrix, F32 (n_row, rows).
        bias: bias of each matrix, F32 (rows,), if HAS_BIAS.
        residual: values to add, of the shape of `out0`, if HAS_RESIDUAL; then COUNT is 1.
        x, facts: n_row rows that `quantise` wrote.
        scratch: see `of_all_parts`; used by matrices in several parts.
        counters: zeros, int32, one for each tile in several parts; for each group of M rows as many
            as it has programs.
        rows, parts: rows of each matrix, and programs for each of its tiles.
        tile_bytes: a multiple of 64.
        COUNT: number of matrices.
        M: a power of two, at least n_row or `FULL`; other constants as in `tile_sums`.
    """
    program, group, first_row, n_program = place_of(n_row, M)
    index, counter = program, group * n_program
    scratch += group * n_program * (16 * M)
    planes, out, bias, n_rows, n_parts = planes0, out0, bias0, rows0, parts0
    if COUNT > 1:
        size = tl.cdiv(rows0, 16) * parts0
        if index >= size:
            index -= size
            counter += tl.cdiv(rows0, 16)
            planes, out, bias, n_rows, n_parts = planes1, out1, bias1, rows1, parts1
            if COUNT > 2:
                size = tl.cdiv(rows1, 16) * parts1
                if index >= size:
                    index -= size
                    counter += tl.cdiv(rows1, 16)
                    planes, out, bias, n_rows, n_parts = planes2, out2, bias2, rows2, parts2
    tile, part = index // n_parts, index % n_parts
    first, last = part_of(part, n_parts, n_blocks, ITEMS)
    address = planes + tile.to(tl.int64) * tl.multiple_of(tile_bytes, 64)
    rows = distinct_rows(first_row, n_row, M)
    sums = tile_sums(address, x, facts, rows, first, last, n_blocks, skip, ITEMS, UNROLL, X_BYTES,
                     LOW, HIGH, ZERO, TABLE, SCALE, SUB, SIGNED, ASM)  # fmt: skip
    is_last, sums = of_all_parts(
        sums, program, part, n_parts, scratch, counters + counter + tile
    )  # fmt: skip
    if is_last:
        for m in tl.static_range(M):
            write_row(sums[m], tile, out, bias, residual, n_rows, first_row + m, n_row, HAS_BIAS,
                      HAS_RESIDUAL)  # fmt: skip


@triton.jit(
    do_not_specialize=["n_rows", "n_parts", "n_row", "tile_bytes", "n_blocks", "skip", "limit"]
)
def gated(gate, up, out, inner, inner_facts, x, facts, scratch, counters, n_rows, n_parts, n_row,
          tile_bytes, n_blocks, skip, limit, KIND: tl.constexpr, HAS_LIMIT: tl.constexpr,
          IS_ROUNDED: tl.constexpr, M: tl.constexpr, ITEMS: tl.constexpr, UNROLL: tl.constexpr,
          X_BYTES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
          TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr, SIGNED: tl.constexpr,
          ASM: tl.constexpr):  # fmt: skip
    """Compute `act(x gateᵀ) * (x upᵀ)` for two matrices of one type, extent and number of rows.

    Args:
        gate, up: planes as in `products`.
        out: results, F32 (n_row, n_rows).
        inner, inner_facts: results quantised as by `quantise`, if IS_ROUNDED; then n_rows is a
            multiple of 32, and a tile's results are half a block.
        limit, KIND, HAS_LIMIT: see `elementwise.gate`.
    """
    program, group, first_row, n_program = place_of(n_row, M)
    counters += group * n_program
    scratch += group * n_program * (32 * M)
    tile, part = program // n_parts, program % n_parts
    first, last = part_of(part, n_parts, n_blocks, ITEMS)
    offset = tile.to(tl.int64) * tl.multiple_of(tile_bytes, 64)
    rows = distinct_rows(first_row, n_row, M)
    gates = tile_sums(gate + offset, x, facts, rows, first, last, n_blocks, skip, ITEMS, UNROLL,
                      X_BYTES, LOW, HIGH, ZERO, TABLE, SCALE, SUB, SIGNED, ASM)  # fmt: skip
    ups = tile_sums(up + offset, x, facts, rows, first, last, n_blocks, skip, ITEMS, UNROLL,
                    X_BYTES, LOW, HIGH, ZERO, TABLE, SCALE, SUB, SIGNED, ASM)  # fmt: skip
    is_last, sums = of_all_parts(
        gates + ups, program, part, n_parts, scratch, counters + tile
    )  # fmt: skip
    if is_last:
        for m in tl.static_range(M):
            value = elementwise.gate(sums[m], sums[M + m], limit, KIND, HAS_LIMIT)
            write_inner(value, tile, out, inner, inner_facts, n_rows, first_row + m, n_row,
                        IS_ROUNDED, X_BYTES)  # fmt: skip


@triton.jit
def write_inner(value, tile, out, inner, inner_facts, n_rows, m, n_row,
                IS_ROUNDED: tl.constexpr, X_BYTES: tl.constexpr):  # fmt: skip
    """Write 16 results of row m, and the same quantised if IS_ROUNDED."""
    write_row(value, tile, out, out, out, n_rows, m, n_row, False, False)
    if IS_ROUNDED:
        values, row = tl.reshape(value, (1, 16)), tl.zeros((), tl.int32) + m
        half = tile + tl.zeros((1,), tl.int32)
        exists = half * 0 + row < n_row
        if X_BYTES > 0:
            write_bytes(values, row, half, exists, n_rows // 32, inner, inner_facts, X_BYTES)
        else:
            write_numbers(values, row, half, exists, n_rows // 32, inner, inner_facts)
