"""Tile GEMM for up to a few hundred rows with weights in planes, on the tensor cores.

Weights are dequantised to F16 or BF16 right before they are multiplied. A 32-bit word in the plane
`low` has four adjacent columns of each of several quads (see `gpu.kernels.planes`). So byte c of
part p, over all words in a step, is one matrix (rows, words), and the activations that it is
multiplied by are stored together, too (`shorten`). Only stored words move between threads.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.asm import chosen_bytes
from engine.backends.gpu.kernels.planes import (
    half_power,
    has_minimum,
    is_narrow,
    looked_up,
    looked_up_eight,
    looked_up_halves,
    splat,
    starts,
    super_bytes,
)


@triton.constexpr_function
def offset(LOW, ZERO, TABLE, ASM):
    """Return the offset to subtract from the bytes of `codes_of`."""
    if ASM and is_narrow(TABLE, LOW):
        return -min(TABLE)
    return 128 if LOW == 8 or len(TABLE) > 0 else ZERO


@triton.jit(do_not_specialize=["n_blocks", "lead", "n_columns"])
def shorten(x, row_stride, scale, out, n_blocks, lead, n_columns, LOW: tl.constexpr,
            BLOCKS: tl.constexpr, HAS_SCALE: tl.constexpr):  # fmt: skip
    """Round activations and order them as `product` reads them; one step of a row per program.

    Args:
        x: F32 (T, n_columns), rows `row_stride` elements apart.
        scale: divisor of each row, (T,), if HAS_SCALE.
        out: output, F16 or BF16 (T, n_step, 32 / LOW, BLOCKS * LOW): for each step and position in
            words, the columns from all words. Columns outside the matrix are 0.
        lead: columns in the first block that are not in x.
        BLOCKS: blocks of 32 columns per step.
    """
    row, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    SIZE: tl.constexpr = 32 * BLOCKS
    WORDS: tl.constexpr = BLOCKS * LOW
    at = tl.arange(0, SIZE)
    position, word = at // WORDS, at % WORDS
    block, line, part = word // LOW, word % LOW, position // 4
    if LOW == 4:
        quad = line + 4 * part
    else:
        quad = line * (8 // LOW) + part
    column = (step * BLOCKS + block) * 32 + quad * 4 + position % 4 - lead
    value = tl.load(x + row * row_stride + column, mask=(column >= 0) & (column < n_columns),
                    other=0.0)  # fmt: skip
    if HAS_SCALE:
        value = value / tl.load(scale + row)
    goal = out + (row * tl.num_programs(1) + step) * SIZE
    tl.store(goal + at, value.to(out.dtype.element_ty))


@triton.jit
def numbers(code, magic, COLUMN: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr):
    """Return byte COLUMN of words, unsigned, minus BIAS, as F32, using the bits of 2^23 + byte."""
    if ASM:  # one instruction instead of three: the byte, two zero bytes, the top byte of `magic`
        bits = chosen_bytes(code, magic, 0x7440 + COLUMN)
    else:
        bits = ((code >> (8 * COLUMN)) & 255) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + BIAS)


@triton.jit
def plain_scales(start, at, block, inside, SCALE: tl.constexpr, SUBS: tl.constexpr,
                 STEP: tl.constexpr):  # fmt: skip
    """Load scales and minima for blocks of rows: two tuples of F32, with an entry per sub-block.

    Args:
        start: pointer to the plane `scales` in the first tile.
        at: byte offset from there to each row's tile, and the index in the plane of the row and
            first sub-block; see `stored_words`.
        block: each word's block, (1, words).
        inside: mask of the blocks and rows that exist, (rows, words).
        SUBS: number of sub-blocks in a tuple.
        STEP: number of sub-blocks in a block.
    """
    tile, lane = at
    factors, added = (), ()
    if SCALE == "f32":
        floats = start.to(tl.pointer_type(tl.float32)) + (tile // 4 + lane + block * (16 * STEP))
        for sub in tl.static_range(SUBS):
            factors = factors + (tl.load(floats + 16 * sub, mask=inside, other=0.0),)
    elif SCALE == "e8m0":
        code = tl.load(start + (tile + lane + block * 16), mask=inside, other=0)
        factors = (half_power(code.to(tl.int32)),)
    else:
        WIDTH: tl.constexpr = 32 if SCALE == "f16_min" else 16 * STEP
        halves = start.to(tl.pointer_type(tl.float16)) + (tile // 2 + lane + block * WIDTH)
        for sub in tl.static_range(SUBS):
            half = tl.load(halves + 16 * sub, mask=inside, other=0.0)
            factors = factors + (half.to(tl.float32),)
        if SCALE == "f16_min":
            half = tl.load(halves + 16, mask=inside, other=0.0)
            added = (half.to(tl.float32),)
    return factors, added


@triton.jit
def super_scales(start, supers, skip, at, lane, block, inside, SCALE: tl.constexpr,
                 SUBS: tl.constexpr, STEP: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """Load scales and minima like `plain_scales`, for types with factors per 256 columns.

    Args:
        supers: pointer to the plane with these factors, in the first tile.
        lane: each row's index in its tile.
    """
    KINDS: tl.constexpr = 2 if has_minimum(SCALE) else 1
    tile, sub_lane = at
    group = (block + skip) // 8
    halves = supers.to(tl.pointer_type(tl.float16)) + (tile // 2 + lane + group * (16 * KINDS))
    whole = tl.load(halves, mask=inside, other=0.0).to(tl.float32)
    of_minima = whole
    if KINDS == 2:
        of_minima = tl.load(halves + 16, mask=inside, other=0.0).to(tl.float32)
    WIDTH: tl.constexpr = 32 if SCALE == "super_min" else 16 * STEP
    codes = start + (tile + sub_lane + block * WIDTH)
    factors, added = (), ()
    for sub in tl.static_range(SUBS):
        code = tl.load(codes + 16 * sub, mask=inside, other=0).to(tl.int32)
        if SCALE == "super_nibbles":
            factors = factors + (whole * (code & 15).to(tl.float32),)
            added = added + (-(of_minima * (code >> 4).to(tl.float32)),)
        else:
            number = (code << 24) >> 24 if SIGNED else code
            factors = factors + (whole * number.to(tl.float32),)
    if SCALE == "super_min":
        code = tl.load(codes + 16, mask=inside, other=0).to(tl.int32)
        added = (-(of_minima * code.to(tl.float32)),)
    return factors, added


@triton.jit
def codes_of(low, highs, shift, LOW: tl.constexpr, HIGH: tl.constexpr, TABLE: tl.constexpr,
             ASM: tl.constexpr):  # fmt: skip
    """Return a tuple with the codes in each part of words from the plane `low`, four to a word.

    Args:
        highs: one or two words with the codes' upper bits (see `gpu.kernels.planes`).
        shift: each word's line in its block.
    """
    codes = ()
    if LOW == 8:
        codes = (low ^ splat(128),)
    elif ASM and LOW == 4 and len(TABLE) > 0:
        first, second = looked_up_halves(low, TABLE)
        SIGNS: tl.constexpr = 0 if is_narrow(TABLE, LOW) else splat(128)
        codes = (first ^ SIGNS, second ^ SIGNS)
    else:
        for part in tl.static_range(8 // LOW):
            code = (low >> (LOW * part)) & splat((1 << LOW) - 1)
            if HIGH == 2:
                code = code | (((highs[part] >> (2 * shift)) & splat(3)) << LOW)
            elif HIGH == 1:
                quad = shift + 4 * part if LOW == 4 else shift * 4 + part
                code = code | (((highs[0] >> quad) & splat(1)) << LOW)
            if len(TABLE) > 0:
                if ASM:
                    code = looked_up_eight(code, TABLE) ^ splat(128)
                else:
                    code = looked_up(code, TABLE, LOW + HIGH) ^ splat(128)
            codes = codes + (code,)
    return codes


@triton.jit
def multiplied(weights, numbers, total, IS_INTERPRETED: tl.constexpr):
    if IS_INTERPRETED:  # numpy has no BF16
        weights = weights.to(numbers.dtype).to(tl.float32)
        return tl.dot(weights, numbers.to(tl.float32), total)
    else:
        return tl.dot(weights.to(numbers.dtype), numbers, total)


@triton.jit
def stored_words(tile, at, lane, is_row, block, line, shift, n_blocks, skip, ASM: tl.constexpr,
                 LOW: tl.constexpr, HIGH: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr,
                 SUB: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """Load what `weights_at` needs: three tuples, with each part's codes, scales, and minima.

    Args:
        tile: pointer to the first tile's bytes.
        at: byte offset from there to each row's tile, (rows, 1).
        lane: each row's index in its tile, (rows, 1).
        is_row: mask of the rows that exist, (rows, 1).
        block, line: each word's block, and its line in that block, (1, words).
        shift: equal to line, but possibly loaded from memory; see `product`.
    """
    # two quads in a word have a sub-block each; four quads share one
    IN_WORD: tl.constexpr = 32 // SUB if LOW == 4 else 1
    sub_at = at, lane + line * 16 if LOW == 2 and SUB == 16 else lane
    high, scales, supers = starts(n_blocks, LOW, HIGH, SCALE, SUB)
    inside = is_row & (block < n_blocks)
    words = tile.to(tl.pointer_type(tl.int32)) + (at // 4 + lane)
    low = tl.load(words + (block * LOW + line) * 16, mask=inside, other=0)
    if super_bytes(SCALE) > 0:
        factors, added = super_scales(tile + scales, tile + supers, skip, sub_at, lane, block,
                                      inside, SCALE, IN_WORD, 32 // SUB, SIGNED)  # fmt: skip
    else:
        factors, added = plain_scales(tile + scales, sub_at, block, inside, SCALE, IN_WORD,
                                      32 // SUB)  # fmt: skip
    highs = ()
    for n in tl.static_range(HIGH):
        upper = (tile + high).to(tl.pointer_type(tl.int32))
        upper = upper + (at // 4 + lane + block * (16 * HIGH) + 16 * n)
        highs = highs + (tl.load(upper, mask=inside, other=0),)
    return codes_of(low, highs, shift, LOW, HIGH, TABLE, ASM), factors, added


@triton.jit
def weights_at(stored, magic, PART: tl.constexpr, COLUMN: tl.constexpr, ASM: tl.constexpr,
               LOW: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr,
               SUB: tl.constexpr):  # fmt: skip
    """Return the weights for one column in one part of all words, F32 (rows, words).

    Args:
        stored: result of `stored_words`.
        magic: words with the bits of 2^23 as F32.
    """
    codes, factors, added = stored
    SUB_BLOCK: tl.constexpr = PART if LOW == 4 and SUB == 16 else 0
    weight = numbers(codes[PART], magic, COLUMN, offset(LOW, ZERO, TABLE, ASM), ASM)
    weight = weight * factors[SUB_BLOCK]
    if has_minimum(SCALE):
        weight = weight + added[SUB_BLOCK]
    return weight


@triton.jit
def step_product(total, x, stored, magic, WORDS: tl.constexpr, IS_INTERPRETED: tl.constexpr,
                 ASM: tl.constexpr, LOW: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
                 SCALE: tl.constexpr, SUB: tl.constexpr):  # fmt: skip
    """Return `total + W x` over the columns of one step.

    Args:
        total: sums, F32 (rows, tokens).
        x: pointers to the activations for the first position in words, (WORDS, tokens); each next
            position is WORDS elements further.
        stored, magic: see `weights_at`.
    """
    for part in tl.static_range(8 // LOW):
        for column in tl.static_range(4):
            weight = weights_at(stored, magic, part, column, ASM, LOW, ZERO, TABLE, SCALE, SUB)
            short = tl.load(x + (4 * part + column) * WORDS)
            total = multiplied(weight, short, total, IS_INTERPRETED)
    return total


@triton.jit(do_not_specialize=["n_tile", "n_blocks", "skip", "n_token", "n_rows", "n_step"])
def product(x, planes, tile_bytes, n_tile, n_blocks, skip, n_token, n_rows, n_step, ramp, y,
            ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
            IS_INTERPRETED: tl.constexpr, ASM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
            ZERO: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
            SIGNED: tl.constexpr):  # fmt: skip
    """Compute `y = x Wᵀ`: TOKENS rows of x, ROWS rows of W and a part of the columns per program.

    Args:
        x: F16 or BF16 (n_token, n_step, 32 / LOW, BLOCKS * LOW), as `shorten` writes it.
        planes: bytes (n_tile, tile_bytes); tile_bytes is a multiple of 64.
        n_blocks, skip: see `Extent`.
        ramp: 32-bit words 0, 1, … 7, then the bits of 2^23 as F32, eight times. They are loaded
            because Triton converts stored words to the operand's layout before decoding them only
            if all inputs to the decoding are loaded or constant; and loaded words, unlike
            constants, are not written to registers again and again.
        y: output, F32 (parts, n_token, n_rows): sums over parts of the columns.
        ROWS, TOKENS: powers of two, at least 16.
        BLOCKS: blocks of 32 columns per step; BLOCKS * LOW is a power of two, at least 16.
    """
    WORDS: tl.constexpr = BLOCKS * LOW
    tile_bytes = tl.multiple_of(tile_bytes, 64)
    row, word = tl.arange(0, ROWS), tl.arange(0, WORDS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first_tile = tl.program_id(1) * (ROWS // 16)
    tile = planes + first_tile.to(tl.int64) * tile_bytes
    at, lane = (row // 16 * tile_bytes)[:, None], (row % 16)[:, None]
    is_row = (first_tile + row // 16 < n_tile)[:, None]
    # threads for rows beyond x's last row read the last one
    x_at = x + (tl.minimum(token, n_token - 1)[None, :] * (n_step * (32 * BLOCKS)) + word[:, None])
    block, line = (word // LOW)[None, :], (word % LOW)[None, :]
    shift, magic = line, line
    if HIGH > 0:
        shift = tl.load(ramp + line)
    if ASM:
        magic = tl.load(ramp + (8 + line))
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    part, n_part = tl.program_id(2), tl.num_programs(2)
    for step in range(part * n_step // n_part, (part + 1) * n_step // n_part):
        stored = stored_words(tile, at, lane, is_row, block + step * BLOCKS, line, shift, n_blocks,
                              skip, ASM, LOW, HIGH, TABLE, SCALE, SUB, SIGNED)  # fmt: skip
        total = step_product(total, x_at + step * (32 * BLOCKS), stored, magic, WORDS,
                             IS_INTERPRETED, ASM, LOW, ZERO, TABLE, SCALE, SUB)  # fmt: skip
    goal = y + (part.to(tl.int64) * n_token * n_rows + first_tile * 16)
    inside = (first_tile * 16 + row < n_rows)[:, None] & (token < n_token)[None, :]
    tl.store(goal + (token[None, :] * n_rows + row[:, None]), total, mask=inside)
