"""Gemv kernel for matrices in F16, BF16 or F32."""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.gemv import place_of
from engine.backends.gpu.kernels.planes import weights


@triton.jit(do_not_specialize=["n_row", "n_rows", "x_stride", "n_columns"])
def product(x, data, y, n_row, n_rows, x_stride, n_columns, M: tl.constexpr, ROWS: tl.constexpr,
            STEP: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Compute `y = x Wᵀ`: ROWS rows of W for each program, all columns.

    Sums are F32, and their order is the same for any number of rows of x and of W. Each row of W is
    a tensor of its own, of the shape of a row of x: so Triton gives both the same layout, and no
    number moves between threads before the sums.

    Args:
        x: rows (n_row, n_columns), F32, `x_stride` apart.
        data: contiguous W (n_rows, n_columns).
        y: output, F32 (n_row, n_rows).
        M: see `engine.backends.gpu.kernels.gemv.products`.
        STEP: number of columns at a time.
        x_stride, n_columns: divided by ALIGNED, so that the compiler knows a factor of them.
    """
    n_columns *= ALIGNED
    x_stride *= ALIGNED
    program, _, first, _ = place_of(n_row, M)
    first_row = program * ROWS
    totals = ()
    for _ in tl.static_range(M * ROWS):
        totals = totals + (tl.zeros((STEP,), tl.float32),)
    for at in range(0, n_columns, STEP):
        column = at + tl.arange(0, STEP)
        inside = column < n_columns
        weights = ()
        for row in tl.static_range(ROWS):
            # rows beyond the last one read the last one
            start = tl.minimum(first_row + row, n_rows - 1).to(tl.int64) * n_columns
            weight = tl.load(data + start + column, mask=inside, other=0.0)
            weights = weights + (weight.to(tl.float32),)
        sums = ()
        for m in tl.static_range(M):
            start = tl.minimum(first + m, n_row - 1) * x_stride
            number = tl.load(x + start + column, mask=inside, other=0.0)
            for row in tl.static_range(ROWS):
                sums = sums + (totals[m * ROWS + row] + weights[row] * number,)
        totals = sums
    for m in tl.static_range(M):
        for row in tl.static_range(ROWS):
            total = tl.sum(totals[m * ROWS + row])
            is_here = (first_row + row < n_rows) & (first + m < n_row)
            tl.store(y + ((first + m) * n_rows + first_row + row), total, mask=is_here)


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
