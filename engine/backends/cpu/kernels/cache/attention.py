"""Softmax attention over pages of the KV cache, for rows from several sequences.

A query head's result is `Σ_s exp(x_s) v_s / Σ_s exp(x_s)` with scores `x_s = scale × q·k_s`, then
`softcap × tanh(x / softcap)`, plus `slope × (s - position of the query)`; a sink is a score
without a value. A row (a token) attends to the positions from its first visible one to its own. A
page is processed BLOCK positions at a time, at multiples of BLOCK, with a running maximum m,
`Σ exp(x - m)` and `Σ exp(x - m) v` per head (online softmax, arXiv 2205.14135); then each head's
pages are merged in order. So a row's bits depend neither on other rows nor on the threads.

The work is split into tiles: rows of one sequence, and the query heads of one key-value head. If
the results for all pages and rows fit in memory, a work item is one page of a tile, and the pages
are merged at the end; otherwise, it is all of a tile's pages. If it has few rows, a tile reads
blocks in place (`attention_tile`); otherwise, it decodes them into scratch memory
(`attention_rows`). Both yield the same bits. If keys are blocks of integers and the processor
multiplies int16, queries are quantised too (`attention_words`).
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from engine.backends.cpu.kernels.cache.attention_page import Scratch, add_pages, n_units, named
from engine.backends.cpu.kernels.cache.attention_rows import add_row_parts
from engine.backends.cpu.kernels.cache.attention_softmax import STATE_BYTES, add_merges, add_softmax
from engine.backends.cpu.kernels.cache.attention_tile import add_parts
from engine.backends.cpu.kernels.cache.attention_words import UNIT_BYTES, in_words
from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, ceil_div, share
from engine.backends.cpu.kernels.language.values import (
    I1,
    I64,
    VOID,
    Code,
    Value,
    function,
    internal,
)
from engine.backends.cpu.kernels.running.thread_pool import add_run
from engine.load_params import KVTypes
from engine.model.forward.pages import PAGE

LAYER = (
    "k", "k_stride", "k_head_stride", "v", "v_stride", "v_head_stride", "head_dim_k", "head_dim_v",
    "n_heads", "groups", "n_groups",
)  # fmt: skip
"""A layer's cache and query heads, 64-bit integers. k and v are the slots' rows, `k_stride`
bytes apart, with `k_head_stride` bytes between heads. groups: (n_groups, 3) 64-bit integers: a
key-value head, its first query head, and its number of query heads."""

ROWS = ("positions", "firsts", "tables", "n_rows", "n_first")
"""A pass's rows, 64-bit integers: each row's position, its first visible position, and the
address of its sequence's page table. The first `n_first` rows are consecutive tokens of one
sequence; the others are single tokens."""

ARGUMENTS = (
    "layer", "rows", "q", "scale", "softcap", "sinks", "slopes", "tile_rows", "tile_heads",
    "is_direct", "n_threads", "scratch_bytes", "n_results", "work", "out",
)  # fmt: skip
"""The kernel's arguments. layer, rows: addresses of `LAYER` and `ROWS`. q is (n_rows, n_heads,
head_dim_k) F32, out (n_rows, n_heads, head_dim_v) F32. scale and softcap are F32 bits; sinks and
slopes are (n_heads,) F32, or 0. tile_rows, tile_heads: maximum rows per tile, and rows times
heads. is_direct: whether blocks are read in place; tiles then have one row, and groups at most
DIRECT_HEADS. work: `scratch_bytes` for each of `n_threads`, then `n_results` results of
`result_bytes` each."""

INNER = (
    *LAYER, *ROWS, *ARGUMENTS[2:], "n_prompt_tiles", "n_tiles", "result_bytes", "n_items",
    "is_whole", "next",
)  # fmt: skip
"""The pieces' arguments. n_prompt_tiles: number of tiles in the first rows. result_bytes: size of a
result. n_items: number of work items; is_whole: whether an item is all of a tile's pages or one.
next: number of items that threads have taken."""

TILE_WORDS = 4

FEW_PAGES = 2
"""Up to this many pages per tile are merged together, once all have been computed."""

MERGED_ALONE = 128
"""Up to this many results, only the calling thread merges them."""


class _TilePages(NamedTuple):
    """A tile's rows and query heads, and the pages from `first` to `stop` that its rows see."""

    row: Value
    n_rows: Value
    head: Value
    n: Value
    first: Value
    stop: Value


def build(module: ir.Module, isa: Isa, types: KVTypes) -> None:
    """Emit `attend(pool, *ARGUMENTS)` for the cache's types."""
    add_run(module)
    add_softmax(module, isa)
    add_parts(module, isa, types)
    add_row_parts(module, isa, types)
    add_merges(module, isa)
    add_pages(module, isa, types, INNER)
    _add_tile_at(module)
    has_words = in_words(isa, types.k)
    _add_whole(module, has_words=has_words)
    _add_part(module, has_words=has_words)
    _add_attend_piece(module)
    _add_merge_piece(module)
    code, (pool, layer, rows, *values) = function(module, "attend", 1 + len(ARGUMENTS))
    known = [*code.load_array(layer, len(LAYER)), *code.load_array(rows, len(ROWS)), *values]
    given = dict(zip(INNER, known, strict=False))
    zero = code.number(0)
    n_prompt_tiles = ceil_div(given["n_first"], given["tile_rows"])
    n_tiles = n_prompt_tiles + given["n_rows"] - given["n_first"]
    row_bytes = n_units(given["head_dim_v"]) * UNIT_BYTES + STATE_BYTES
    place = code.stack_array([*known, n_prompt_tiles, n_tiles, row_bytes, *3 * [zero]])
    words = code.stack_buffer(I64, TILE_WORDS)
    n_pages, n_results = code.variable(zero), code.variable(zero)
    with code.loop(zero, n_tiles) as tile:
        _, n_rows, first, stop = _tile_at(code, place, tile, words)
        n_pages.set(n_pages.get() + (stop - first))
        n_results.set(n_results.get() + (stop - first) * n_rows * given["n_heads"])
    is_whole = n_results.get() > given["n_results"]
    n_groups = given["n_groups"]
    n_items = code.where(is_whole, n_tiles, n_pages.get()) * n_groups
    code.store(n_items, place + 8 * INNER.index("n_items"))
    code.store(is_whole.to(I64, signed=False), place + 8 * INNER.index("is_whole"))
    share(code, "attend", pool, place, code.min_signed(n_items, given["n_threads"]))
    with code.when(is_whole.equals(0)):
        n_merges = n_tiles * n_groups
        with code.if_else(n_results.get() > MERGED_ALONE) as (many, few):
            with many:
                share(code, "merge", pool, place, n_merges)
            with few, code.loop(zero, n_merges) as index:
                code.call("merge_piece", VOID, place, index)
    code.builder.ret_void()


def _add_tile_at(module: ir.Module) -> None:
    """Emit `tile_at(place, tile, words)`: stores a tile's first row, number of rows, first visible
    page and the page after its last one.
    """
    code, (place, tile, words) = internal(module, "tile_at", 3)
    given = named(code, place, INNER)
    per_tile, n_first = given["tile_rows"], given["n_first"]
    is_prompt = tile < given["n_prompt_tiles"]
    single = n_first + tile - given["n_prompt_tiles"]
    row = code.where(is_prompt, tile * per_tile, single)
    n = code.where(is_prompt, code.min_signed(per_tile, n_first - row), code.number(1))
    first = code.load(given["firsts"] + row * 8, I64) // PAGE
    stop = code.load(given["positions"] + (row + n - 1) * 8, I64) // PAGE + 1
    for number, word in enumerate((row, n, first, stop)):
        code.store(word, words + 8 * number)
    code.builder.ret_void()


def _tile_at(code: Code, place: Value, tile: Value, words: Value) -> list[Value]:
    code.call("tile_at", VOID, place, tile, words)
    return code.load_array(words, TILE_WORDS)


def _add_attend_piece(module: ir.Module) -> None:
    """Emit `attend_piece(place, index)`: processes work items until all are taken.

    There is one piece per thread, so that each thread has its own scratch memory.
    """
    code, (place, index) = function(module, "attend_piece", 2)
    given = named(code, place, INNER)
    scratch = given["work"] + index * given["scratch_bytes"]
    counter = code.builder.inttoptr((place + 8 * INNER.index("next")).raw, I64.as_pointer())
    with code.forever() as leave:
        one = code.number(1)
        item = Value(code, code.builder.atomic_rmw("add", counter, one.raw, "seq_cst"))
        leave(item >= given["n_items"])
        with code.if_else(given["is_whole"].differs(0)) as (whole, part):
            with whole:
                code.call("attend_whole", VOID, place, item, scratch)
            with part:
                code.call("attend_part", VOID, place, item, scratch)
    code.builder.ret_void()


def _add_part(module: ir.Module, *, has_words: bool) -> None:
    """Emit `attend_part(place, item, scratch)`: one page of a tile, for `merge_piece`."""
    code, (place, item, scratch) = internal(module, "attend_part", 3)
    given = named(code, place, INNER)
    words = code.stack_buffer(I64, TILE_WORDS)
    zero = code.number(0)
    left, before, tile = code.variable(item), code.variable(zero), code.variable(zero)
    with code.forever() as leave:
        row, n_rows, first, stop = _tile_at(code, place, tile.get(), words)
        n_pages = stop - first
        leave(left.get() < n_pages * given["n_groups"])
        left.set(left.get() - n_pages * given["n_groups"])
        before.set(before.get() + n_pages * n_rows)
        tile.set(tile.get() + 1)
    row, n_rows, first, stop = code.load_array(words, TILE_WORDS)
    group = given["groups"] + left.get() // (stop - first) * 24
    number = left.get() % (stop - first)
    head = code.load(group + 8, I64)
    index = (before.get() + number * n_rows) * given["n_heads"] + head * n_rows
    goal = _results(given) + index * given["result_bytes"]
    is_loaded = given["is_direct"].equals(0)
    with code.when(is_loaded | code.constant(I1, int(has_words))):
        code.call("load_queries", VOID, place, group, row, n_rows, scratch)
    code.call("attend_page", VOID, place, group, row, n_rows, first + number, goal, scratch)
    code.builder.ret_void()


def _results(given: Named) -> Value:
    return given["work"] + given["n_threads"] * given["scratch_bytes"]


def _add_merge_piece(module: ir.Module) -> None:
    """Emit `merge_piece(place, index)`: merges the pages for all rows and heads in a tile."""
    code, (place, index) = function(module, "merge_piece", 2)
    given = named(code, place, INNER)
    words, zero = code.stack_buffer(I64, TILE_WORDS), code.number(0)
    tile, group = index // given["n_groups"], given["groups"] + index % given["n_groups"] * 24
    before = code.variable(zero)
    with code.loop(zero, tile) as other:
        _, n_rows, first, stop = _tile_at(code, place, other, words)
        before.set(before.get() + (stop - first) * n_rows)
    begin, n_rows, first, stop = _tile_at(code, place, tile, words)
    _, head, n = code.load_array(group, 3)
    row_bytes = given["result_bytes"]
    results = _results(given) + (before.get() * given["n_heads"] + head * n_rows) * row_bytes
    pages = _TilePages(begin, n_rows, head, n, first, stop)
    _merge_rows(code, given, pages, results, n_rows * given["n_heads"] * row_bytes)
    code.builder.ret_void()


def _merge_rows(
    code: Code, given: Named, pages: _TilePages, results: Value, page_bytes: Value
) -> None:
    """Emit the merge of a tile's pages, whose results start at `results`, `page_bytes` apart."""
    row_bytes, n, zero = given["result_bytes"], pages.n, code.number(0)
    with code.loop(zero, pages.n_rows) as number, code.loop(zero, n) as one:
        row, head = pages.row + number, pages.head + one
        first, stop = _pages(code, given, row)
        result = results + (first - pages.first) * page_bytes + (number * n + one) * row_bytes
        code.call(
            "merge_all", VOID, result, row_bytes - STATE_BYTES, page_bytes, stop - first,
            given["head_dim_v"], given["sinks"], head, _out(given, row, head),
        )  # fmt: skip


def _pages(code: Code, given: Named, row: Value) -> tuple[Value, Value]:
    """Return a row's first visible page and the page after its last one."""
    first, position = (code.load(given[name] + row * 8, I64) for name in ("firsts", "positions"))
    return first // PAGE, position // PAGE + 1


def _out(given: Named, row: Value, head: Value) -> Value:
    return given["out"] + (row * given["n_heads"] + head) * given["head_dim_v"] * 4


def _add_whole(module: ir.Module, *, has_words: bool) -> None:
    """Emit `attend_whole(place, item, scratch)`: all of a tile's pages, longest tiles first."""
    code, (place, item, scratch) = internal(module, "attend_whole", 3)
    given = named(code, place, INNER)
    n_groups, words = given["n_groups"], code.stack_buffer(I64, TILE_WORDS)
    tile = given["n_tiles"] - 1 - item // n_groups
    group = given["groups"] + item % n_groups * 24
    begin, n_rows, first, stop = _tile_at(code, place, tile, words)
    _, head, n = code.load_array(group, 3)
    pages, room = _TilePages(begin, n_rows, head, n, first, stop), Scratch.at(scratch, given)
    is_loaded = given["is_direct"].equals(0)
    with code.when(is_loaded | code.constant(I1, int(has_words))):
        code.call("load_queries", VOID, place, group, begin, n_rows, scratch)

    def attend(page: Value, goal: Value) -> None:
        code.call("attend_page", VOID, place, group, begin, n_rows, page, goal, scratch)

    with code.if_else(stop - first <= FEW_PAGES) as (few, many):
        with few:
            apart = given["tile_heads"] * given["result_bytes"]
            with code.loop(first, stop) as page:
                attend(page, room.page + (page - first) * apart)
            _merge_rows(code, given, pages, room.page, apart)
        with many:
            _begin_rows(code, given, pages, room)
            with code.loop(first, stop) as page:
                attend(page, room.page)
                _add_page_of_rows(code, given, pages, room, page)
            _end_rows(code, given, pages, room)
    code.builder.ret_void()


def _begin_rows(code: Code, given: Named, pages: _TilePages, room: Scratch) -> None:
    row_bytes, zero = given["result_bytes"], code.number(0)
    with code.loop(zero, pages.n_rows) as row, code.loop(zero, pages.n) as one:
        state = room.rows + (row * pages.n + one + 1) * row_bytes - STATE_BYTES
        code.call("begin_row", VOID, state, given["sinks"], pages.head + one)


def _add_page_of_rows(
    code: Code, given: Named, pages: _TilePages, room: Scratch, page: Value
) -> None:
    row_bytes, n = given["result_bytes"], pages.n
    offset = row_bytes - STATE_BYTES
    with code.loop(code.number(0), pages.n_rows) as row:
        first, stop = _pages(code, given, pages.row + row)
        with code.when((first <= page) & (page < stop)), code.loop(row * n, (row + 1) * n) as index:
            at = index * row_bytes
            code.call(
                "add_page", VOID, room.page + at, room.rows + at, offset, offset // UNIT_BYTES
            )


def _end_rows(code: Code, given: Named, pages: _TilePages, room: Scratch) -> None:
    row_bytes, zero = given["result_bytes"], code.number(0)
    with code.loop(zero, pages.n_rows) as row, code.loop(zero, pages.n) as one:
        result = room.rows + (row * pages.n + one) * row_bytes
        goal = _out(given, pages.row + row, pages.head + one)
        code.call("end_row", VOID, result, row_bytes - STATE_BYTES, given["head_dim_v"], goal)
