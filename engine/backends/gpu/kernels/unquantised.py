"""Gemv kernel for matrices in F16, BF16 or F32."""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.gemv import place_of


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
