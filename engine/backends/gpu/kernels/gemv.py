"""Gemv kernels: a few rows times quantised matrices; each weight is read once for all rows.

A program multiplies up to eight rows. Programs for further rows directly follow it, so that they
find its weights in the cache. For large matrices, there is one program per tile. For small ones,
the columns are split into parts (split K): each program stores its sums, and the tile's last one
adds them in order.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels import elementwise
from engine.backends.gpu.kernels.asm import atomic_add, dot_of_bytes, four_shared_words
from engine.backends.gpu.kernels.elementwise import write_bytes, write_numbers
from engine.backends.gpu.kernels.planes import (
    block_words,
    byte_of,
    has_high_halves,
    has_minimum,
    has_signed_quads,
    joined,
    row_quads,
    row_scales,
    table_bias,
)

BASE = tl.constexpr(255)  # weight of the first of two bytes; see `cpu.kernels.products.panels`
FULL = tl.constexpr(8)  # max. rows per program: registers hold their sums


@triton.jit
def tile_sums(tile, x, facts, rows, first, last, n_blocks, skip, ITEMS: tl.constexpr,
              UNROLL: tl.constexpr, X_BYTES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
              ZERO: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
              SIGNED: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return the products of some rows of x with the 16 rows of a tile, an F32 (16,) for each.

    Args:
        tile: address of the tile in its planes, a pointer to bytes.
        x, facts: numbers and facts that `quantise` wrote; pointers to the first row's bytes.
        rows: indices in x of the rows to multiply, a tuple.
        first, last: range of blocks to multiply, within [0, n_blocks).
        n_blocks, skip: see `Extent`.
        ITEMS: number of threads in a program, which takes ITEMS / 4 blocks per iteration.
        UNROLL: blocks that each thread prefetches before it works on the first one. Compilers tend
            to delay loads until their use, but not across iterations.
        X_BYTES: bytes per number, 0 for F32; the other constants are as in `gpu.quantised`.
    """
    BLOCKS: tl.constexpr = ITEMS // 4
    item = tl.arange(0, ITEMS)
    lane = item % 4 * 4
    sums = ()
    for _ in tl.static_range(4 * len(rows)):
        sums = sums + (tl.zeros((ITEMS,), tl.float32),)
    waiting = ()
    for step in tl.static_range(UNROLL):
        block = first + step * BLOCKS + item // 4
        waiting = waiting + (words_of(tile, x, facts, rows[0], block, lane, last, n_blocks, skip,
                                      X_BYTES, LOW, HIGH, SCALE, SUB, ASM),)  # fmt: skip
    for start in range(first, last, BLOCKS):
        block = start + item // 4
        later = waiting[0]
        if start + UNROLL * BLOCKS < last:
            later = words_of(tile, x, facts, rows[0], block + UNROLL * BLOCKS, lane, last, n_blocks,
                             skip, X_BYTES, LOW, HIGH, SCALE, SUB, ASM)  # fmt: skip
        sums = with_block(sums, waiting[0], x, facts, rows, n_blocks, block, last, X_BYTES, LOW,
                          HIGH, ZERO, TABLE, SCALE, SUB, SIGNED, ASM)  # fmt: skip
        waiting = without_first(waiting) + (later,)
    totals = ()
    for m in tl.static_range(len(rows)):
        even, odd = tl.join(sums[4 * m], sums[4 * m + 2]), tl.join(sums[4 * m + 1], sums[4 * m + 3])
        totals = totals + (tl.sum(tl.reshape(tl.join(even, odd), (BLOCKS, 16)), axis=0),)
    return totals


@triton.jit
def without_first(things):
    found = ()
    for n in tl.static_range(len(things) - 1):
        found = found + (things[n + 1],)
    return found


@triton.jit
def with_block(sums, words, x, facts, rows, n_blocks, block, last, X_BYTES: tl.constexpr,
               LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
               SCALE: tl.constexpr, SUB: tl.constexpr, SIGNED: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """Return `sums` plus one block for each thread that has one, from the words of `words_of`."""
    inside = block < last
    block = tl.minimum(block, last - 1)
    stored, numbers = words
    if X_BYTES > 0:
        return with_bytes(sums, stored, numbers, x, facts, rows, n_blocks, block, inside, X_BYTES,
                          LOW, HIGH, ZERO, TABLE, SCALE, SUB, SIGNED, ASM)  # fmt: skip
    else:
        return with_numbers(sums, stored, x, facts, rows, n_blocks, block, inside, LOW, HIGH, ZERO,
                            TABLE, SCALE, SUB, SIGNED, ASM)  # fmt: skip


@triton.jit
def words_of(tile, x, facts, row, block, lane, last, n_blocks, skip, X_BYTES: tl.constexpr,
             LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
             ASM: tl.constexpr):  # fmt: skip
    """Load a block before computing anything: its `block_words`, and `x_words` for a row."""
    block = tl.minimum(block, last - 1)
    stored = block_words(tile, block, lane, n_blocks, skip, LOW, HIGH, SCALE, SUB, ASM)
    numbers = ()
    if X_BYTES > 0:
        numbers = x_words(x, facts, row * n_blocks + block, X_BYTES, ASM)
    return stored, numbers


@triton.jit
def x_words(x, facts, place, X_BYTES: tl.constexpr, ASM: tl.constexpr):
    """Load a block in a row of x: a tuple of 8 * X_BYTES words for its numbers, and four facts."""
    numbers = ()
    for n in tl.static_range(2 * X_BYTES):
        numbers = numbers + four_shared_words(x + (place * (32 * X_BYTES) + 16 * n), ASM)
    d0, d1, sum0, sum1 = four_shared_words(facts + place * 16, ASM)
    return numbers, d0, d1, sum0, sum1


@triton.jit
def with_bytes(sums, stored, first, x, facts, rows, n_blocks, block, inside, X_BYTES: tl.constexpr,
               LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
               SCALE: tl.constexpr, SUB: tl.constexpr, SIGNED: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """Return `sums` plus one block per thread, with integer sums over each 16 columns.

    Args:
        sums: sums for each row of x and each of the tile's four rows.
        stored: words from `block_words`.
        first: `x_words` for the first row; each other row is loaded during the previous one.
        inside: whether the block exists.
    """
    low, high, scales, supers = stored
    IS_HIGH: tl.constexpr = has_high_halves(LOW, HIGH, TABLE)
    IS_SIGNED: tl.constexpr = has_signed_quads(LOW, TABLE, ASM)
    FROM: tl.constexpr = ZERO + table_bias(TABLE, LOW, ASM)
    quads, factors, added = (), (), ()
    for row in tl.static_range(4):
        found = row_quads(low, high, row, LOW, HIGH, TABLE, IS_HIGH, ASM)
        quads = quads + (operand(found, IS_SIGNED, ASM),)
        factor, more = row_scales(scales, supers, row, SCALE, SUB, SIGNED)
        factors, added = factors + (factor,), added + (more,)
    result = ()
    following = first
    for m in tl.static_range(len(rows)):
        words, d0, d1, sum0, sum1 = following
        if m + 1 < len(rows):
            following = x_words(x, facts, rows[m + 1] * n_blocks + block, X_BYTES, ASM)
        numbers = operand(words, True, ASM)
        d0 = tl.where(inside, d0.to(tl.float32, bitcast=True), 0.0)
        d1 = tl.where(inside, d1.to(tl.float32, bitcast=True), 0.0)
        x0, x1 = sum0.to(tl.float32) * d0, sum1.to(tl.float32) * d1
        x_sum = tl.fma(sum1.to(tl.float32), d1, x0)
        from0, from1 = sum0 * -FROM, sum1 * -FROM
        if IS_HIGH:
            from1 = from1 * 16
            d1 = d1 * 0.0625
        for row in tl.static_range(4):
            p0 = half_product(quads[row], numbers, from0, 0, X_BYTES, IS_SIGNED, ASM) * d0
            p1 = half_product(quads[row], numbers, from1, 1, X_BYTES, IS_SIGNED, ASM)
            total = sums[4 * m + row]
            if SUB == 32:
                total = tl.fma(factors[row][0], tl.fma(p1, d1, p0), total)
                if has_minimum(SCALE):
                    total = tl.fma(added[row][0], x_sum, total)
            else:
                total = tl.fma(factors[row][0], p0, total)
                total = tl.fma(factors[row][1], p1 * d1, total)
                if has_minimum(SCALE):
                    total = tl.fma(added[row][0], x0, total)
                    total = tl.fma(added[row][1], x1, total)
            result = result + (total,)
    return result


@triton.jit
def operand(quads, IS_SIGNED: tl.constexpr, ASM: tl.constexpr):
    """Return eight or more quads as operands of `half_product`: unchanged if ASM, otherwise as
    tensors of integers (threads, 16)."""
    if ASM:
        return quads
    else:
        shift = 8 * tl.arange(0, 4)[None, :]
        halves = ()
        for half in tl.static_range(len(quads) // 4):
            parts = (quads[4 * half], quads[4 * half + 1], quads[4 * half + 2], quads[4 * half + 3])
            words = tl.reshape(joined(parts), (4 * quads[0].shape[0], 1))
            if IS_SIGNED:
                numbers = (words << (24 - shift)) >> 24
            else:
                numbers = (words >> shift) & 255
            halves = halves + (tl.reshape(numbers, (quads[0].shape[0], 16)),)
        return halves


@triton.jit
def half_product(quads, numbers, total, HALF: tl.constexpr, X_BYTES: tl.constexpr,
                 IS_SIGNED: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return `total` plus the products of 16 columns, as F32.

    Args:
        quads: weights; see `operand`.
        numbers: numbers from x; see `operand`; of two bytes, those with weight BASE come first.
    """
    LAST: tl.constexpr = 2 * (X_BYTES - 1) + HALF
    if ASM:
        if X_BYTES == 2:
            upper = tl.zeros_like(total)
            for n in tl.static_range(4 * HALF, 4 * HALF + 4):
                upper = dot_of_bytes(quads[n], numbers[n], upper, IS_SIGNED)
            total = upper * BASE + total
        for n in tl.static_range(4):
            total = dot_of_bytes(quads[4 * HALF + n], numbers[4 * LAST + n], total, IS_SIGNED)
    else:
        if X_BYTES == 2:
            total += tl.sum(quads[HALF] * numbers[HALF], axis=1) * BASE
        total += tl.sum(quads[HALF] * numbers[LAST], axis=1)
    return total.to(tl.float32)


@triton.jit
def with_numbers(sums, stored, x, facts, rows, n_blocks, block, inside, LOW: tl.constexpr,
                 HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr,
                 SUB: tl.constexpr, SIGNED: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return `sums` plus one block, like `with_bytes`, for rows x in F32."""
    low, high, scales, supers = stored
    IS_SIGNED: tl.constexpr = has_signed_quads(LOW, TABLE, ASM)
    FROM: tl.constexpr = ZERO + table_bias(TABLE, LOW, ASM)
    quads = ()
    for row in tl.static_range(4):
        quads = quads + (row_quads(low, high, row, LOW, HIGH, TABLE, False, ASM),)
    for half in tl.static_range(2):
        products = ()
        for _ in tl.static_range(4 * len(rows)):
            products = products + (tl.zeros_like(sums[0]),)
        for n in tl.static_range(4):
            products = with_quads(products, quads, x, rows, n_blocks, block, 4 * half + n,
                                  IS_SIGNED, ASM)  # fmt: skip
        result = ()
        for m in tl.static_range(len(rows)):
            at = (facts + ((rows[m] * n_blocks + block) * 8 + 4 * half)).to(
                tl.pointer_type(tl.float32)
            )
            x_sum = tl.load(at, mask=inside, other=0.0)
            for row in tl.static_range(4):
                factor, added = row_scales(scales, supers, row, SCALE, SUB, SIGNED)
                product = tl.where(inside, products[4 * m + row], 0.0)
                if FROM != 0:
                    product = tl.fma(x_sum, -1.0 * FROM, product)
                total = tl.fma(factor[half * 16 // SUB], product, sums[4 * m + row])
                if has_minimum(SCALE):
                    total = tl.fma(added[half * 16 // SUB], x_sum, total)
                result = result + (total,)
        sums = result
    return sums


@triton.jit
def with_quads(products, quads, x, rows, n_blocks, block, QUAD: tl.constexpr,
               IS_SIGNED: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return `products` plus four columns, for each row of x and each of the tile's four rows."""
    weights = ()
    for row in tl.static_range(4):
        for column in tl.static_range(4):
            byte = byte_of(quads[row][QUAD], column, IS_SIGNED)
            weights = weights + (byte.to(tl.float32),)
    result = ()
    for m in tl.static_range(len(rows)):
        place = rows[m] * n_blocks + block
        numbers = four_shared_words(x + (place * 128 + 16 * QUAD), ASM)
        for row in tl.static_range(4):
            total = products[4 * m + row]
            for column in tl.static_range(4):
                number = numbers[column].to(tl.float32, bitcast=True)
                total = tl.fma(weights[4 * row + column], number, total)
            result = result + (total,)
    return result


@triton.jit
def place_of(n_row, M: tl.constexpr):
    """Return a program's place: its index among the programs for its rows, its group of M rows, the
    first row, and the number of programs per group."""
    program = tl.program_id(0)
    if M < FULL:
        return program, 0, 0, 0
    else:
        n_group = tl.cdiv(n_row, M)
        group = program % n_group
        return program // n_group, group, group * M, tl.num_programs(0) // n_group


@triton.jit
def part_of(part, n_parts, n_blocks, ITEMS: tl.constexpr):
    """Return one part's range of blocks, given the part count; only the last may be shorter."""
    size = tl.cdiv(tl.cdiv(n_blocks, ITEMS // 4), n_parts) * (ITEMS // 4)
    return tl.minimum(part * size, n_blocks), tl.minimum((part + 1) * size, n_blocks)


@triton.jit
def distinct_rows(first, n_row, M: tl.constexpr):
    """Return a tuple of M row indices in x, from `first` on; the last row is repeated."""
    rows = ()
    for m in tl.static_range(M):
        rows = rows + (tl.minimum(first + m, n_row - 1),)
    return rows


@triton.jit
def of_all_parts(sums, program, part, n_parts, scratch, counter):
    """Return whether this is the tile's last program; if so, also the sums over all parts.

    Args:
        sums: tuple of sums over this program's part, F32 (16,) each.
        program: index of this program's sums in `scratch`, F32 (programs, sums, 16).
        counter: address of a counter that the tile's programs share; zero before and after.
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
    """Return the total of all parts' stored sums, added in the order of the parts."""
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
    """Write row m's 16 results plus bias and residual, if the row exists."""
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
    """Compute `x Wᵀ + bias + residual` for up to three matrices with the same type and extent.

    Each program multiplies one part of one tile. Programs are ordered by matrix, tile, part.

    Args:
        planes: bytes (n_tile, tile_bytes); any pointer for matrices from COUNT on.
        out: each matrix's results, F32 (n_row, rows).
        bias: each matrix's bias, F32 (rows,), if HAS_BIAS.
        residual: values to add, with the shape of `out0`, if HAS_RESIDUAL; COUNT is then 1.
        x, facts: n_row rows that `quantise` wrote.
        scratch: see `of_all_parts`; used by matrices with several parts.
        counters: zeros, int32; for each group of M rows, one for each tile with several parts.
        rows, parts: each matrix's row count, and its number of programs per tile.
        tile_bytes: a multiple of 64.
        COUNT: number of matrices.
        M: a power of two, at least n_row or `FULL`; the other constants are as in `tile_sums`.
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
    """Compute `act(x gateᵀ) * (x upᵀ)` for two matrices with the same type, extent and row count.

    Args:
        gate, up: planes as in `products`.
        out: results, F32 (n_row, n_rows).
        inner, inner_facts: if IS_ROUNDED, results quantised as by `quantise`; n_rows is then a
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
    """Write row m's 16 results, and also quantise them if IS_ROUNDED."""
    write_row(value, tile, out, out, out, n_rows, m, n_row, False, False)
    if IS_ROUNDED:
        values, row = tl.reshape(value, (1, 16)), tl.zeros((), tl.int32) + m
        half = tile + tl.zeros((1,), tl.int32)
        exists = half * 0 + row < n_row
        if X_BYTES > 0:
            write_bytes(values, row, half, exists, n_rows // 32, inner, inner_facts, X_BYTES)
        else:
            write_numbers(values, row, half, exists, n_rows // 32, inner, inner_facts)
