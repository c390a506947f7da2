"""Kernels that dequantise rows of planes."""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.planes import weights


@triton.jit(do_not_specialize=["n_blocks", "skip", "lead", "n_columns", "n_rows", "first"])
def dequantise(planes, tile_bytes, n_blocks, skip, lead, n_columns, n_rows, first, out,
               BLOCKS: tl.constexpr, IS_EXACT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
               ZERO: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
               SIGNED: tl.constexpr):  # fmt: skip
    """Dequantise BLOCKS blocks of 16 rows of a matrix in each program.

    Args:
        planes: bytes (n_tile, tile_bytes).
        tile_bytes: a multiple of 64.
        n_blocks, skip, lead, n_columns: see `Extent`.
        n_rows: number of rows to write, from row `first` on.
        out: contiguous output (n_rows, n_columns) of any float type, rounded to the nearest.
        BLOCKS: a power of two.
        IS_EXACT: see `Extent`; then rows of `out` are aligned and stored with wide accesses.
    """
    number = first // 16 + tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    row = tl.arange(0, 16)[:, None]
    tile = planes + number.to(tl.int64) * tl.multiple_of(tile_bytes, 64)
    found = weights(tile, n_blocks, block, row, block < n_blocks, skip, LOW, HIGH, ZERO, TABLE,
                    SCALE, SUB, SIGNED)  # fmt: skip
    values = tl.reshape(found, (16, BLOCKS * 32))
    goal = number * 16 + row - first
    column = tl.program_id(1) * (BLOCKS * 32) + tl.arange(0, BLOCKS * 32)[None, :]
    inside = (goal >= 0) & (goal < n_rows)
    if IS_EXACT:
        n_columns = n_blocks * 32
        inside = inside & (column < n_columns)
    else:
        column = column - lead
        inside = inside & (column >= 0) & (column < n_columns)
    at = out + goal.to(tl.int64) * n_columns + column
    tl.store(at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_blocks", "skip", "lead", "n_columns", "n_rows"])
def look_up(planes, tile_bytes, n_blocks, skip, lead, n_columns, n_rows, ids, out,
            BLOCKS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
            TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
            SIGNED: tl.constexpr):  # fmt: skip
    """Dequantise BLOCKS blocks of one row in each program; zeros where there is no such row.

    Args:
        n_rows: number of rows of the matrix.
        ids: row numbers, integers (n,), of any value.
        out: output, F32 (n, n_columns); other arguments as in `dequantise`.
    """
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + index).to(tl.int64)
    is_here = (row >= 0) & (row < n_rows)
    row = tl.where(is_here, row, 0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    tile = planes + row // 16 * tl.multiple_of(tile_bytes, 64)
    lane = (row % 16).to(tl.int32)
    mask = (block < n_blocks) & is_here
    found = weights(tile, n_blocks, block, lane, mask, skip, LOW, HIGH, ZERO, TABLE, SCALE, SUB,
                    SIGNED)  # fmt: skip
    values = tl.where(is_here, tl.reshape(found, (BLOCKS * 32,)), 0.0)
    column = tl.program_id(1) * (BLOCKS * 32) + tl.arange(0, BLOCKS * 32) - lead
    tl.store(out + index * n_columns + column, values, mask=(column >= 0) & (column < n_columns))
