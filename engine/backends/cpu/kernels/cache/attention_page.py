"""Attention of one tile over one cache page.

A tile is some of a sequence's rows and one group's query heads, which share a key-value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from engine.backends.cpu.kernels.cache.attention_rows import row_range
from engine.backends.cpu.kernels.cache.attention_softmax import (
    ONE,
    SCORE_BYTES,
    STATE_BYTES,
    mark_fresh,
)
from engine.backends.cpu.kernels.cache.attention_tile import MAX_INT16_HEADS, tile_width
from engine.backends.cpu.kernels.cache.attention_words import UNIT_BYTES, add_query_words, in_words
from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, SimdLanes, ceil_div, for_each_vector
from engine.backends.cpu.kernels.language.values import (
    F32,
    I1,
    I64,
    LANES,
    VOID,
    Code,
    Value,
    internal,
)
from engine.load_params import KVTypes
from engine.model.forward.pages import PAGE
from engine.model.forward.state import ATTENTION_BLOCK as BLOCK
from engine.model.forward.state import ATTENTION_HEADS as GROUP_HEADS

SCORE_ROWS = GROUP_HEADS
"""Capacity of a thread's score buffer, in rows times heads."""

DIRECT_HEADS = 8
"""Largest number of query heads in a group that reads blocks in place."""

ROWS_AHEAD = 4
"""Prefetch distance for queries, in rows; a group's queries are in different memory pages."""


def padded_bytes(head_dim: int) -> int:
    """Return the size of a head in bytes, padded to whole F32 vectors."""
    return -(-head_dim // LANES) * UNIT_BYTES


def result_bytes(head_dim_v: int) -> int:
    """Return the size of a row's result for one head, in bytes."""
    return padded_bytes(head_dim_v) + STATE_BYTES


def scratch_bytes(tile_heads: int, head_dim_k: int, head_dim_v: int) -> int:
    """Return the size of a thread's `Scratch`, in bytes."""
    per_head = padded_bytes(head_dim_k) + 2 * result_bytes(head_dim_v)
    block = BLOCK * (padded_bytes(head_dim_k) + padded_bytes(head_dim_v))
    return tile_heads * per_head + SCORE_ROWS * SCORE_BYTES + block


class Scratch(NamedTuple):
    """Addresses in a thread's scratch memory.

    Attributes:
        queries: a tile's queries, padded to whole vectors.
        scores: some rows' scores for a block, which become weights.
        keys, values: a block's keys and values as F32.
        page: a tile's results for a page.
        rows: a tile's results for the pages processed so far, or for a second page.
    """

    queries: Value
    scores: Value
    keys: Value
    values: Value
    page: Value
    rows: Value

    @classmethod
    def at(cls, address: Value, given: Named) -> Scratch:
        n, k_bytes = given["tile_heads"], n_units(given["head_dim_k"]) * UNIT_BYTES
        scores = address + n * k_bytes
        keys = scores + SCORE_ROWS * SCORE_BYTES
        values = keys + k_bytes * BLOCK
        page = values + n_units(given["head_dim_v"]) * (UNIT_BYTES * BLOCK)
        return cls(address, scores, keys, values, page, page + n * given["result_bytes"])


def n_units(head_dim: Value) -> Value:
    """Return the number of vectors per head."""
    return ceil_div(head_dim, LANES)


class Tile(NamedTuple):
    """A tile: its group's address in `groups`, its first row and number of rows."""

    group: Value
    row: Value
    n_rows: Value

    def heads(self, code: Code) -> tuple[Value, Value, Value]:
        """Return the key-value head, the first query head, and the number of query heads."""
        kv, head, n = code.load_array(self.group, 3)
        return kv, head, n


def add_pages(module: ir.Module, isa: Isa, types: KVTypes, inner: Sequence[str]) -> None:
    """Emit `load_queries` and `attend_page`.

    Args:
        inner: names of the 64-bit integers at the address `place`, the first argument of both.
    """
    has_words = in_words(isa, types.k)
    if has_words:
        add_query_words(module)
    _add_load_queries(module, inner, has_words=has_words)
    _add_direct_page(module, inner, has_words=has_words)
    _add_row_page(module, isa, inner)
    code, arguments = internal(module, "attend_page", 7)
    is_direct = code.load(arguments[0] + 8 * inner.index("is_direct"), I64)
    with code.if_else(is_direct.differs(0)) as (direct, others):
        with direct:
            code.call("direct_page", VOID, *arguments)
        with others:
            code.call("row_page", VOID, *arguments)
    code.builder.ret_void()


def named(code: Code, place: Value, inner: Sequence[str]) -> Named:
    """Load the integers at an address, by name."""
    return dict(zip(inner, code.load_array(place, len(inner)), strict=True))


def _add_load_queries(module: ir.Module, inner: Sequence[str], *, has_words: bool) -> None:
    """Emit `load_queries(place, group, row, n_rows, scratch)`: loads a tile's queries."""
    code, (place, *parts, scratch) = internal(module, "load_queries", 5)
    given, tile = named(code, place, inner), Tile(*parts)
    _, head, n = tile.heads(code)
    dim = given["head_dim_k"]
    stride = n_units(dim) * UNIT_BYTES
    zero, row_bytes = code.number(0), given["n_heads"] * dim * 4
    with code.loop(zero, tile.n_rows) as row, code.loop(zero, n) as one:
        source = given["q"] + (tile.row + row) * row_bytes + (head + one) * dim * 4
        with code.loop(zero, dim * 4, UNIT_BYTES) as line:
            code.prefetch(source + row_bytes * ROWS_AHEAD + line)
        goal = scratch + (row * n + one) * stride
        if has_words:
            code.call("query_words", VOID, source, dim, goal)
        else:
            for_each_vector(code, dim, partial(_copied, code, source, goal))
    code.builder.ret_void()


def _copied(code: Code, source: Value, goal: Value, lanes: SimdLanes) -> None:
    code.store(lanes.load(source), goal + lanes.index * 4)


def _cells(given: Named, code: Code, kv: Value, row: Value, page: Value) -> tuple[Value, Value]:
    table = code.load(given["tables"] + row * 8, I64)
    slot = code.load(table + page * 8, I64) * PAGE
    k = given["k"] + kv * given["k_head_stride"] + slot * given["k_stride"]
    return k, given["v"] + kv * given["v_head_stride"] + slot * given["v_stride"]


def _seen(given: Named, code: Code, row: Value, last: Value, page: Value) -> tuple[Value, Value]:
    """Return the range of a page's positions that any of the rows `row` to `last` sees."""
    zero, start = code.number(0), page * PAGE
    first = code.load(given["firsts"] + row * 8, I64) - start
    stop = code.load(given["positions"] + last * 8, I64) + 1 - start
    return code.where(first < 0, zero, first), code.min_signed(stop, code.number(PAGE))


def _slopes(given: Named, code: Code, head: Value) -> Value:
    slopes = given["slopes"]
    return code.where(slopes.differs(0), slopes + head * 4, slopes)


def _add_direct_page(module: ir.Module, inner: Sequence[str], *, has_words: bool) -> None:
    """Emit `direct_page(place, group, row, n_rows, page, goal, scratch)`: `row_page` for one row.

    Queries are in scratch memory only if they had to be converted.
    """
    code, (place, *parts, page, goal, scratch) = internal(module, "direct_page", 7)
    given, tile = named(code, place, inner), Tile(*parts)
    kv, head, n = tile.heads(code)
    k, v = _cells(given, code, kv, tile.row, page)
    k_stride, v_stride, dim_k = given["k_stride"], given["v_stride"], given["head_dim_k"]
    row_bytes = given["result_bytes"]
    state = goal + row_bytes - STATE_BYTES
    given_q = given["q"] + (tile.row * given["n_heads"] + head) * dim_k * 4
    q = scratch if has_words else given_q
    position = code.load(given["positions"] + tile.row * 8, I64)
    scores = code.stack_buffer(F32, DIRECT_HEADS * BLOCK)
    panel, zero, k_units = Scratch.at(scratch, given).keys, code.number(0), n_units(dim_k)
    most = MAX_INT16_HEADS if has_words else DIRECT_HEADS
    with code.loop(code.number(0), n) as one:
        mark_fresh(code, state + one * row_bytes)
    slopes = _slopes(given, code, head)
    begin, stop = _seen(given, code, tile.row, tile.row, page)
    next_k, _ = _cells(given, code, kv, tile.row, _next_page(given, code, page, position))
    with code.loop(begin - begin % BLOCK, stop, BLOCK) as at:
        low = code.where(at < begin, begin - at, code.number(0))
        high = code.min_signed(stop - at, code.number(BLOCK))
        values = v + (at + low) * v_stride
        keys = k + at * k_stride, k_stride
        with code.if_else(n > most) as (many, few):
            with many:
                code.call("decode_keys", VOID, *keys, low, high, dim_k, values, panel)
                code.call("row_scores", VOID, q, k_units, zero, n, panel, high, scores)
            with few:
                code.call("scores", VOID, n, q, dim_k, *keys, low, high, values, scores)
        factor = code.variable(
            code.call("cap", I64, zero, n, scores, given["scale"], given["softcap"])
        )
        with code.when(low.differs(0) | high.differs(BLOCK) | slopes.differs(0)):
            distance = page * PAGE + at - position
            code.call("mask", VOID, n, scores, low, high, distance, factor.get(), slopes)
            factor.set(code.number(ONE))
        code.call("softmax", VOID, zero, n, scores, factor.get(), state, row_bytes)
        later = code.where(at + BLOCK < stop, k + (at + BLOCK) * k_stride, next_k)
        code.call(
            "weighted_sum", VOID, n, scores + low * 4, high - low, values, v_stride,
            later, given["head_dim_v"], row_bytes - STATE_BYTES, goal, row_bytes,
        )  # fmt: skip
    code.builder.ret_void()


def _next_page(given: Named, code: Code, page: Value, position: Value) -> Value:
    """Return the page that the thread will probably read next; at the end, `page` itself."""
    step = code.where(given["is_whole"].equals(0), given["n_threads"], code.number(1))
    return code.where(page + step <= position // PAGE, page + step, page)


def _add_row_page(module: ir.Module, isa: Isa, inner: Sequence[str]) -> None:
    """Emit `row_page(place, group, row, n_rows, page, goal, scratch)`.

    Computes a tile's attention over a page. The results at `goal` are `result_bytes` apart, in the
    order (row, head); they are undefined for rows that do not see the page. Queries are in scratch
    memory.
    """
    _add_block(module, isa, inner)
    code, (place, *parts, page, goal, scratch) = internal(module, "row_page", 7)
    given, tile = named(code, place, inner), Tile(*parts)
    kv, _, n = tile.heads(code)
    k, v = _cells(given, code, kv, tile.row, page)
    states = goal + given["result_bytes"] - STATE_BYTES
    with code.loop(code.number(0), tile.n_rows * n) as one:
        mark_fresh(code, states + one * given["result_bytes"])
    begin, stop = _seen(given, code, tile.row, tile.row + tile.n_rows - 1, page)
    room = Scratch.at(scratch, given)
    first = code.variable(code.number(0))
    with code.loop(begin - begin % BLOCK, stop, BLOCK) as at:
        first.set(code.number(0))
        low = code.where(at < begin, begin - at, code.number(0))
        high = code.min_signed(stop - at, code.number(BLOCK))
        keys, values = k + at * given["k_stride"], v + at * given["v_stride"]
        code.call(
            "decode_keys", VOID, keys, given["k_stride"], low, high, given["head_dim_k"], values,
            room.keys,
        )  # fmt: skip
        code.call(
            "decode_values", VOID, values, given["v_stride"], low, high, given["head_dim_v"],
            room.values,
        )  # fmt: skip
        with code.forever() as leave:
            leave(first.get() >= tile.n_rows)
            code.call(
                "attend_block", VOID, place, *parts, first.get(), page * PAGE + at, high, goal,
                scratch,
            )  # fmt: skip
            first.set(first.get() + _n_rows_at_once(code, n))
    code.builder.ret_void()


def _n_rows_at_once(code: Code, n: Value) -> Value:
    """Return the number of rows for which a block's scores are computed at a time."""
    some = code.number(SCORE_ROWS // 2) // n
    return code.where(some > 1, some, code.number(1))


class _Rows(NamedTuple):
    """A tile's rows that process a block together.

    Attributes:
        block: first position of the block.
        firsts: address of the rows' first visible positions.
        position: position of the first row.
        head, n: first query head, and number of heads per row.
        begin, stop: range of the rows that see part of the block.
        begin_whole, stop_whole: range of the rows that see all of it.
    """

    block: Value
    firsts: Value
    position: Value
    head: Value
    n: Value
    begin: Value
    stop: Value
    begin_whole: Value
    stop_whole: Value

    def span(self, code: Code, row: Value) -> tuple[Value, Value]:
        """Return the range of the block's positions that a row sees."""
        low = code.load(self.firsts + row * 8, I64) - self.block
        seen = code.min_signed(self.position + row + 1 - self.block, code.number(BLOCK))
        return code.where(low < 0, code.number(0), low), seen


def _add_block(module: ir.Module, isa: Isa, inner: Sequence[str]) -> None:
    """Emit `attend_block(place, group, row, n_rows, first, block, high, goal, scratch)`.

    Adds the decoded positions of the block that starts at `block` to the results at `goal`, for
    `_n_rows_at_once` of the tile's rows, starting with row `first`.
    """
    code, (place, *parts, first, block, high, goal, scratch) = internal(module, "attend_block", 9)
    given, whole = named(code, place, inner), Tile(*parts)
    _, head, n = whole.heads(code)
    k_units = n_units(given["head_dim_k"])
    room = Scratch.at(scratch, given)
    queries = room.queries + first * n * k_units * UNIT_BYTES
    goal = goal + first * n * given["result_bytes"]
    n_rows = code.min_signed(whole.n_rows - first, _n_rows_at_once(code, n))
    firsts = given["firsts"] + (whole.row + first) * 8
    position = code.load(given["positions"] + (whole.row + first) * 8, I64)
    begin, stop = row_range(code, firsts, block - position, n_rows, block + BLOCK)
    seeing_all = row_range(code, firsts, block + (BLOCK - 1) - position, stop, block + 1)
    rows = _Rows(block, firsts, position, head, n, begin, stop, *seeing_all)
    seen = code.min_signed(high, position + n_rows - block)  # for the last row
    code.call(
        "row_scores", VOID, queries, k_units, begin * n, stop * n, room.keys, seen, room.scores
    )
    _weigh(code, given, rows, room.scores, goal)
    _add_values(code, isa, given, rows, room, goal)
    code.builder.ret_void()


def _weigh(code: Code, given: Named, rows: _Rows, scores: Value, goal: Value) -> None:
    n, row_bytes, slopes = rows.n, given["result_bytes"], _slopes(given, code, rows.head)
    factor = code.call(
        "cap", I64, rows.begin * n, rows.stop * n, scores, given["scale"], given["softcap"]
    )
    yes = code.constant(I1, 1)
    for first, last, is_masked in (
        (rows.begin, rows.begin_whole, yes),
        (rows.begin_whole, rows.stop_whole, slopes.differs(0)),
        (rows.stop_whole, rows.stop, yes),
    ):
        own = code.variable(factor)
        with code.when(is_masked):
            own.set(code.number(ONE))
            with code.loop(first, last) as row:
                place, distance = scores + row * n * SCORE_BYTES, rows.block - rows.position - row
                span = rows.span(code, row)
                code.call("mask", VOID, n, place, *span, distance, factor, slopes)
        states = goal + row_bytes - STATE_BYTES
        code.call("softmax", VOID, first * n, last * n, scores, own.get(), states, row_bytes)


def _add_values(
    code: Code, isa: Isa, given: Named, rows: _Rows, room: Scratch, goal: Value
) -> None:
    n, units = rows.n, n_units(given["head_dim_v"])
    wide = 4 * tile_width(isa, 1)
    with code.loop(code.number(0), units * UNIT_BYTES, wide) as column:
        width = code.min_signed(units * UNIT_BYTES - column, code.number(wide)) // 4

        def add(first: Value, last: Value, low: Value, seen: Value) -> None:
            code.call(
                "plain_sum", VOID, first * n, last * n, room.scores, low, seen, room.values, units,
                column, width, goal, given["result_bytes"],
            )  # fmt: skip

        for some in ((rows.begin, rows.begin_whole), (rows.stop_whole, rows.stop)):
            with code.loop(*some) as row:
                add(row, row + 1, *rows.span(code, row))
        add(rows.begin_whole, rows.stop_whole, code.number(0), code.number(BLOCK))
