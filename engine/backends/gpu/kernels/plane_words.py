"""Reads of planes for gemv: each thread one block of 32 columns of four rows of a tile.

A thread loads all stored words of its block first, so that many loads are in flight, and then
decodes them. Every tensor here has one element for each thread. The constants are those of
`gpu.matmul.planes.constants_of`; a *quad* is defined in `planes`. With `ASM` the inline PTX
of `asm` is used; products have the same bits without.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.asm import chosen_bytes, four_words, one_word, two_words
from engine.backends.gpu.kernels.planes import (
    byte_of,
    half_power,
    has_minimum,
    looked_up,
    quad_of,
    scale_bytes,
    splat,
    starts,
    super_bytes,
)


@triton.constexpr_function
def is_narrow(TABLE, LOW):
    """Return whether 16 numbers are so close that, counted from the least, all fit into 7 bits."""
    return LOW == 4 and len(TABLE) > 0 and max(TABLE) - min(TABLE) < 128


@triton.constexpr_function
def table_bias(TABLE, LOW, ASM):
    """Return the number that is added to a table's numbers before they are looked up."""
    return -min(TABLE) if ASM and is_narrow(TABLE, LOW) else 0


@triton.constexpr_function
def table_word(TABLE, n, BIAS):
    """Return numbers 4 n to 4 n + 3 of a table, plus BIAS, in one word."""
    numbers = [number + BIAS & 255 for number in TABLE[4 * n : 4 * n + 4]]
    found = sum(number << 8 * place for place, number in enumerate(numbers))
    return found - (1 << 32) if found >> 31 else found


@triton.constexpr_function
def has_signed_quads(LOW, TABLE, ASM):
    """Return whether the bytes of `row_quads` are signed."""
    return LOW == 8 or (len(TABLE) > 0 and not (ASM and is_narrow(TABLE, LOW)))


@triton.constexpr_function
def has_high_halves(LOW, HIGH, TABLE):
    """Return whether quads may stay in the upper halves of bytes, as 16 times their numbers."""
    return LOW == 4 and HIGH == 0 and len(TABLE) == 0


@triton.jit
def block_words(tile, block, row, n_blocks, skip, LOW: tl.constexpr, HIGH: tl.constexpr,
                SCALE: tl.constexpr, SUB: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Load the stored words of a block: `low`, `high`, `scales`, `supers`, each a tuple.

    Args:
        tile: address of the tile.
        block: number of the block.
        row: first of the four rows, a multiple of four.
    """
    high_at, scales_at, supers_at = starts(n_blocks, LOW, HIGH, SCALE, SUB)
    at = tile + (block * (64 * LOW) + row * 4)
    low = ()
    for line in tl.static_range(LOW):
        low = low + four_words(at + 64 * line, ASM)
    at = tile + (high_at + block * (64 * HIGH) + row * 4)
    high = ()
    for line in tl.static_range(HIGH):
        high = high + four_words(at + 64 * line, ASM)
    scales = scale_words(tile + (scales_at + block * scale_bytes(SCALE, SUB)), row, SCALE, SUB, ASM)
    supers = ()
    if super_bytes(SCALE) > 0:
        at = tile + (supers_at + (block + skip) // 8 * super_bytes(SCALE) + row * 2)
        supers = two_words(at, ASM)
        if has_minimum(SCALE):
            supers = supers + two_words(at + 32, ASM)
    return low, high, scales, supers


@triton.jit
def scale_words(at, row, SCALE: tl.constexpr, SUB: tl.constexpr, ASM: tl.constexpr):
    """Load the words of the plane `scales` of a block whose scales begin at `at`."""
    words = ()
    for sub in tl.static_range(32 // SUB):
        if SCALE == "f16" or SCALE == "f16_min":
            words = words + two_words(at + (32 * sub + row * 2), ASM)
        elif SCALE == "f32":
            words = words + four_words(at + (64 * sub + row * 4), ASM)
        else:
            words = words + (one_word(at + (16 * sub + row), ASM),)
    if SCALE == "f16_min":
        words = words + two_words(at + (32 + row * 2), ASM)
    elif SCALE == "super_min":
        words = words + (one_word(at + (16 + row), ASM),)
    return words


@triton.jit
def row_quads(low, high, ROW: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
              TABLE: tl.constexpr, IS_HIGH: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return the eight quads of one of the four rows, see `has_signed_quads`.

    Args:
        low, high: words that `block_words` returned.
        IS_HIGH: whether quads 4 to 7 stay in the upper halves of their bytes, see
            `has_high_halves`.

    Returns:
        Eight quads: codes; with a table, its numbers plus `table_bias`.
    """
    quads = ()
    if ASM and LOW == 4 and len(TABLE) > 0:
        upper = ()
        for line in tl.static_range(4):
            first, second = looked_up_halves(low[4 * line + ROW], TABLE)
            quads, upper = quads + (first,), upper + (second,)
        quads = quads + upper
    else:
        for n in tl.static_range(8):
            stored = low[4 * (n % 4 if LOW == 4 else n * LOW // 8) + ROW]
            if IS_HIGH and n >= 4:
                quads = quads + (stored & splat(240),)
            else:
                above = stored
                if HIGH > 0:
                    above = high[4 * (n * HIGH // 8) + ROW]
                code = quad_of(stored, above, n, LOW, HIGH)
                if ASM and len(TABLE) > 0:
                    quads = quads + (looked_up_eight(code, TABLE),)
                else:
                    quads = quads + (looked_up(code, TABLE, LOW + HIGH),)
    return quads


@triton.jit
def looked_up_halves(stored, TABLE: tl.constexpr):
    """Look up the lower and the upper halves of four bytes in a table, plus `table_bias`.

    Three bits of a selector of `chosen_bytes` select one of eight bytes; the fourth replaces the
    byte by its sign. Where no number is negative, the wrong half of the table thus gives 0.
    """
    BIAS: tl.constexpr = table_bias(TABLE, 4, True)
    t0: tl.constexpr = table_word(TABLE, 0, BIAS)
    t1: tl.constexpr = table_word(TABLE, 1, BIAS)
    t2: tl.constexpr = table_word(TABLE, 2, BIAS)
    t3: tl.constexpr = table_word(TABLE, 3, BIAS)
    if is_narrow(TABLE, 4):
        other = stored ^ splat(136)
        first = chosen_bytes(t0, t1, stored) | chosen_bytes(t2, t3, other)
        second = chosen_bytes(t0, t1, stored >> 16) | chosen_bytes(t2, t3, other >> 16)
    else:
        index = stored & splat(119)
        which = ((stored >> 1) & splat(68)) | 0x32103210
        first = chosen_bytes(chosen_bytes(t0, t1, index), chosen_bytes(t2, t3, index), which)
        index, which = index >> 16, which >> 16
        second = chosen_bytes(chosen_bytes(t0, t1, index), chosen_bytes(t2, t3, index), which)
    return chosen_bytes(first, second, 0x6420), chosen_bytes(first, second, 0x7531)


@triton.jit
def looked_up_eight(code, TABLE: tl.constexpr):
    """Look up four codes of three bits, one in each byte, in a table of eight numbers."""
    pairs = code | (code >> 4)
    selector = chosen_bytes(pairs, pairs, 0x3120)
    return chosen_bytes(table_word(TABLE, 0, 0), table_word(TABLE, 1, 0), selector)


@triton.jit
def half_at(words, ROW: tl.constexpr, FIRST: tl.constexpr):
    """Return one of the four F16 numbers in two words from `words[FIRST]` on, as F32."""
    bits = (words[FIRST + ROW // 2] >> (ROW % 2 * 16)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def row_scales(scales, supers, ROW: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
               SIGNED: tl.constexpr):  # fmt: skip
    """Return the scales of a row's sub-blocks and its minima, two tuples of F32.

    Args:
        scales, supers: words that `block_words` returned.
    """
    numbers, added = (), ()
    if SCALE == "f16_min":
        numbers, added = (half_at(scales, ROW, 0),), (half_at(scales, ROW, 2),)
    elif SCALE == "super_min":
        minimum = byte_of(scales[1], ROW, False).to(tl.float32)
        added = (half_at(supers, ROW, 2) * minimum * -1.0,)
        numbers = (half_at(supers, ROW, 0) * byte_of(scales[0], ROW, False).to(tl.float32),)
    else:
        for sub in tl.static_range(32 // SUB):
            if SCALE == "f16":
                numbers = numbers + (half_at(scales, ROW, 2 * sub),)
            elif SCALE == "f32":
                numbers = numbers + (scales[4 * sub + ROW].to(tl.float32, bitcast=True),)
            elif SCALE == "e8m0":
                numbers = numbers + (half_power(byte_of(scales[sub], ROW, False)),)
            else:
                byte = byte_of(scales[sub], ROW, SIGNED)
                if SCALE == "super_nibbles":
                    minimum = half_at(supers, ROW, 2) * (byte >> 4).to(tl.float32)
                    added = added + (minimum * -1.0,)
                    byte = byte & 15
                numbers = numbers + (half_at(supers, ROW, 0) * byte.to(tl.float32),)
    return numbers, added
