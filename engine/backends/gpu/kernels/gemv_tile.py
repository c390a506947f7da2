"""Products of a tile of 16 matrix rows with some rows x, the core of all gemv kernels.

A program walks the tile's blocks of 32 columns: each thread takes one block of four rows at a time
and accumulates its sums; in the end the threads' sums are added. So a row's result is summed in the
same order for any number of rows, and whatever else is multiplied in the same launch.

Rows x come from `gpu.kernels.quantise`: as bytes (`X_BYTES` for each number), which are
multiplied four at a time as integers, or as F32 (`X_BYTES` is 0).
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.asm import dot_of_bytes, four_shared_words
from engine.backends.gpu.kernels.plane_words import (
    block_words,
    has_high_halves,
    has_signed_quads,
    row_quads,
    row_scales,
    table_bias,
)
from engine.backends.gpu.kernels.planes import byte_of, has_minimum, joined

BASE = tl.constexpr(255)
"""Weight of the first of two bytes of a number, see `cpu.kernels.products.panels`."""


@triton.jit
def tile_sums(tile, x, facts, rows, first, last, n_blocks, skip, ITEMS: tl.constexpr,
              UNROLL: tl.constexpr, X_BYTES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
              ZERO: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
              SIGNED: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return the products of some rows of x with the 16 rows of a tile, an F32 (16,) for each.

    Args:
        tile: address of the tile in its planes, a pointer to bytes.
        x, facts: numbers and facts that `quantise` wrote, pointers to bytes of the first row.
        rows: tuple of the row numbers of x to multiply.
        first, last: range of blocks to multiply, within [0, n_blocks).
        n_blocks, skip: see `Extent`.
        ITEMS: number of threads of a program, which takes ITEMS / 4 blocks at a time.
        UNROLL: number of blocks that each thread prefetches before it works on the first of them.
            Loads of an earlier iteration are not delayed until their use, as compilers like to do.
        X_BYTES: see above; other constants as in `engine.backends.gpu.matmul.planes`.
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
    """Return a tuple without its first entry."""
    found = ()
    for n in tl.static_range(len(things) - 1):
        found = found + (things[n + 1],)
    return found


@triton.jit
def with_block(sums, words, x, facts, rows, n_blocks, block, last, X_BYTES: tl.constexpr,
               LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
               SCALE: tl.constexpr, SUB: tl.constexpr, SIGNED: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """Return `sums` plus one block of each thread, if it has one, from the words of `words_of`."""
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
    """Load a block before anything is computed: its `block_words`, and `x_words` of a row."""
    block = tl.minimum(block, last - 1)
    stored = block_words(tile, block, lane, n_blocks, skip, LOW, HIGH, SCALE, SUB, ASM)
    numbers = ()
    if X_BYTES > 0:
        numbers = x_words(x, facts, row * n_blocks + block, X_BYTES, ASM)
    return stored, numbers


@triton.jit
def x_words(x, facts, place, X_BYTES: tl.constexpr, ASM: tl.constexpr):
    """Load a block of a row of x: a tuple with 8 * X_BYTES words of its numbers, and four facts."""
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
    """Return `sums` plus one block of each thread, summed as integers over each 16 columns.

    Args:
        sums: sums of each row of x with each of the four rows of the tile.
        stored: words of `block_words`.
        first: `x_words` of the first row; those of a further row are loaded during the one before.
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
    """Return eight quads or more as `half_product` takes them.

    With ASM these are the quads themselves, else tensors of integers (threads, 16).
    """
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
        quads: weights, see `operand`.
        numbers: numbers of x, see `operand`; of two bytes those of weight BASE come first.
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
    """Return `products` plus four columns, for each row of x and each of four rows of the tile."""
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
