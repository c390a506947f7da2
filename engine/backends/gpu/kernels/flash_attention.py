"""Flash attention over a KV cache: tiles of keys (arXiv 2205.14135), online softmax (1805.02867).

A program's rows are query heads, from one or more tokens, that share a KV head, so that keys and
values are read once for all of them. F32 operands are split into sums of two shorter numbers, for
which there are tensor cores: OPERAND is "f16" or "bf16", whichever represents the cache's numbers
exactly, or "f32"; keys and values may differ in OPERAND and in type. Blocks are multiplied without
their scales, as F16. Weights are 2 to the power of scores.
"""

import triton
import triton.language as tl

from engine.backends.gpu.kernels.kv_cells import (
    BLOCK,
    PAGE,
    element,
    has_blocks,
    n_units,
    put,
    read,
    scales,
    slot_of,
    units,
)

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Running maximum before the first key; -inf would give NaN if a row sees no key in a tile."""

HEADROOM = tl.constexpr(15.0)
"""Exponent of a row's largest weight: 2^15 fits into F16, and so do weights that are a billion
times smaller."""

HEADROOM_OF_BLOCKS = tl.constexpr(7.0)
"""The same if weights are multiplied by scales: the product fits into F16 if values do."""


@triton.jit
def split(x, OPERAND: tl.constexpr):
    """Split F32 into the sum of two operands for `tl.dot`; for "f32", return x twice."""
    if OPERAND == "f16":
        high = x.to(tl.float16)
        low = (x - high.to(tl.float32)).to(tl.float16)
    elif OPERAND == "bf16":
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
    else:
        high = x
        low = x
    return high, low


@triton.jit
def times(high, low, cells, total, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
          IN_F32: tl.constexpr):  # fmt: skip
    """Return `total + (high + low) @ cells`, where cells are numbers from the cache.

    PRECISION is the `input_precision` for "f32"; if IN_F32, everything is multiplied as F32 (the
    interpreter has no BF16).
    """
    if OPERAND == "f32" or IN_F32:
        cells = cells.to(tl.float32)
        if OPERAND != "f32":
            total = tl.dot(low.to(tl.float32), cells, total, input_precision="ieee")
        return tl.dot(high.to(tl.float32), cells, total, input_precision=PRECISION)
    elif OPERAND == "f16":
        total = tl.dot(low, cells.to(tl.float16), total)
        return tl.dot(high, cells.to(tl.float16), total)
    else:
        total = tl.dot(low, cells.to(tl.bfloat16), total)
        return tl.dot(high, cells.to(tl.bfloat16), total)


@triton.jit
def first_seen(position, window, chunk):
    """Return `Scores.first_visible` for any number of positions."""
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    start = position // tl.maximum(chunk, 1) * chunk  # 0 if there are no chunks
    return tl.maximum(first, start)


@triton.jit
def piece_of(key, small, n_small, large):
    """Return the index of a key's piece: n_small pieces of `small` keys, the rest of `large`."""
    rest = tl.maximum(key - small * n_small, 0)
    return tl.where(key < small * n_small, key // small, n_small + rest // large)


@triton.jit
def start_of(piece, small, n_small, large):
    """Return the first key of a piece."""
    return tl.minimum(piece, n_small) * small + tl.maximum(piece - n_small, 0) * large


@triton.jit
def queries(rows, there, part, power, TYPE: tl.constexpr, OPERAND: tl.constexpr, DIM: tl.constexpr,
            SIZE: tl.constexpr):  # fmt: skip
    """Load the queries' elements from part * SIZE on, multiply by `power`, and `split` them."""
    at = tl.arange(0, SIZE)
    at = part * SIZE + element(at, TYPE)
    inside = there[:, None] & (at < DIM)[None, :] if DIM % SIZE else there[:, None]
    x = tl.load(rows[:, None] + at[None, :], mask=inside, other=0.0)
    return split(x * power[:, None], OPERAND)


@triton.jit
def powers(rows, there, OPERAND: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Return, for each row, a power of 2 that brings its elements below 2^13, and its inverse.

    F16 can then represent the elements, and their remainders in full precision.
    """
    one = tl.where(there, 1.0, 1.0)
    if OPERAND != "f16":
        return one, one
    largest = one * 0.0
    for part in range((DIM + SIZE - 1) // SIZE):
        at = part * SIZE + tl.arange(0, SIZE)
        inside = there[:, None] & (at < DIM)[None, :]
        x = tl.load(rows[:, None] + at[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x0D800000), 0x7E000000)  # both powers are normal numbers
    inverse = bits.to(tl.float32, bitcast=True)
    return (0x7F000000 - bits).to(tl.float32, bitcast=True) * 4096.0, inverse / 4096.0


@triton.jit
def held_queries(rows, there, power, TYPE: tl.constexpr, OPERAND: tl.constexpr, DIM: tl.constexpr,
                 SIZE: tl.constexpr, HOLDS_Q: tl.constexpr):  # fmt: skip
    """Return all parts of the queries, from `queries`; empty tuples if not HOLDS_Q."""
    highs = ()
    lows = ()
    if HOLDS_Q:
        for part in tl.static_range((DIM + SIZE - 1) // SIZE):
            high, low = queries(rows, there, part, power, TYPE, OPERAND, DIM, SIZE)
            highs = highs + (high,)
            lows = lows + (low,)
    return highs, lows


@triton.jit
def products(
    q, there, power, highs, lows, k, inside, TYPE: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, IN_F32: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    HOLDS_Q: tl.constexpr,
):  # fmt: skip
    """Return queries * `power` * keys, (ROWS, KEYS); k (KEYS,) are pointers to rows."""
    s = tl.zeros((q.shape[0], k.shape[0]), tl.float32)
    if HOLDS_Q:
        for part in tl.static_range((DIM + SIZE - 1) // SIZE):
            s = _more(s, highs[part], lows[part], k, inside, part, TYPE, OPERAND, PRECISION, IN_F32,
                      DIM, SIZE)  # fmt: skip
    else:
        for part in range((DIM + SIZE - 1) // SIZE):
            high, low = queries(q, there, part, power, TYPE, OPERAND, DIM, SIZE)
            s = _more(s, high, low, k, inside, part, TYPE, OPERAND, PRECISION, IN_F32, DIM, SIZE)
    return s


@triton.jit
def _more(
    s, high, low, k, inside, part, TYPE: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, IN_F32: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    keys = tl.trans(read(k, inside, part, TYPE, SIZE, DIM))
    if has_blocks(TYPE):
        none = tl.zeros(s.shape, tl.float32)
        product = times(high, low, keys, none, OPERAND, PRECISION, IN_F32)
        return s + product * scales(k, inside, part, TYPE)[None, :]
    else:
        return times(high, low, keys, s, OPERAND, PRECISION, IN_F32)


@triton.jit
def means(
    s, kept, sums, v, inside, TYPE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    IN_F32: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return `sums * kept` plus the values weighted by s (ROWS, KEYS); v (KEYS,) points to rows."""
    high, low = split(s, OPERAND)
    more = ()
    for part in tl.static_range((DIM + SIZE - 1) // SIZE):
        values = read(v, inside, part, TYPE, SIZE, DIM)
        if has_blocks(TYPE):
            high, low = split(s * scales(v, inside, part, TYPE)[None, :], OPERAND)
        total = sums[part] * kept[:, None]
        more = more + (times(high, low, values, total, OPERAND, PRECISION, IN_F32),)
    return more


@triton.jit
def attended(
    q, there, position, first, slope, scale, softcap, k, v, row, table, n_slots, start, stop,
    TYPE_K: tl.constexpr, TYPE_V: tl.constexpr, OPERAND_K: tl.constexpr, OPERAND_V: tl.constexpr,
    PRECISION: tl.constexpr, IN_F32: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH_V: tl.constexpr, SIZE_K: tl.constexpr, SIZE_V: tl.constexpr, KEYS: tl.constexpr,
    HOLDS_Q: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Compute attention for query rows over the keys that they can see between start and stop.

    Args:
        q: pointers to the rows, (ROWS,).
        there: whether the row exists, (ROWS,).
        position: position of the row's token, (ROWS,).
        first: first key that the row sees, (ROWS,).
        slope: ALiBi slope of the row's head, (ROWS,).
        row: head index in k and v, int64.
        table: the sequence's pages; each tile of keys is within one page.
        start: a multiple of KEYS.

    Returns:
        The greatest score minus headroom (ROWS,); the sum of all weights relative to it (ROWS,);
        and, for each part of a value, the weighted sum of values, (ROWS, SIZE_V).
    """
    headroom: tl.constexpr = HEADROOM_OF_BLOCKS if has_blocks(TYPE_V) else HEADROOM
    k, v = units(k, TYPE_K), units(v, TYPE_V)
    power, inverse = powers(q, there, OPERAND_K, DIM_K, SIZE_K)
    factor = inverse * (scale / softcap if HAS_SOFTCAP else scale * LOG2E)
    highs, lows = held_queries(q, there, power, TYPE_K, OPERAND_K, DIM_K, SIZE_K, HOLDS_Q)
    top = tl.full((q.shape[0],), LOWEST, tl.float32)
    weight = tl.zeros((q.shape[0],), tl.float32)
    sums = ()
    for _ in tl.static_range((DIM_V + SIZE_V - 1) // SIZE_V):
        sums = sums + (tl.zeros((q.shape[0], SIZE_V), tl.float32),)
    for tile in range(start, stop, KEYS):
        at = tl.arange(0, KEYS)
        key = tile + at
        inside = key < stop
        page = tile // PAGE
        moved = tl.load(table + page).to(tl.int64) - page  # pages by which the tile was moved
        cell = row * n_slots + moved * PAGE + tile
        k_rows = k + cell * n_units(TYPE_K, DIM_K) + at * n_units(TYPE_K, DIM_K)
        s = products(q, there, power, highs, lows, k_rows, inside, TYPE_K, OPERAND_K, PRECISION,
                     IN_F32, DIM_K, SIZE_K, HOLDS_Q)  # fmt: skip
        s *= factor[:, None]
        if HAS_SOFTCAP:
            s = (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E)) + 1.0)) * (softcap * LOG2E)
        if HAS_SLOPES:
            s += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        seen = (key[None, :] <= position[:, None]) & (key[None, :] >= first[:, None])
        s = tl.where(seen, s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1) - headroom)
        kept = tl.exp2(top - new)
        s = tl.exp2(s - new[:, None])
        top = new
        weight = weight * kept + tl.sum(s, 1)
        v_rows = v + cell * n_units(TYPE_V, WIDTH_V) + at * n_units(TYPE_V, WIDTH_V)
        sums = means(s, kept, sums, v_rows, inside, TYPE_V, OPERAND_V, PRECISION, IN_F32, DIM_V,
                     SIZE_V)  # fmt: skip
    return top, weight, sums


@triton.jit(
    do_not_specialize=[
        "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "n_pages", "first_row",
        "first_sequence", "n_tokens", "n_head", "group", "n_slots", "least", "window", "chunk",
        "small", "n_small", "large", "n_slot", "n_split",
    ]
)  # fmt: skip
def attend(
    q, q_token, q_head, new_k, k_token, k_head, new_v, v_token, v_head, k, v, positions, tables,
    head_map, slopes, sinks, out, tops, sums, n_pages, first_row, first_sequence, n_tokens, n_head,
    group, n_slots, scale, softcap, least, window, chunk, small, n_small, large, n_slot, n_split,
    TYPE_K: tl.constexpr, TYPE_V: tl.constexpr, OPERAND_K: tl.constexpr, OPERAND_V: tl.constexpr,
    PRECISION: tl.constexpr, IN_F32: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    WIDTH_V: tl.constexpr, SIZE_K: tl.constexpr, SIZE_V: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, HOLDS_Q: tl.constexpr, IS_MAPPED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_NEW_V: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Compute causal attention for some rows over a whole sequence, or over every n_split-th piece.

    The grid is (n_head / group, n_split, sequences * blocks of ROWS rows). A sequence has
    n_tokens * group rows; a token's rows are adjacent. Where a piece starts depends only on its
    index, so a row's result does not depend on which tokens are computed with it.

    Args:
        q: F32 (tokens, n_head, DIM_K) with contiguous heads; strides in elements.
        new_k, new_v: these tokens' keys, and values if HAS_NEW_V, if not in the cache yet; F32
            (tokens, heads, DIM_K or DIM_V), laid out like q. A program first writes the new cells
            in the pieces that it reads; other programs may write the same.
        k: cached keys, (heads, n_slots, DIM_K elements of TYPE_K); blocks as bytes.
        v: cached values, (heads, n_slots, DIM_V elements of TYPE_V), rows WIDTH_V elements apart.
        positions: position of each token in its sequence, (tokens,), in device memory.
        tables: each sequence's pages, int32 (sequences, n_pages), in device memory.
        head_map: the head in k and v that each query head uses, (n_head,), if IS_MAPPED; group is
            then 1. Otherwise `group` adjacent query heads share one.
        slopes, sinks: ALiBi slopes and attention sinks, F32 (n_head,), if there are any.
        out: output, F32 (tokens, n_head, DIM_V), if n_slot is 0, which means there is one piece.
        tops, sums: results per piece for `combine`, if n_slot is not 0, at the piece's index modulo
            n_slot: F32 (the launch's rows, n_head, n_slot), greatest scores and then weights, and
            (the launch's rows, n_head, n_slot, DIM_V).
        first_row, first_sequence: the launch's first token and first sequence.
        n_tokens: tokens in each of its sequences.
        least: see `Scores.first`; in the first piece.
        window, chunk: sizes in tokens; 0 for none.
        small, n_small, large: see `piece_of`; multiples of KEYS.
        SIZE_K, SIZE_V: elements of keys and values per product; 32 for blocks.
        HOLDS_Q: whether queries stay in registers throughout, or are loaded for each tile.
        TOKENS: maximum number of new tokens in a sequence; 0 if all are in the cache.
        NEW: a power of two, at least both dimensions.
    """
    n_blocks = (n_tokens * group + ROWS - 1) // ROWS
    block = n_blocks - 1 - tl.program_id(2) % n_blocks  # blocks with the most keys start first
    sequence = tl.program_id(2) // n_blocks
    before = sequence.to(tl.int64) * n_tokens  # rows in the launch
    table = tables + (first_sequence + sequence).to(tl.int64) * n_pages
    n_past = tl.load(positions + first_row + before).to(tl.int32)
    at = block * ROWS + tl.arange(0, ROWS)
    there = at < n_tokens * group
    token = tl.minimum(at // group, n_tokens - 1)
    head = tl.program_id(0) * group + at % group
    position = n_past + token
    first = tl.maximum(first_seen(position, window, chunk), tl.minimum(position, least))
    oldest = first_seen(n_past + block * ROWS // group, window, chunk)
    stop = n_past + tl.minimum(((block + 1) * ROWS - 1) // group, n_tokens - 1) + 1
    begin = piece_of(oldest, small, n_small, large)
    end = piece_of(stop - 1, small, n_small, large) + 1
    row = tl.program_id(0).to(tl.int64)
    if IS_MAPPED:
        row = tl.load(head_map + row).to(tl.int64)
    if TOKENS:
        _write(new_k, k_token, k_head, k, first_row + before, n_past, stop, row, table, n_pages,
               n_slots, begin, n_split, small, n_small, large, TYPE_K, DIM_K, DIM_K, TOKENS,
               NEW)  # fmt: skip
        if HAS_NEW_V:
            _write(new_v, v_token, v_head, v, first_row + before, n_past, stop, row, table, n_pages,
                   n_slots, begin, n_split, small, n_small, large, TYPE_V, DIM_V, WIDTH_V, TOKENS,
                   NEW)  # fmt: skip
        tl.debug_barrier()  # makes the new keys and values visible to all threads in the program
    slope = tl.zeros((ROWS,), tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=there, other=0.0) * LOG2E
    q_rows = q + (first_row + before + token) * q_token + head * q_head
    line = (before + token) * n_head + head
    for piece in range(begin + tl.program_id(1), end, n_split):
        start = tl.maximum(start_of(piece, small, n_small, large), oldest // KEYS * KEYS)
        top, weight, found = attended(
            q_rows, there, position, first, slope, scale, softcap, k, v, row, table, n_slots, start,
            tl.minimum(start_of(piece + 1, small, n_small, large), stop),
            TYPE_K, TYPE_V, OPERAND_K, OPERAND_V, PRECISION, IN_F32, DIM_K, DIM_V, WIDTH_V, SIZE_K,
            SIZE_V, KEYS, HOLDS_Q, HAS_SOFTCAP, HAS_SLOPES,
        )  # fmt: skip
        if n_slot == 0:
            factor = tl.full((ROWS,), 1.0, tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks + head, mask=there, other=0.0) * LOG2E
                new = tl.maximum(top, sink - HEADROOM)
                factor = tl.exp2(top - new)
                weight = weight * factor + tl.exp2(sink - new)
            rows = out + (first_row * n_head + line) * DIM_V
            _put(rows, there, found, factor / weight, TYPE_V, DIM_V, SIZE_V)
        else:
            slot = line * n_slot + piece % n_slot
            tl.store(tops + slot, top, mask=there)
            n_rows = (tl.num_programs(2) // n_blocks).to(tl.int64) * n_tokens
            tl.store(tops + n_rows * n_head * n_slot + slot, weight, mask=there)
            one = tl.full((ROWS,), 1.0, tl.float32)
            _put(sums + slot * DIM_V, there, found, one, TYPE_V, DIM_V, SIZE_V)


@triton.jit
def _write(x, x_token, x_head, cells, first, n_past, stop, row, table, n_pages, n_slots, begin,
           n_split, small, n_small, large, TYPE: tl.constexpr, DIM: tl.constexpr,
           WIDTH: tl.constexpr, TOKENS: tl.constexpr, NEW: tl.constexpr):  # fmt: skip
    """Write one head's new keys or values into the cache, in the pieces that this program reads.

    `first` is the sequence's first row in x, int64.
    """
    per_row: tl.constexpr = (NEW + BLOCK - 1) // BLOCK if has_blocks(TYPE) else 1
    at = tl.arange(0, TOKENS * per_row)
    token, block = at // per_row, at % per_row
    position = n_past + token
    piece = piece_of(position, small, n_small, large) - begin
    mine = (position < stop) & (piece >= 0) & (piece % n_split == tl.program_id(1))
    if has_blocks(TYPE):
        mine = mine & (block < DIM // BLOCK)
    slot = slot_of(table, n_pages, position, mine)
    put(x, x_token, x_head, cells, first + token, row, block.to(tl.int64), slot, mine, n_slots,
        TYPE, DIM, WIDTH, NEW)  # fmt: skip


@triton.jit
def _put(rows, there, sums, factor, TYPE: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr):
    for part in tl.static_range((DIM + SIZE - 1) // SIZE):
        at = part * SIZE + element(tl.arange(0, SIZE), TYPE)
        inside = there[:, None] & (at < DIM)[None, :]
        tl.store(rows[:, None] + at[None, :], sums[part] * factor[:, None], mask=inside)


@triton.jit(
    do_not_specialize=[
        "first_row", "n_head", "n_lines", "window", "chunk", "small", "n_small", "large",
        "n_slot",
    ]
)  # fmt: skip
def combine(positions, sinks, tops, sums, out, first_row, n_head, n_lines, window, chunk, small,
            n_small, large, n_slot, DIM: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr,
            HAS_SINKS: tl.constexpr):  # fmt: skip
    """Combine the results of pieces; the grid is (rows * n_head, parts of SIZE elements).

    Pieces are added in groups that depend only on their indices.

    Args:
        n_lines: rows * n_head.
        out: output, F32 (tokens, n_head, DIM), from token `first_row` on; for the other arguments
            see `attend`.
    """
    line = tl.program_id(0).to(tl.int64)
    head = line % n_head
    position = tl.load(positions + first_row + line // n_head).to(tl.int32)
    begin = piece_of(first_seen(position, window, chunk), small, n_small, large)
    end = piece_of(position, small, n_small, large) + 1
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < DIM
    top = position.to(tl.float32) * 0.0 + LOWEST
    weight = top * 0.0
    total = tl.zeros((SIZE,), tl.float32)
    for group in range(begin // PIECES * PIECES, end, PIECES):
        piece = group + tl.arange(0, PIECES)
        there = (piece >= begin) & (piece < end)
        slot = line * n_slot + piece % n_slot
        tops_there = tl.load(tops + slot, mask=there, other=LOWEST)
        weights = tl.load(tops + n_lines.to(tl.int64) * n_slot + slot, mask=there, other=0.0)
        parts = sums + slot[:, None] * DIM + at[None, :]
        found = tl.load(parts, mask=there[:, None] & inside[None, :], other=0.0)
        new = tl.maximum(top, tl.max(tops_there, 0))
        kept = tl.exp2(top - new)
        factor = tl.exp2(tops_there - new)
        weight = weight * kept + tl.sum(weights * factor, 0)
        total = total * kept + tl.sum(found * factor[:, None], 0)
        top = new
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2E
        new = tl.maximum(top, sink - HEADROOM)
        kept = tl.exp2(top - new)
        weight = weight * kept + tl.exp2(sink - new)
        total = total * kept
    tl.store(out + (first_row * n_head + line) * DIM + at, total / weight, mask=inside)
