"""Gemv kernels of routed experts: each row is multiplied separately, by its expert's matrix.

A program reads the expert of its row from device memory. Weights in planes are multiplied as in
`engine.backends.gpu.kernels.gemv`, so that a row has the same bits whatever other rows there are.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels import elementwise
from engine.backends.gpu.kernels.gemv_tile import tile_sums
from engine.backends.gpu.kernels.quantise import write_bytes, write_numbers


@triton.jit
def finished(total, expert, column, inside, scale, bias, n_rows, HAS_SCALE: tl.constexpr,
             HAS_BIAS: tl.constexpr):  # fmt: skip
    """Return `total * scale + bias` of an expert.

    Args:
        total: products with rows `column` of the expert's matrix, where `inside`; of any shape.
        scale: F32 (n_expert,).
        bias: F32 (n_expert, n_rows).
    """
    if HAS_SCALE:
        total = total * tl.load(scale + expert)
    if HAS_BIAS:
        total = total + tl.load(bias + expert * n_rows + column, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["n_tile", "n_rows", "per_row", "tile_bytes", "n_blocks", "skip"])
def planes_rows(planes0, planes1, scale0, scale1, bias0, bias1, out, expert_of, x, facts, n_tile,
                n_rows, per_row, tile_bytes, n_blocks, skip, HAS_SCALE: tl.constexpr,
                HAS_BIAS: tl.constexpr, ITEMS: tl.constexpr, UNROLL: tl.constexpr,
                X_BYTES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
                TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr, SIGNED: tl.constexpr,
                ASM: tl.constexpr):  # fmt: skip
    """Compute `x Wᵀ` of one row and one tile in each program, with up to two matrices per expert.

    Programs are (n_tile, n_row, matrices).

    Args:
        planes: bytes (n_expert, n_tile, tile_bytes); tile_bytes is a multiple of 64.
        scale, bias: see `finished`; any pointers where there are none.
        out: output, F32 (matrices, n_row, n_rows).
        expert_of: expert of each row, (n_row,).
        x, facts: rows that `quantise` wrote.
        per_row: number of rows of the output that share a row of x.
        n_rows: number of rows of each matrix.
        ITEMS: see `tile_sums`, as for the other constants.
    """
    tile, row, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert = tl.load(expert_of + row).to(tl.int64)
    planes, scale, bias = planes0, scale0, bias0
    if which == 1:
        planes, scale, bias = planes1, scale1, bias1
    address = planes + (expert * n_tile + tile) * tl.multiple_of(tile_bytes, 64)
    sums = tile_sums(address, x, facts, (row // per_row,), 0, n_blocks, n_blocks, skip, ITEMS,
                     UNROLL, X_BYTES, LOW, HIGH, ZERO, TABLE, SCALE, SUB, SIGNED, ASM)  # fmt: skip
    column = tile * 16 + tl.arange(0, 16)
    inside = column < n_rows
    total = finished(sums[0], expert, column, inside, scale, bias, n_rows, HAS_SCALE, HAS_BIAS)
    at = out + (which * tl.num_programs(1) + row).to(tl.int64) * n_rows
    tl.store(at + column, total, mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_units", "per_row"])
def plain_rows(data0, data1, scale0, scale1, bias0, bias1, out, expert_of, x, n_rows, n_units,
               per_row, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
               STEP: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Compute `x Wᵀ` like `planes_rows` with matrices in F16, BF16 or F32, ROWS rows per program.

    Args:
        data: contiguous matrices (n_expert, n_rows, n_columns).
        x: contiguous F32 (rows, n_columns).
        STEP: number of columns at a time.
        n_units: number of columns in units of UNIT; the known factor allows wide loads.
    """
    row, which = tl.program_id(1), tl.program_id(2)
    expert = tl.load(expert_of + row).to(tl.int64)
    data, scale, bias = data0, scale0, bias0
    if which == 1:
        data, scale, bias = data1, scale1, bias1
    n_columns = n_units * UNIT
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = column < n_rows
    data += (expert * n_rows + tl.where(inside, column, 0))[:, None] * n_columns
    x += (row // per_row).to(tl.int64) * n_columns
    at = tl.arange(0, STEP)
    sums = tl.zeros((ROWS, STEP), tl.float32)
    for first in range(0, n_columns, STEP):
        k = first + at
        weight = tl.load(data + k[None, :], mask=(k < n_columns)[None, :], other=0.0)
        number = tl.load(x + k, mask=k < n_columns, other=0.0)
        sums = tl.fma(weight.to(tl.float32), tl.broadcast_to(number[None, :], (ROWS, STEP)), sums)
    total = tl.sum(sums, axis=1)
    total = finished(total, expert, column, inside, scale, bias, n_rows, HAS_SCALE, HAS_BIAS)
    goal = out + (which * tl.num_programs(1) + row).to(tl.int64) * n_rows
    tl.store(goal + column, total, mask=inside)


@triton.jit
def inner_halves(gate, up, stride, lead, n_columns, n_blocks, limit, KIND: tl.constexpr,
                 HAS_UP: tl.constexpr, HAS_LIMIT: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Return `act(gate) * up` in half blocks, like `quantise.halves_of`."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1) * (2 * BLOCKS) + tl.arange(0, 2 * BLOCKS)
    column = half[:, None] * 16 + tl.arange(0, 16)[None, :] - lead
    inside = (column >= 0) & (column < n_columns)
    value = tl.load(gate + row * stride + column, mask=inside, other=0.0)
    if HAS_UP:
        factor = tl.load(up + row * stride + column, mask=inside, other=0.0)
        value = elementwise.gate(value, factor, limit, KIND, HAS_LIMIT)
    else:
        value = elementwise.activated(value, KIND)
    return tl.where(inside, value, 0.0), half, half < 2 * n_blocks


@triton.jit(do_not_specialize=["stride", "lead", "n_columns", "n_blocks", "limit"])
def quantise_inner(gate, up, stride, lead, n_columns, n_blocks, limit, numbers, facts,
                   X_BYTES: tl.constexpr, KIND: tl.constexpr, HAS_UP: tl.constexpr,
                   HAS_LIMIT: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Compute `act(gate) * up`, quantised for the last matrix of an expert.

    Args:
        gate, up: F32, rows of n_columns, `stride` elements apart; without HAS_UP the result is
            `act(gate)`.
        numbers, facts: outputs as in `quantise.as_bytes`, or where X_BYTES is 0 as in `as_numbers`.
        limit, KIND, HAS_LIMIT: see `elementwise.gate`.
    """
    values, half, exists = inner_halves(gate, up, stride, lead, n_columns, n_blocks, limit, KIND,
                                        HAS_UP, HAS_LIMIT, BLOCKS)  # fmt: skip
    if X_BYTES > 0:
        write_bytes(values, tl.program_id(0), half, exists, n_blocks, numbers, facts, X_BYTES)
    else:
        write_numbers(values, tl.program_id(0), half, exists, n_blocks, numbers, facts)
