"""Gemv kernels for matrices in F16, BF16 or F32, and for one matrix per head (`x Wᵀ`, `x W`).

The latter's grid is (heads, parts of a matrix, rows of x): each row is multiplied separately,
in F32, so that it has the same bits in any batch. The matrices are small and stay in the cache.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.gemv import place_of
from engine.backends.gpu.kernels.planes import weights
from engine.backends.gpu.kernels.tile_gemm import stored_words, weights_at


@triton.jit(do_not_specialize=["n_row", "n_rows", "x_stride", "n_columns"])
def product(x, data, y, n_row, n_rows, x_stride, n_columns, M: tl.constexpr, ROWS: tl.constexpr,
            STEP: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Compute `y = x Wᵀ`: ROWS rows of W per program, all columns.

    Sums are F32, and their order does not depend on the number of rows in x and W. Each row of W is
    a separate tensor with the shape of a row of x, so Triton gives both the same layout, and no
    number moves between threads before the sums.

    Args:
        x: rows (n_row, n_columns), F32, `x_stride` apart.
        data: contiguous W (n_rows, n_columns).
        y: output, F32 (n_row, n_rows).
        M: see `engine.backends.gpu.kernels.gemv.products`.
        STEP: columns per iteration.
        x_stride, n_columns: divided by ALIGNED, so that the compiler knows a common factor.
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
            # indices beyond the last row read the last row
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
    """Dequantise BLOCKS blocks in 16 rows of a matrix per program.

    Args:
        planes: bytes (n_tile, tile_bytes).
        tile_bytes: a multiple of 64.
        n_blocks, skip, lead, n_columns: see `Extent`.
        n_rows: number of rows to write, starting at row `first`.
        out: contiguous output (n_rows, n_columns) in any float type, rounded to nearest.
        BLOCKS: a power of two.
        IS_EXACT: see `Extent`; if set, rows of `out` are aligned and stored with wide accesses.
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
    """Dequantise BLOCKS blocks of one row per program; write zeros if the row does not exist.

    Args:
        n_rows: number of rows in the matrix.
        ids: row indices, integers (n,), of any value.
        out: output, F32 (n, n_columns); the other arguments are as in `dequantise`.
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


@triton.jit
def first_column(block, line, PART: tl.constexpr, LOW: tl.constexpr):
    """Return the first of the four columns in part PART of words, counted from the first block."""
    if LOW == 4:
        quad = line + 4 * PART
    else:
        quad = line * (8 // LOW) + PART
    return block * 32 + quad * 4


@triton.jit(do_not_specialize=["n_tile", "n_blocks", "skip", "lead", "n_columns", "first", "n_out",
                               "x_row", "x_head"])  # fmt: skip
def planes_product(x, planes, y, tile_bytes, n_tile, n_blocks, skip, lead, n_columns, first, n_out,
                   x_row, x_head, BLOCKS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
                   LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
                   SCALE: tl.constexpr, SUB: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """Compute `y = x Wᵀ` for rows `first` to `first + n_out` of W, ROWS rows per program.

    Args:
        x: F32 (n_row, n_head, n_columns).
        x_row, x_head: element strides between rows and between heads in x.
        planes: bytes (n_head, n_tile, tile_bytes); tile_bytes is a multiple of 64.
        y: contiguous output, F32 (n_row, n_head, n_out).
        BLOCKS: blocks of 32 columns per iteration.
        ROWS: a multiple of 16.
    """
    WORDS: tl.constexpr = BLOCKS * LOW
    head, m = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_tile = first // 16 + tl.program_id(1) * (ROWS // 16)
    row = tl.arange(0, ROWS)
    tile = planes + (head * n_tile + first_tile) * tile_bytes
    at, lane = (row // 16 * tile_bytes)[:, None], (row % 16)[:, None]
    is_row = (first_tile + row // 16 < n_tile)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    line = word % LOW
    total = tl.zeros((ROWS, WORDS), tl.float32)
    for start in range(0, n_blocks, BLOCKS):
        block = start + word // LOW
        stored = stored_words(tile, at, lane, is_row, block, line, line, n_blocks, skip, ASM, LOW,
                              HIGH, TABLE, SCALE, SUB, SIGNED)  # fmt: skip
        for part in tl.static_range(8 // LOW):
            for column in tl.static_range(4):
                weight = weights_at(stored, 0x4B000000, part, column, ASM, LOW, ZERO, TABLE, SCALE,
                                    SUB)  # fmt: skip
                place = first_column(block, line, part, LOW) + column - lead
                number = tl.load(x + (m * x_row + head * x_head) + place,
                                 mask=(place >= 0) & (place < n_columns), other=0.0)  # fmt: skip
                total += weight * number
    goal = first_tile * 16 + row - first
    out = y + (m * tl.num_programs(0) + head) * n_out
    tl.store(out + goal, tl.sum(total, axis=1), mask=(goal >= 0) & (goal < n_out))


@triton.jit(do_not_specialize=["n_tile", "n_blocks", "skip", "lead", "n_columns", "first", "n_in",
                               "x_row", "x_head"])  # fmt: skip
def planes_transposed(x, planes, y, tile_bytes, n_tile, n_blocks, skip, lead, n_columns, first,
                      n_in, x_row, x_head, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
                      ASM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
                      TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
                      SIGNED: tl.constexpr):  # fmt: skip
    """Compute `y = x W` for rows `first` to `first + n_in` of W, BLOCKS blocks per program.

    Args:
        x: F32 (n_row, n_head, n_in).
        y: contiguous output, F32 (n_row, n_head, n_columns).
        ROWS: rows per iteration; the other arguments are as in `planes_product`.
    """
    WORDS: tl.constexpr = BLOCKS * LOW
    head, m = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    at, lane = (row // 16 * tile_bytes)[:, None], (row % 16)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    block, line = tl.program_id(1) * BLOCKS + word // LOW, word % LOW
    totals = ()
    for _ in tl.static_range(32 // LOW):
        totals = totals + (tl.zeros((ROWS, WORDS), tl.float32),)
    for first_tile in range(first // 16, (first + n_in + 15) // 16, ROWS // 16):
        tile = planes + (head * n_tile + first_tile) * tile_bytes
        is_row = (first_tile + row // 16 < n_tile)[:, None]
        stored = stored_words(tile, at, lane, is_row, block, line, line, n_blocks, skip, ASM, LOW,
                              HIGH, TABLE, SCALE, SUB, SIGNED)  # fmt: skip
        place = first_tile * 16 + row - first
        number = tl.load(x + (m * x_row + head * x_head) + place,
                         mask=(place >= 0) & (place < n_in), other=0.0)  # fmt: skip
        sums = ()
        for part in tl.static_range(8 // LOW):
            for column in tl.static_range(4):
                weight = weights_at(stored, 0x4B000000, part, column, ASM, LOW, ZERO, TABLE, SCALE,
                                    SUB)  # fmt: skip
                sums = sums + (totals[4 * part + column] + weight * number[:, None],)
        totals = sums
    out = y + (m * tl.num_programs(0) + head) * n_columns
    for part in tl.static_range(8 // LOW):
        for column in tl.static_range(4):
            goal = first_column(block, line, part, LOW) + column - lead
            total = tl.expand_dims(tl.sum(totals[4 * part + column], axis=0), 0)
            tl.store(out + goal, total, mask=(goal >= 0) & (goal < n_columns))


@triton.jit
def plain_part(data, n_rows, n_columns, first_row, first_column, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Load rows and columns for this program's head, F32 (ROWS, COLUMNS); 0 outside the matrix."""
    row = first_row + tl.arange(0, ROWS)[:, None]
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    start = data + tl.program_id(0).to(tl.int64) * n_rows * n_columns
    inside = (row < n_rows) & (column < n_columns)
    return tl.load(start + (row * n_columns + column), mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows", "n_columns", "first", "n_out", "x_row", "x_head"])
def plain_product(x, data, y, n_rows, n_columns, first, n_out, x_row, x_head, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Compute `y = x Wᵀ` for rows `first` to `first + n_out` of W, ROWS rows per program.

    Args:
        x: F32 (n_row, n_head, n_columns).
        x_row, x_head: element strides between rows and between heads in x.
        data: contiguous matrices (n_head, n_rows, n_columns).
        n_columns: divided by ALIGNED, so that the compiler knows a factor of it.
        y: contiguous output, F32 (n_row, n_head, n_out).
        COLUMNS: columns per iteration.
    """
    n_columns *= ALIGNED
    head, m = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_row = first + tl.program_id(1) * ROWS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, n_columns, COLUMNS):
        weight = plain_part(data, n_rows, n_columns, first_row, start, ROWS, COLUMNS)
        place = start + tl.arange(0, COLUMNS)
        number = tl.load(x + (m * x_row + head * x_head) + place, mask=place < n_columns, other=0.0)
        total += weight * number[None, :]
    goal = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    out = y + (m * tl.num_programs(0) + head) * n_out
    tl.store(out + goal, tl.sum(total, axis=1), mask=goal < n_out)


@triton.jit(do_not_specialize=["n_rows", "n_columns", "first", "n_in", "x_row", "x_head"])
def plain_transposed(x, data, y, n_rows, n_columns, first, n_in, x_row, x_head, ROWS: tl.constexpr,
                     COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Compute `y = x W` for rows `first` to `first + n_in` of W, COLUMNS columns per program.

    Args:
        x: F32 (n_row, n_head, n_in).
        y: contiguous output, F32 (n_row, n_head, n_columns).
        ROWS: rows per iteration; the other arguments are as in `plain_product`.
    """
    n_columns *= ALIGNED
    head, m = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = tl.program_id(1) * COLUMNS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(0, n_in, ROWS):
        weight = plain_part(data, n_rows, n_columns, first + row, start, ROWS, COLUMNS)
        place = row + tl.arange(0, ROWS)
        number = tl.load(x + (m * x_row + head * x_head) + place, mask=place < n_in, other=0.0)
        total += weight * number[:, None]
    goal = start + tl.arange(0, COLUMNS)
    out = y + (m * tl.num_programs(0) + head) * n_columns
    tl.store(out + goal, tl.sum(total, axis=0), mask=goal < n_columns)
