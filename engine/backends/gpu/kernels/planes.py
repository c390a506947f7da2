"""Device functions that read planes; see `engine.formats.quants.layout` for their format.

All functions work element by element on tensors of any shape. An element is a pair of a block of 32
columns and a row in a tile: `block` and `row` are broadcast against each other, `tile` is the
tile's address (a pointer to bytes, or one per element), and `mask` says which elements exist;
others are read as 0. The constants come from `engine.backends.gpu.quantised.constants_of`.

A *quad* is a 32-bit word with four adjacent columns of a row, the first one in the lowest byte:
quad i of a block has columns 4i … 4i+3. Its bytes are unsigned codes, or signed numbers if the
layout has a table or eight bits.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.asm import chosen_bytes, four_words, one_word, two_words

TILE = tl.constexpr(16)
BLOCK = tl.constexpr(32)
SUPER = tl.constexpr(8)


@triton.constexpr_function
def scale_bytes(SCALE, SUB):
    """Return the number of scale bytes per block of 16 rows."""
    size = {"f16": 2, "f16_min": 4, "f32": 4, "super_min": 2}.get(SCALE, 1)
    return 16 * (32 // SUB) * size


@triton.constexpr_function
def super_bytes(SCALE):
    """Return the number of bytes for the factors of 256 columns and 16 rows."""
    return {"super": 32, "super_min": 64, "super_nibbles": 64}.get(SCALE, 0)


@triton.constexpr_function
def has_minimum(SCALE):
    """Return whether a minimum is added to the product of scale and number."""
    return SCALE in ("f16_min", "super_min", "super_nibbles")


@triton.constexpr_function
def splat(number):
    """Return a signed 32-bit word with `number` in each byte."""
    word = (number & 255) * 0x01010101
    return word - (1 << 32) if word >> 31 else word


@triton.jit
def starts(n_blocks, LOW: tl.constexpr, HIGH: tl.constexpr, SCALE: tl.constexpr,
           SUB: tl.constexpr):  # fmt: skip
    """Return the byte offsets of the planes `high`, `scales` and `supers` in a tile."""
    high = n_blocks * (64 * LOW)
    scales = high + n_blocks * (64 * HIGH)
    return high, scales, scales + n_blocks * scale_bytes(SCALE, SUB)


@triton.jit
def words(address, mask):
    """Load 32-bit words at byte addresses."""
    return tl.load(address.to(tl.pointer_type(tl.int32)), mask=mask, other=0)


@triton.jit
def halves(address, mask):
    """Load F16 numbers at byte addresses, as F32."""
    return tl.load(address.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def low_words(tile, block, row, mask, LINE: tl.constexpr, LOW: tl.constexpr):
    """Load line LINE < LOW of the plane `low`; it has bits from 8 / LOW quads."""
    return words(tile + (block * (64 * LOW) + row * 4 + 64 * LINE), mask)


@triton.jit
def high_words(tile, high, block, row, mask, LINE: tl.constexpr, HIGH: tl.constexpr):
    """Load line LINE < HIGH of the plane that starts at `high`."""
    return words(tile + (high + block * (64 * HIGH) + row * 4 + 64 * LINE), mask)


@triton.jit
def low_part(low, PART: tl.constexpr, LOW: tl.constexpr):
    """Return one quad's lower bits, given a word whose bits several quads share."""
    if LOW == 8:
        return low
    else:
        return (low >> (PART * LOW)) & splat((1 << LOW) - 1)


@triton.jit
def high_part(high, QUAD: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return the upper bits of quad QUAD, at their place in its bytes.

    `high` is the stored line that has these bits; its index is QUAD * HIGH // 8.
    """
    SHIFT: tl.constexpr = LOW - QUAD * HIGH % 8
    MASK: tl.constexpr = splat(((1 << HIGH) - 1) << LOW)
    if SHIFT >= 0:
        return (high << SHIFT) & MASK
    else:
        return (high >> -SHIFT) & MASK


@triton.jit
def quad_of(low, high, QUAD: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return the codes in quad QUAD, given its stored words, before any table look-up.

    Args:
        low: stored line with the quad's lower bits; its index is `low_line`.
        high: stored line with its upper bits; its index is QUAD * HIGH // 8; unused if HIGH is 0.
    """
    code = low_part(low, QUAD // 4 if LOW == 4 else QUAD % (8 // LOW), LOW)
    if HIGH > 0:
        code = code | high_part(high, QUAD, LOW, HIGH)
    return code


@triton.constexpr_function
def low_line(QUAD, LOW):
    """Return the index of the line in the plane `low` that has a quad's bits."""
    return QUAD % 4 if LOW == 4 else QUAD * LOW // 8


@triton.jit
def quads(tile, high, block, row, mask, LOW: tl.constexpr, HIGH: tl.constexpr,
          TABLE: tl.constexpr):  # fmt: skip
    """Return all eight quads in a block, in order; each stored word is read once."""
    lows = ()
    for line in tl.static_range(LOW):
        lows = lows + (low_words(tile, block, row, mask, line, LOW),)
    highs = ()
    for line in tl.static_range(HIGH):
        highs = highs + (high_words(tile, high, block, row, mask, line, HIGH),)
    found = ()
    for n in tl.static_range(8):
        above = lows[0]
        if HIGH > 0:
            above = highs[n * HIGH // 8]
        code = quad_of(lows[low_line(n, LOW)], above, n, LOW, HIGH)
        found = found + (looked_up(code, TABLE, LOW + HIGH),)
    return found


@triton.jit
def looked_up(code, TABLE: tl.constexpr, BITS: tl.constexpr):
    """Return table entries for BITS-bit codes, four to a word; the codes if there is no table.

    Each bit chooses between two halves of the table, for four bytes simultaneously, in plain
    arithmetic that works on all targets.
    """
    found = (code,)
    if len(TABLE) > 0:
        found = ()
        for n in tl.static_range(1 << BITS):
            found = found + (splat(TABLE[n]),)
        for bit in tl.static_range(BITS):
            is_set = ((code >> bit) & 0x01010101) * 255
            chosen = ()
            for n in tl.static_range(len(found) // 2):
                chosen = chosen + (found[2 * n] ^ ((found[2 * n] ^ found[2 * n + 1]) & is_set),)
            found = chosen
    return found[0]


@triton.jit
def byte_of(quad, COLUMN: tl.constexpr, IS_SIGNED: tl.constexpr):
    """Return the number in one of a quad's four columns, as a 32-bit integer."""
    if IS_SIGNED:
        return (quad << (24 - 8 * COLUMN)) >> 24
    else:
        return (quad >> (8 * COLUMN)) & 255


@triton.jit
def scale_numbers(tile, scales, block, row, mask, SCALE: tl.constexpr, SUB: tl.constexpr,
                  SIGNED: tl.constexpr):  # fmt: skip
    """Load the plane `scales`: a tuple of the sub-blocks' scales, and one of their minima.

    They are F32, or 32-bit integers to multiply by the factors if 256 columns share factors.
    """
    at = tile + (scales + block * scale_bytes(SCALE, SUB))
    numbers, minima = (), ()
    for sub in tl.static_range(32 // SUB):
        if SCALE == "f16" or SCALE == "f16_min":
            numbers = numbers + (halves(at + (row * 2 + 32 * sub), mask),)
            if SCALE == "f16_min":
                minima = minima + (halves(at + (row * 2 + 32), mask),)
        elif SCALE == "f32":
            address = (at + (row * 4 + 64 * sub)).to(tl.pointer_type(tl.float32))
            numbers = numbers + (tl.load(address, mask=mask, other=0.0),)
        else:
            byte = tl.load(at + (row + 16 * sub), mask=mask, other=0).to(tl.int32)
            if SCALE == "e8m0":
                numbers = numbers + (half_power(byte),)
            elif SCALE == "super_nibbles":
                numbers, minima = numbers + (byte & 15,), minima + (byte >> 4,)
            else:
                numbers = numbers + ((byte << 24) >> 24 if SIGNED else byte,)
                if SCALE == "super_min":
                    rest = tl.load(at + (row + 16), mask=mask, other=0).to(tl.int32)
                    minima = minima + (rest,)
    return numbers, minima


@triton.jit
def half_power(code):
    """Return half of 2 ** (code - 127), built from its bits; the two smallest are subnormal."""
    bits = tl.where(code < 2, 0x00200000 << (code & 1), (code - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def factors(tile, supers, block, row, mask, skip, SCALE: tl.constexpr):
    """Load a block's factors for scales and for minima, F32, for types that have them.

    `skip` is how many of the first 256 columns' blocks are not stored (`Extent.skip`).
    """
    at = tile + (supers + (block + skip) // 8 * super_bytes(SCALE) + row * 2)
    of_scales = halves(at, mask)
    of_minima = of_scales
    if SCALE != "super":
        of_minima = halves(at + 32, mask)
    return of_scales, of_minima


@triton.jit
def scales_of(tile, scales, supers, block, row, mask, skip, SCALE: tl.constexpr, SUB: tl.constexpr,
              SIGNED: tl.constexpr):  # fmt: skip
    """Return the scales for codes and the minima to add, rounded as in `formats.quants`.

    They are a tuple of F32 scales, one per sub-block, and a tuple with as many minima, or an empty
    one.
    """
    numbers, minima = scale_numbers(tile, scales, block, row, mask, SCALE, SUB, SIGNED)
    if super_bytes(SCALE) > 0:
        of_scales, of_minima = factors(tile, supers, block, row, mask, skip, SCALE)
        products, added = (), ()
        for sub in tl.static_range(32 // SUB):
            products = products + (of_scales * numbers[sub].to(tl.float32),)
            if has_minimum(SCALE):
                minimum = of_minima * minima[sub].to(tl.float32)
                added = added + (minimum * -1.0,)  # a unary minus would lose the sign of zero
        numbers, minima = products, added
    return numbers, minima


@triton.jit
def joined(parts):
    """Join 2, 4 or 8 tensors along new last dimensions of size 2, which index them in order."""
    for _ in tl.static_range(len(parts).bit_length() - 1):
        pairs = ()
        for n in tl.static_range(len(parts) // 2):
            pairs = pairs + (tl.join(parts[n], parts[n + len(parts) // 2]),)
        parts = pairs
    return parts[0]


@triton.jit
def numbers_of(found, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
               TABLE: tl.constexpr):  # fmt: skip
    """Return the 32 columns in eight quads of shape (a, b) as 32-bit integers (a, b, 32)."""
    IS_SIGNED: tl.constexpr = LOW == 8 or len(TABLE) > 0
    words = tl.reshape(joined(found), (found[0].shape[0], found[0].shape[1], 8))
    columns = ()
    for column in tl.static_range(4):
        columns = columns + (byte_of(words, column, IS_SIGNED),)
    spread = tl.reshape(joined(columns), (words.shape[0], words.shape[1], 32))
    return spread - ZERO


@triton.jit
def weights(tile, n_blocks, block, row, mask, skip, LOW: tl.constexpr, HIGH: tl.constexpr,
            ZERO: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
            SIGNED: tl.constexpr):  # fmt: skip
    """Dequantise blocks in rows to F32 (a, b, 32), bit-equal to the dequantised file.

    Args:
        tile: address of the tile, or of each element's tile.
        n_blocks: blocks per row in the planes.
        block, row, mask: tensors with shape (a, b), or broadcastable to it.
    """
    high, scales, supers = starts(n_blocks, LOW, HIGH, SCALE, SUB)
    found = quads(tile, high, block, row, mask, LOW, HIGH, TABLE)
    numbers = numbers_of(found, LOW, HIGH, ZERO, TABLE).to(tl.float32)
    factor, added = scales_of(tile, scales, supers, block, row, mask, skip, SCALE, SUB, SIGNED)
    parted = tl.reshape(numbers, (numbers.shape[0], numbers.shape[1], 32 // SUB, SUB))
    parted = parted * tl.expand_dims(sub_blocks(factor), 3)
    if has_minimum(SCALE):
        parted = parted + tl.expand_dims(sub_blocks(added), 3)
    return tl.reshape(parted, numbers.shape)


@triton.jit
def sub_blocks(parts):
    """Return a number for each sub-block, (a, b, sub-blocks)."""
    if len(parts) == 1:
        return tl.expand_dims(parts[0], 2)
    else:
        return joined(parts)


@triton.constexpr_function
def is_narrow(TABLE, LOW):
    """Return whether 16 numbers, counted from the smallest, all fit into 7 bits."""
    return LOW == 4 and len(TABLE) > 0 and max(TABLE) - min(TABLE) < 128


@triton.constexpr_function
def table_bias(TABLE, LOW, ASM):
    """Return the offset to add to a table's numbers before look-ups."""
    return -min(TABLE) if ASM and is_narrow(TABLE, LOW) else 0


@triton.constexpr_function
def table_word(TABLE, n, BIAS):
    """Return a table's numbers 4 n to 4 n + 3, plus BIAS, in one word."""
    numbers = [number + BIAS & 255 for number in TABLE[4 * n : 4 * n + 4]]
    found = sum(number << 8 * place for place, number in enumerate(numbers))
    return found - (1 << 32) if found >> 31 else found


@triton.constexpr_function
def has_signed_quads(LOW, TABLE, ASM):
    """Return whether the bytes from `row_quads` are signed."""
    return LOW == 8 or (len(TABLE) > 0 and not (ASM and is_narrow(TABLE, LOW)))


@triton.constexpr_function
def has_high_halves(LOW, HIGH, TABLE):
    """Return whether quads may stay in the upper halves of bytes, as 16 times their numbers."""
    return LOW == 4 and HIGH == 0 and len(TABLE) == 0


@triton.jit
def block_words(tile, block, row, n_blocks, skip, LOW: tl.constexpr, HIGH: tl.constexpr,
                SCALE: tl.constexpr, SUB: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Load a block's stored words: `low`, `high`, `scales`, `supers`, each a tuple.

    `row` is the first of four rows, and a multiple of four.
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
    """Load the words of a block's scales, starting at address `at`."""
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
    """Return the eight quads for one of the four rows: codes, or numbers plus `table_bias`.

    Args:
        low, high: words that `block_words` returned.
        IS_HIGH: whether quads 4 to 7 stay in the upper halves of their bytes; see
            `has_high_halves`.
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

    In a selector for `chosen_bytes`, three bits select one of eight bytes; the fourth replaces the
    byte by its sign. So if no number is negative, the wrong half of the table gives 0.
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
    """Look up four three-bit codes, one in each byte, in a table of eight numbers."""
    pairs = code | (code >> 4)
    selector = chosen_bytes(pairs, pairs, 0x3120)
    return chosen_bytes(table_word(TABLE, 0, 0), table_word(TABLE, 1, 0), selector)


@triton.jit
def half_at(words, ROW: tl.constexpr, FIRST: tl.constexpr):
    """Return, as F32, one of the four F16 numbers in two words, starting at `words[FIRST]`."""
    bits = (words[FIRST + ROW // 2] >> (ROW % 2 * 16)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def row_scales(scales, supers, ROW: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
               SIGNED: tl.constexpr):  # fmt: skip
    """Return the scales and minima of a row's sub-blocks, two tuples of F32.

    `scales` and `supers` are words from `block_words`.
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
