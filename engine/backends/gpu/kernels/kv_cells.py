"""Device functions that read parts of the KV cache for `tl.dot`, and the kernel that writes it.

TYPE is the keys' or values' type. Rows in "f32", "f16" and "bf16" are contiguous numbers. Rows in
"q8_0" and "q4_0" are GGML blocks of 32 elements: an F16 scale d, then integers q. Q8_0 has signed
bytes, x = d q; Q4_0 has nibbles, x = d (q - 8), and byte j has elements j (low) and j + 16 (high).
Blocks have an even number of bytes, so they are read as 16-bit units.
"""

import triton
import triton.language as tl

from engine.model.forward import pages

PAGE = tl.constexpr(pages.PAGE)  # positions with adjacent slots
BLOCK = tl.constexpr(32)  # elements per block
SIGN, INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
"""Mask of all F32 bits except the sign; bits of infinity."""
THOUSAND, THOUSAND_128 = tl.constexpr(0x6400), tl.constexpr(0x6480)  # 1024 and 1152 as F16
NO_NUMBER = tl.constexpr(0x7FC0)  # NaN as BF16


@triton.constexpr_function  # in this form, Triton 3.6 can evaluate an `if` at compile time
def has_blocks(TYPE):
    """Return whether TYPE has blocks of 32 elements with a scale."""
    return TYPE == "q8_0" or TYPE == "q4_0"


@triton.constexpr_function
def n_units(TYPE, WIDTH):
    """Return the units in a row of WIDTH elements: 16-bit words for blocks, else elements."""
    return {"q8_0": WIDTH // 32 * 17, "q4_0": WIDTH // 32 * 9}.get(TYPE, WIDTH)


@triton.jit
def units(cells, TYPE: tl.constexpr):
    """Return a pointer to units, given a pointer to bytes of blocks or to numbers."""
    if has_blocks(TYPE):
        return cells.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return cells


@triton.jit
def element(at, TYPE: tl.constexpr):
    """Return the index within a block of the element that `read` returns at index `at`."""
    if TYPE == "q4_0":
        return at // 2 + at % 2 * 16
    else:
        return at


@triton.jit
def scales(rows, there, block, TYPE: tl.constexpr):
    """Load the scale of one block in each row, F32 (N,); see `read`."""
    size: tl.constexpr = 17 if TYPE == "q8_0" else 9
    held = tl.load(rows + block * size, mask=there, other=0)
    return held.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def read(rows, there, part, TYPE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load elements (N, SIZE) of some rows, starting at element part * SIZE; 0 if not there.

    They have the cache's type; blocks become F16, without their scales. Converting a byte to F16
    takes few instructions, since 0x6400 is 1024 and its last bit is worth one.

    Args:
        rows: pointers to units, (N,).
        there: whether a row may be read, (N,).
        SIZE: number of elements; 32 for blocks.
        WIDTH: number of elements per row.
    """
    if TYPE == "q8_0":
        at = tl.arange(0, 16)
        both = tl.load(rows[:, None] + (part * 17 + 1 + at)[None, :], mask=there[:, None], other=0)
        codes = tl.join(both & 0xFF, (both >> 8) & 0xFF).reshape(both.shape[0], SIZE)
        return (codes ^ THOUSAND_128).to(tl.float16, bitcast=True) - 1152.0
    elif TYPE == "q4_0":
        at = tl.arange(0, 8)
        four = tl.load(rows[:, None] + (part * 9 + 1 + at)[None, :], mask=there[:, None], other=0)
        low, high = tl.join(four, four >> 8), tl.join(four >> 4, four >> 12)
        both = tl.join(low.reshape(four.shape[0], 16), high.reshape(four.shape[0], 16))
        codes = (both & 15).reshape(four.shape[0], SIZE)
        return (codes | THOUSAND).to(tl.float16, bitcast=True) - 1032.0
    else:
        at = part * SIZE + tl.arange(0, SIZE)
        inside = there[:, None] & (at < WIDTH)[None, :] if WIDTH % SIZE else there[:, None]
        return tl.load(rows[:, None] + at[None, :], mask=inside, other=0.0)


@triton.jit
def _write_plain(x, cells, there, TYPE: tl.constexpr):
    """Write F32 numbers x to the pointers `cells`, rounded to nearest."""
    if TYPE == "bf16":
        bits = x.to(tl.int32, bitcast=True)
        held = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        held = tl.where((bits & SIGN) > INFINITE, NO_NUMBER, held).to(tl.int16)
        tl.store(cells.to(tl.pointer_type(tl.int16), bitcast=True), held, mask=there)
    else:
        tl.store(cells, x.to(cells.dtype.element_ty), mask=there)


@triton.jit
def _inverse(scale):
    return tl.where(scale == 0.0, 0.0, tl.math.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))


@triton.jit
def _write_q8_0(x, cells, there):
    """Quantise blocks x (N, 32), F32, and write them at the pointers `cells` (N,).

    Taking the absolute value between product and sum keeps the compiler from fusing them into
    one rounding, which would give different codes.
    """
    scale = tl.math.div_rn(tl.max(tl.abs(x), 1), tl.full((x.shape[0],), 127.0, tl.float32))
    scaled = x * _inverse(scale)[:, None]
    size = tl.abs(scaled)
    whole = tl.floor(size)
    whole += tl.floor((size - whole) * 2.0)  # halves are rounded away from zero
    codes = tl.where(scaled < 0.0, -whole, whole).to(tl.int32).to(tl.int8)
    at = 2 + tl.arange(0, BLOCK)
    tl.store(cells.to(tl.pointer_type(tl.float16), bitcast=True), scale.to(tl.float16), mask=there)
    codes_at = cells.to(tl.pointer_type(tl.int8), bitcast=True)[:, None] + at[None, :]
    tl.store(codes_at, codes, mask=there[:, None])


@triton.jit
def _write_q4_0(low, high, cells, there):
    """Quantise blocks, given as F32 halves low and high (N, 16), and write them at `cells` (N,)."""
    at = tl.arange(0, 16)[None, :]
    sizes = tl.abs(low), tl.abs(high)
    largest = tl.maximum(tl.max(sizes[0], 1), tl.max(sizes[1], 1))
    is_low, is_high = sizes[0] == largest[:, None], sizes[1] == largest[:, None]
    place = tl.min(tl.minimum(tl.where(is_low, at, 32), tl.where(is_high, at + 16, 32)), 1)[:, None]
    bits = tl.where(at == place, low.to(tl.int32, bitcast=True), 0)
    bits += tl.where(at + 16 == place, high.to(tl.int32, bitcast=True), 0)
    # the first element with the largest magnitude determines the scale
    scale = tl.sum(bits, 1).to(tl.float32, bitcast=True) * -0.125
    inverse = _inverse(scale)[:, None]
    codes = _nibbles(low * inverse) | (_nibbles(high * inverse) << 4)
    tl.store(cells.to(tl.pointer_type(tl.float16), bitcast=True), scale.to(tl.float16), mask=there)
    tl.store(cells[:, None] + 2 + at, codes.to(tl.uint8), mask=there[:, None])


@triton.jit
def _nibbles(scaled):
    """Return codes from 0 to 15 for numbers from -8 to 8.

    The inner `minimum` changes nothing, but keeps the compiler from fusing product and sum into
    one rounding.
    """
    return tl.minimum((tl.minimum(scaled, 9.0) + 8.5).to(tl.int32), 15)


@triton.jit
def slot_of(table, n_pages, position, there):
    """Return the slots for sequences' positions (N,), int64; -1 for positions without a slot.

    `table` points to the sequences' tables, int32 (n_pages,) each.
    """
    page = position // PAGE
    inside = there & (position >= 0) & (page < n_pages)
    found = tl.load(table + page, mask=inside, other=-1).to(tl.int64)
    return tl.where(found < 0, -1, found * PAGE + position % PAGE)


@triton.jit
def put(x, x_token, x_head, cells, token, head, block, slot, there, n_slots,
        TYPE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
        SIZE: tl.constexpr):  # fmt: skip
    """Write heads of tokens, or blocks within heads, into the cache's keys or values; see `store`.

    Args:
        token, head, block: what to write from x, int64 (N,) or broadcast to it.
        slot: where to write it, int64, same shape; slots outside the cache are skipped.
        there: whether to write it, same shape.
    """
    there = there & (slot >= 0) & (slot < n_slots)
    x += token * x_token + head * x_head + block * BLOCK
    cells += (head * n_slots + slot) * (n_units(TYPE, WIDTH) * (2 if has_blocks(TYPE) else 1))
    if has_blocks(TYPE):
        cells += block * (n_units(TYPE, BLOCK) * 2)
    if TYPE == "q4_0":
        half = x[:, None] + tl.arange(0, 16)[None, :]
        low = tl.load(half, mask=there[:, None], other=0.0)
        high = tl.load(half + 16, mask=there[:, None], other=0.0)
        _write_q4_0(low, high, cells, there)
    elif TYPE == "q8_0":
        whole = x[:, None] + tl.arange(0, BLOCK)[None, :]
        _write_q8_0(tl.load(whole, mask=there[:, None], other=0.0), cells, there)
    else:
        element = tl.arange(0, SIZE)
        inside = there[:, None] & (element < DIM)[None, :]
        number = tl.load(x[:, None] + element[None, :], mask=inside, other=0.0)
        _write_plain(number, cells[:, None] + element[None, :], inside, TYPE)


@triton.jit
def _store(x, x_token, x_head, cells, positions, tables, n_pages, n_first, n_rows, n_head, n_slots,
           TYPE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
           SIZE: tl.constexpr):  # fmt: skip
    per_row: tl.constexpr = DIM // BLOCK if has_blocks(TYPE) else 1
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, block = at // per_row, (at % per_row).to(tl.int64)
    there = row < n_rows
    token, head = (row // n_head).to(tl.int64), (row % n_head).to(tl.int64)
    position = tl.load(positions + token, mask=there, other=-1).to(tl.int64)
    table = tables + tl.maximum(token - n_first + 1, 0) * n_pages
    slot = slot_of(table, n_pages, position, there)
    put(x, x_token, x_head, cells, token, head, block, slot, there, n_slots, TYPE, DIM, WIDTH, SIZE)


@triton.jit(
    do_not_specialize=[
        "k_token", "k_head", "v_token", "v_head", "n_pages", "n_first", "n_rows", "n_head",
        "n_slots",
    ]
)  # fmt: skip
def store(k, k_token, k_head, v, v_token, v_head, k_cells, v_cells, positions, tables, n_pages,
          n_first, n_rows, n_head, n_slots,
          TYPE_K: tl.constexpr, TYPE_V: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
          WIDTH_V: tl.constexpr, ROWS_K: tl.constexpr, ROWS_V: tl.constexpr,
          SIZE: tl.constexpr):  # fmt: skip
    """Write tokens' keys and values into the cache, at positions stored in device memory.

    Programs whose second index is 0 write keys; those whose second index is 1 write values.
    Positions outside the cache are skipped.

    Args:
        k, v: F32 (tokens, n_head, DIM_K or DIM_V) with contiguous heads; strides in elements.
        k_cells, v_cells: the cache, (n_head, n_slots, DIM_K elements of TYPE_K or WIDTH_V of
            TYPE_V); blocks as bytes.
        positions: position of each token in its sequence, (tokens,).
        tables: each sequence's pages, int32 (sequences, n_pages).
        n_first: number of tokens in the first sequence; the others have one each.
        n_rows: tokens * n_head.
        ROWS_K, ROWS_V: heads, or blocks, per program.
        SIZE: a power of two, at least both dimensions.
    """
    if tl.program_id(1) == 0:
        _store(k, k_token, k_head, k_cells, positions, tables, n_pages, n_first, n_rows, n_head,
               n_slots, TYPE_K, DIM_K, DIM_K, ROWS_K, SIZE)  # fmt: skip
    else:
        _store(v, v_token, v_head, v_cells, positions, tables, n_pages, n_first, n_rows, n_head,
               n_slots, TYPE_V, DIM_V, WIDTH_V, ROWS_V, SIZE)  # fmt: skip
