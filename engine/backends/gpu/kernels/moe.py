"""Kernels for routed experts: choosing the experts, sorting rows by expert, and their products.

Scores are compared as integers in the same order, so that the chosen experts are distinct even if
some scores are NaN; among equal scores, the first wins, as in
`engine.backends.cpu.kernels.small.routing`.

Grouped GEMM runs on the tensor cores: a program multiplies the rows in one block (see
`gpu.moe.DeviceGroups.table`) by COLUMNS rows of its expert's matrix; it returns immediately if its
table entry is empty. The grid is (parts of n_rows, blocks, matrices): one launch multiplies up to
two matrices per expert. Weights are dequantised to F16 or BF16; sums are F32.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels import elementwise
from engine.backends.gpu.kernels.elementwise import write_bytes, write_numbers
from engine.backends.gpu.kernels.gemv import tile_sums
from engine.backends.gpu.kernels.planes import (
    has_minimum,
    high_words,
    joined,
    looked_up,
    low_line,
    low_words,
    quad_of,
    scales_of,
    splat,
    starts,
    sub_blocks,
)


@triton.jit
def finished(total, expert, column, inside, scale, bias, n_rows, HAS_SCALE: tl.constexpr,
             HAS_BIAS: tl.constexpr):  # fmt: skip
    """Return `total * scale + bias` for one expert.

    Args:
        total: products with rows `column` of the expert's matrix, valid where `inside`; any shape.
        scale, bias: F32 (n_expert,) and (n_expert, n_rows).
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
    """Compute `x Wᵀ` for one row and one tile per program, with up to two matrices per expert.

    The grid is (n_tile, n_row, matrices).

    Args:
        planes: bytes (n_expert, n_tile, tile_bytes); tile_bytes is a multiple of 64.
        scale, bias: see `finished`; any pointers if unused.
        out: output, F32 (matrices, n_row, n_rows).
        expert_of: expert of each row, (n_row,).
        x, facts: rows written by `quantise`.
        per_row: output rows per row of x.
        n_rows: rows in each matrix.
        ITEMS: for this and the other constants, see `tile_sums`.
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
    """Compute `x Wᵀ` like `planes_rows`, for matrices in F16, BF16 or F32, ROWS rows per program.

    Args:
        data: contiguous matrices (n_expert, n_rows, n_columns).
        x: contiguous F32 (rows, n_columns).
        STEP: columns per iteration.
        n_units: number of columns divided by UNIT; the known factor allows wide loads.
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
    """Return `act(gate) * up` in half blocks, like `elementwise.halves_of`."""
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
    """Compute `act(gate) * up`, quantised for the expert's last matrix.

    Args:
        gate, up: F32 rows of n_columns elements, `stride` elements apart; if not HAS_UP, the result
            is `act(gate)`.
        numbers, facts: outputs as in `elementwise.as_bytes`, or as in `as_numbers` if X_BYTES is 0.
        limit, KIND, HAS_LIMIT: see `elementwise.gate`.
    """
    values, half, exists = inner_halves(gate, up, stride, lead, n_columns, n_blocks, limit, KIND,
                                        HAS_UP, HAS_LIMIT, BLOCKS)  # fmt: skip
    if X_BYTES > 0:
        write_bytes(values, tl.program_id(0), half, exists, n_blocks, numbers, facts, X_BYTES)
    else:
        write_numbers(values, tl.program_id(0), half, exists, n_blocks, numbers, facts)


@triton.jit
def block_rows(table, pair_of, ROWS: tl.constexpr, N_USED: tl.constexpr):
    """Return this program's expert, its ROWS rows in y and in x, and a mask of rows that exist.

    N_USED is the number of experts per token if x has one row per token; 0 if x has y's rows.
    """
    entry = table + tl.program_id(1) * 3
    expert, first, n = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    at = tl.arange(0, ROWS)
    row = (first + tl.where(at < n, at, 0)).to(tl.int64)
    source = row
    if N_USED > 0:
        source = tl.load(pair_of + row).to(tl.int64) // N_USED
    return expert, row, source, at < n


@triton.jit
def added_product(x, w, total, PRECISION: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Return `total + x w` for x (rows, k) and w (k, columns); w is converted to x's type."""
    w = w.to(x.dtype)
    if IS_INTERPRETED:  # numpy has no BF16
        return tl.dot(x.to(tl.float32), w.to(tl.float32), total)
    return tl.dot(x, w, total, input_precision=PRECISION)


@triton.jit
def store_products(out, total, x_scale, scale, bias, expert, row, source, is_row, column, n_row,
                   n_rows, HAS_X_SCALE: tl.constexpr, HAS_SCALE: tl.constexpr,
                   HAS_BIAS: tl.constexpr):  # fmt: skip
    """Apply `finished` to products (rows, columns) and write them to out (matrices, n_row, n_rows).

    If HAS_X_SCALE, `x_scale` has a factor for each row of x.
    """
    if HAS_X_SCALE:
        total = total * tl.load(x_scale + source)[:, None]
    is_column = column < n_rows
    total = finished(total, expert, column[None, :], is_column[None, :], scale, bias, n_rows,
                     HAS_SCALE, HAS_BIAS)  # fmt: skip
    at = (tl.program_id(2).to(tl.int64) * n_row + row) * n_rows
    inside = is_row[:, None] & is_column[None, :]
    tl.store(out + (at[:, None] + column[None, :]), total, mask=inside)


@triton.jit
def stored_step(tile, block, row, n_blocks, skip, LOW: tl.constexpr, HIGH: tl.constexpr,
                SCALE: tl.constexpr, SUB: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """Load the stored words for some rows and blocks; each thread loads whole blocks.

    Args:
        tile: pointers to each row's tile, (rows, 1).
        row: each row's index in its tile, (rows, 1).
        block: block indices (1, blocks); indices past the end read the last block again.
    """
    block = tl.minimum(block, n_blocks - 1)
    mask = block >= 0
    high, scales, supers = starts(n_blocks, LOW, HIGH, SCALE, SUB)
    lows = ()
    for line in tl.static_range(LOW):
        lows = lows + (low_words(tile, block, row, mask, line, LOW),)
    highs = ()
    for line in tl.static_range(HIGH):
        highs = highs + (high_words(tile, high, block, row, mask, line, HIGH),)
    factor, added = scales_of(tile, scales, supers, block, row, mask, skip, SCALE, SUB, SIGNED)
    return lows, highs, factor, added


@triton.jit
def decoded(stored, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
            SCALE: tl.constexpr, SUB: tl.constexpr):  # fmt: skip
    """Return the weights, F32 (rows, 32 * blocks), for the words that `stored_step` loaded."""
    IS_SIGNED: tl.constexpr = LOW == 8 or len(TABLE) > 0
    START: tl.constexpr = 128 if IS_SIGNED else ZERO
    lows, highs, factor, added = stored
    quads = ()
    for n in tl.static_range(8):
        above = lows[0]
        if HIGH > 0:
            above = highs[n * HIGH // 8]
        code = quad_of(lows[low_line(n, LOW)], above, n, LOW, HIGH)
        quads = quads + (looked_up(code, TABLE, LOW + HIGH),)
    SHAPE: tl.constexpr = (lows[0].shape[0], lows[0].shape[1])
    words = tl.reshape(joined(quads), (SHAPE[0], SHAPE[1], 8))
    if IS_SIGNED:
        words = words ^ splat(128)
    columns = ()
    for column in tl.static_range(4):
        bits = ((words >> (8 * column)) & 255) | 0x4B000000  # 2^23 more than the byte
        columns = columns + (bits.to(tl.float32, bitcast=True) - (8388608.0 + START),)
    numbers = tl.reshape(joined(columns), (SHAPE[0], SHAPE[1], 32 // SUB, SUB))
    numbers = numbers * tl.expand_dims(sub_blocks(factor), 3)
    if has_minimum(SCALE):
        numbers = numbers + tl.expand_dims(sub_blocks(added), 3)
    return tl.reshape(numbers, (SHAPE[0], SHAPE[1] * 32))


@triton.jit(do_not_specialize=["n_row", "n_rows", "tile_bytes", "n_tile", "n_blocks", "skip"])
def planes_product(planes0, planes1, scale0, scale1, bias0, bias1, out, table, pair_of, x, x_scale,
                   n_row, n_rows, tile_bytes, n_tile, n_blocks, skip, HAS_X_SCALE: tl.constexpr,
                   HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, N_USED: tl.constexpr,
                   IS_INTERPRETED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
                   ZERO: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
                   SIGNED: tl.constexpr):  # fmt: skip
    """Compute `x Wᵀ` for W stored in planes.

    Args:
        planes: bytes (n_expert, n_tile, tile_bytes); tile_bytes is a multiple of 64.
        scale, bias: see `finished`; any pointers if unused.
        out: output, F32 (matrices, n_row, n_rows).
        table, pair_of: see `DeviceGroups`.
        x: contiguous F16 or BF16 (rows, 32 * n_blocks); one row per token or per row of out.
        x_scale: see `store_products`.
        n_blocks, skip: see `Extent`.
        ROWS: rows per block.
        COLUMNS: rows of W per program, a multiple of 16.
        BLOCKS: blocks of 32 columns of W per iteration.
        N_USED: see `block_rows`.
    """
    if tl.load(table + tl.program_id(1) * 3 + 2) == 0:
        return
    expert, row, source, is_row = block_rows(table, pair_of, ROWS, N_USED)
    planes, scale, bias = planes0, scale0, bias0
    if tl.program_id(2) == 1:
        planes, scale, bias = planes1, scale1, bias1
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    near = tl.minimum(column, n_rows - 1)
    # this `where` makes the compiler give each thread whole rows, which tensor cores need
    lane = tl.where(column < n_rows, near % 16, 0)[:, None]
    tile = (planes + (expert * n_tile + near // 16) * tl.multiple_of(tile_bytes, 64))[:, None]
    number, at = tl.arange(0, BLOCKS)[None, :], tl.arange(0, BLOCKS * 32)
    width = n_blocks * 32
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # software pipeline: decode the next step and load the one after while tensor cores work
    stored = stored_step(tile, number, lane, n_blocks, skip, LOW, HIGH, SCALE, SUB, SIGNED)
    w = decoded(stored, LOW, HIGH, ZERO, TABLE, SCALE, SUB).to(x.dtype.element_ty)
    stored = stored_step(tile, BLOCKS + number, lane, n_blocks, skip, LOW, HIGH, SCALE, SUB, SIGNED)
    for first in range(0, n_blocks, BLOCKS):
        k = first * 32 + at
        part = tl.load(x + (source[:, None] * width + k[None, :]),
                       mask=is_row[:, None] & (k < width)[None, :], other=0.0)  # fmt: skip
        total = added_product(part, tl.trans(w), total, "ieee", IS_INTERPRETED)
        w = decoded(stored, LOW, HIGH, ZERO, TABLE, SCALE, SUB).to(x.dtype.element_ty)
        stored = stored_step(tile, first + 2 * BLOCKS + number, lane, n_blocks, skip, LOW, HIGH,
                             SCALE, SUB, SIGNED)  # fmt: skip
    store_products(out, total, x_scale, scale, bias, expert, row, source, is_row, column, n_row,
                   n_rows, HAS_X_SCALE, HAS_SCALE, HAS_BIAS)  # fmt: skip


@triton.jit(do_not_specialize=["n_row", "n_rows", "n_units"])
def plain_product(data0, data1, scale0, scale1, bias0, bias1, out, table, pair_of, x, x_scale,
                  n_row, n_rows, n_units, HAS_X_SCALE: tl.constexpr, HAS_SCALE: tl.constexpr,
                  HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                  STEP: tl.constexpr, N_USED: tl.constexpr, UNIT: tl.constexpr,
                  PRECISION: tl.constexpr, IS_INTERPRETED: tl.constexpr):  # fmt: skip
    """Compute `x Wᵀ` like `planes_product`, for W in F16, BF16 or F32.

    Args:
        data: contiguous matrices (n_expert, n_rows, n_columns), converted to x's type.
        x: contiguous F16, BF16 or F32 (rows, n_columns).
        STEP: columns of W per iteration.
        n_units: see `plain_rows`.
        PRECISION: `input_precision` of `tl.dot` for F32.
    """
    if tl.load(table + tl.program_id(1) * 3 + 2) == 0:
        return
    expert, row, source, is_row = block_rows(table, pair_of, ROWS, N_USED)
    data, scale, bias = data0, scale0, bias0
    if tl.program_id(2) == 1:
        data, scale, bias = data1, scale1, bias1
    n_columns = n_units * UNIT
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    data += (expert * n_rows + tl.minimum(column, n_rows - 1))[:, None] * n_columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, n_columns, STEP):
        k = first + tl.arange(0, STEP)
        is_here = (k < n_columns)[None, :]
        w = tl.load(data + k[None, :], mask=is_here, other=0.0)
        part = tl.load(x + (source[:, None] * n_columns + k[None, :]),
                       mask=is_row[:, None] & is_here, other=0.0)  # fmt: skip
        total = added_product(part, tl.trans(w), total, PRECISION, IS_INTERPRETED)
    store_products(out, total, x_scale, scale, bias, expert, row, source, is_row, column, n_row,
                   n_rows, HAS_X_SCALE, HAS_SCALE, HAS_BIAS)  # fmt: skip


@triton.jit(do_not_specialize=["lead", "n_columns", "width"])
def shorten(x, scale, out, lead, n_columns, width, HAS_SCALE: tl.constexpr, UNIT: tl.constexpr,
            SIZE: tl.constexpr):  # fmt: skip
    """Round rows of x to F16 or BF16 for the products; SIZE columns per program.

    Args:
        x: contiguous F32 (rows, n_columns).
        scale: divisor of each row, (rows,), if HAS_SCALE.
        out: output (rows, width); columns outside x become zeros.
        lead, n_columns, width: in units of UNIT columns; x starts at column `lead` of out.
    """
    lead, n_columns, width = lead * UNIT, n_columns * UNIT, width * UNIT
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = (at >= lead) & (at < lead + n_columns)
    value = tl.load(x + (row * n_columns + at - lead), mask=inside, other=0.0)
    if HAS_SCALE:
        value = value / tl.load(scale + row)
    tl.store(out + (row * width + at), value.to(out.dtype.element_ty), mask=at < width)


TAKEN = tl.constexpr(-(1 << 60))  # marks a taken entry; below all keys combined with indices
MIN_KEY = tl.constexpr(2 - (1 << 31))  # lowest key of a score; experts in unchosen groups get less


@triton.jit
def key_of(x):
    """Return a 32-bit integer for each F32; the integers are in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), MIN_KEY)


@triton.jit
def number_of(key):
    """Return the F32 value of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def highest(x):
    """Return the largest number; NaN counts as larger than any other."""
    return number_of(tl.max(key_of(x)))


@triton.jit
def largest(key, at, inside, N: tl.constexpr):
    """Return a mask of the N largest keys; among equals, the first win. `at` has their indices."""
    order = tl.where(inside, key.to(tl.int64) * 65536 + (65535 - at), TAKEN)
    for _ in range(N):
        order = tl.where(order == tl.max(order), TAKEN, order)
    return inside & (order == TAKEN)


@triton.jit
def within_best_groups(key, N_GROUP: tl.constexpr, N_GROUP_USED: tl.constexpr,
                       GROUPS: tl.constexpr, MEMBERS: tl.constexpr):  # fmt: skip
    """Lower the keys (GROUPS * MEMBERS,) outside the groups with the highest top-two sums."""
    groups = tl.reshape(key, (GROUPS, MEMBERS))
    member = tl.arange(0, MEMBERS)[None, :]
    first = tl.max(groups, axis=1)
    place = tl.min(tl.where(groups == first[:, None], member, MEMBERS), axis=1)
    second = tl.max(tl.where(member == place[:, None], MIN_KEY, groups), axis=1)
    group = tl.arange(0, GROUPS)
    best = largest(
        key_of(number_of(first) + number_of(second)), group, group < N_GROUP, N_GROUP_USED
    )
    return tl.reshape(tl.where(best[:, None], groups, MIN_KEY - 1), (GROUPS * MEMBERS,))


@triton.jit
def assign(logits, bias, weights, chosen, pair_of, scale, smallest, N_EXPERT: tl.constexpr,
           N_USED: tl.constexpr, N_GROUP: tl.constexpr, N_GROUP_USED: tl.constexpr,
           GROUPS: tl.constexpr, MEMBERS: tl.constexpr, GATING: tl.constexpr,
           HAS_BIAS: tl.constexpr, NORMALISES: tl.constexpr, IN_PAIRS: tl.constexpr):  # fmt: skip
    """Choose one token's experts and their weights in each program; see `Routing`.

    Args:
        logits: contiguous F32 (T, N_EXPERT).
        bias: F32 (N_EXPERT,); any pointer if unused.
        weights, chosen: outputs, F32 and integers (T, N_USED), by ascending expert.
        pair_of: output (T * N_USED,), set to 0, 1, 2, … if IN_PAIRS.
        scale: factor on the weights.
        smallest: lower bound for the divisor of the weights.
        GROUPS, MEMBERS: powers of two, at least the numbers of groups and of experts per group.
    """
    token = tl.program_id(0)
    at = tl.arange(0, GROUPS * MEMBERS)
    expert = at // MEMBERS * (N_EXPERT // N_GROUP) + at % MEMBERS
    inside = (at % MEMBERS < N_EXPERT // N_GROUP) & (at // MEMBERS < N_GROUP)
    lowest = float("-inf")
    row = logits + token.to(tl.int64) * N_EXPERT
    logit = tl.load(row + expert, mask=inside, other=lowest)
    score = logit
    if GATING == "softmax":
        power = tl.where(inside, tl.exp(logit - highest(logit)), 0.0)
        score = power / tl.sum(power)
    elif GATING == "sigmoid":
        score = 1 / (1 + tl.exp(-logit))
    wanted = score
    if not HAS_BIAS and N_GROUP == 1:
        wanted = logit  # same order, but large scores do not all round to 1
    if HAS_BIAS:
        wanted = wanted + tl.load(bias + expert, mask=inside, other=0.0)
    key = tl.where(inside, key_of(wanted), MIN_KEY)
    if N_GROUP > 1 and GATING != "softmax_chosen":
        key = within_best_groups(key, N_GROUP, N_GROUP_USED, GROUPS, MEMBERS)
    is_chosen = largest(key, at, inside, N_USED)
    weight = tl.where(is_chosen, score, 0.0)
    if GATING == "softmax_chosen":
        top = highest(tl.where(is_chosen, score, lowest))
        weight = tl.where(is_chosen, tl.exp(score - top), 0.0)
        weight = weight / tl.sum(weight)
    elif NORMALISES:
        weight = weight / tl.maximum(tl.sum(weight), smallest)
    pair = token * N_USED + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(weights + pair, weight * scale, mask=is_chosen)
    tl.store(chosen + pair, expert, mask=is_chosen)
    if IN_PAIRS:
        tl.store(pair_of + token * N_USED + at, token * N_USED + at, mask=at < N_USED)


@triton.jit(do_not_specialize=["n_pair", "n_block"])
def sort(chosen, n_pair, expert_of, pair_of, row_of, table, n_block, N_EXPERT: tl.constexpr,
         SIZE: tl.constexpr, STEP: tl.constexpr, BLOCK_ROWS: tl.constexpr):  # fmt: skip
    """Collect one expert's rows in each program; an expert's pairs keep their order.

    Every program counts all pairs, so one launch is enough.

    Args:
        chosen: expert of each (token, expert) pair, (n_pair,).
        expert_of, pair_of: outputs, each row's expert and pair, (n_pair,).
        row_of: output, each pair's row, (n_pair,).
        table: output (n_block, 3): each block's expert, first row and row count, which is at most
            BLOCK_ROWS.
        SIZE: a power of two above N_EXPERT.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, STEP)
    counts = tl.zeros((SIZE,), tl.int32)
    for start in range(0, n_pair, STEP):
        found = tl.load(chosen + start + at, mask=start + at < n_pair, other=N_EXPERT)
        counts += tl.histogram(found, SIZE)
    number = tl.arange(0, SIZE)
    counts = tl.where(number < N_EXPERT, counts, 0)
    blocks = (counts + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    first = tl.sum(tl.where(number < expert, counts, 0))
    n_row = tl.sum(tl.where(number == expert, counts, 0))
    block = tl.sum(tl.where(number < expert, blocks, 0))
    for start in range(0, n_row, BLOCK_ROWS):
        entry = table + (block + start // BLOCK_ROWS) * 3
        tl.store(entry, expert)
        tl.store(entry + 1, first + start)
        tl.store(entry + 2, tl.minimum(n_row - start, BLOCK_ROWS))
    if expert == N_EXPERT - 1:
        for n in range(tl.sum(blocks), n_block):
            tl.store(table + n * 3 + 2, 0)
    for start in range(0, n_pair, STEP):
        found = tl.load(chosen + start + at, mask=start + at < n_pair, other=N_EXPERT)
        is_mine = found == expert
        row = first + tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
        tl.store(expert_of + row, expert, mask=is_mine)
        tl.store(pair_of + row, start + at, mask=is_mine)
        tl.store(row_of + start + at, row, mask=is_mine)
        first += tl.sum(is_mine.to(tl.int32))


@triton.jit(do_not_specialize=["n"])
def sum_of_experts(y, weights, row_of, out, n, N_USED: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
                   SIZE: tl.constexpr):  # fmt: skip
    """Compute `out[t] = Σ y[row_of[t, i]] * weights[t, i]` in the order of i.

    A program computes SIZE columns of one token.

    Args:
        y: contiguous F32 (n_row, n).
        weights: F32 (T, N_USED); any pointer if unused.
        row_of: the row of y for each token and expert, (T, N_USED).
        out: contiguous output, F32 (T, n).
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    total = tl.zeros((SIZE,), tl.float32)
    for i in tl.static_range(N_USED):
        row = tl.load(row_of + token * N_USED + i).to(tl.int64)
        number = tl.load(y + row * n + at, mask=inside, other=0.0)
        if HAS_WEIGHTS:
            number = number * tl.load(weights + token * N_USED + i)
        total += number
    tl.store(out + token * n + at, total, mask=inside)
