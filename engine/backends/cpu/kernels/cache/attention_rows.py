"""Attention of many query heads over a block: keys and values are decoded once, to scratch memory.

A tile's rows are the query heads that share a key-value head, for several tokens of one sequence,
with each token's heads side by side. Keys are decoded transposed, so that a vector holds the scores
of 16 positions. A head's elements are added in the same order as in `attention_tile`: one sum for
each of 16 lanes, then those sums by halves.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from engine.backends.cpu.kernels.cache.attention_softmax import SCORE_BYTES, for_heads
from engine.backends.cpu.kernels.cache.attention_tile import add_weighted_sum, place_ahead, sizes
from engine.backends.cpu.kernels.cache.attention_words import (
    UNIT_BYTES,
    add_key_words,
    add_word_scores,
    in_words,
)
from engine.backends.cpu.kernels.cache.cache_codec import CODECS, CacheCodec, PlainCodec
from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I64,
    LANES,
    VOID,
    Code,
    Value,
    internal,
    transposed,
)
from engine.load_params import KVTypes
from engine.model.forward.state import ATTENTION_BLOCK as BLOCK

SCORE_ROWS = 4
"""Number of rows in a register tile of scores."""

KNOWN_UNITS = 4, 8
"""Vectors per head for which loops are unrolled; otherwise, such short loops take 13 % longer."""


def add_row_parts(module: ir.Module, isa: Isa, types: KVTypes) -> None:
    """Emit `decode_keys`, `decode_values`, `row_scores` and `plain_sum`."""
    known: tuple[int, ...] = ()
    if in_words(isa, types.k):
        add_key_words(module, isa, types.k)
        add_word_scores(module, isa, SCORE_ROWS)
        n_vectors = BLOCK // LANES
    else:
        _add_transpose(module, isa, types.k)
        for units in (*KNOWN_UNITS, 0):
            _add_tile_scores(module, isa, units)
        n_vectors, known = _n_vectors(isa), KNOWN_UNITS
    _add_decode_keys(module, n_vectors)
    _add_row_scores(module, n_vectors, known)
    _add_decode_values(module, isa, types.v)
    for size in sizes(isa):
        add_weighted_sum(module, isa, "plain_sum", "f32", size, prefetches=False)
    _add_plain_sum(module, isa)


def _n_lanes(isa: Isa) -> int:
    return 2 if isa.tile_tokens >= 8 else 1


def _n_vectors(isa: Isa) -> int:
    return 2 if isa.tile_tokens >= 8 else 1


def _add_transpose(module: ir.Module, isa: Isa, type_k: str) -> None:
    """Emit `transpose(k, stride, last, head_dim, ahead, goal)`: decodes 16 keys, transposed.

    Element 16 j + l of the keys becomes vector l × (head_dim / 16) + j at `goal`, with a stride of
    `_n_vectors` vectors. Keys after `last` are not read. As many bytes are prefetched from `ahead`.
    """
    code, (k, stride, last, dim, ahead, goal) = internal(module, "transpose", 6)
    codec = CODECS[type_k](code, isa)
    rows = [k + code.min_signed(code.number(n), last) * stride for n in range(LANES)]
    step = UNIT_BYTES * _n_vectors(isa)
    lane_bytes = (dim + (LANES - 1)) // LANES * step

    def store(unit: Value, keys: Sequence[Value]) -> None:
        for lane, vector in enumerate(transposed(keys)):
            code.store(vector, goal + unit * step + lane_bytes * lane)

    n_bytes = LANES * codec.n_bytes
    with code.loop(code.number(0), dim // codec.width) as index:
        for line in range(0, n_bytes, 64):
            code.prefetch(ahead + index * n_bytes + line, cache=2)
        read = [codec.read(row + index * codec.n_bytes) for row in rows]
        n_parts = codec.width // LANES
        for part in range(n_parts):
            store(index * n_parts + part, [vectors[part] for vectors in read])
    if isinstance(codec, PlainCodec):
        with code.when(dim % LANES > 0):
            index, left = dim // LANES, dim % LANES
            store(index, [codec.read_part(row + index * codec.n_bytes, left) for row in rows])
    code.builder.ret_void()


def _add_decode_keys(module: ir.Module, n_vectors: int) -> None:
    """Emit `decode_keys(k, stride, start, stop, head_dim, ahead, goal)`.

    Decodes at least a block's keys start … stop - 1, in the layout that `tile_scores` expects, and
    prefetches as `scores` does.
    """
    code, (k, stride, start, stop, dim, ahead, goal) = internal(module, "decode_keys", 7)
    n = n_vectors * LANES
    part_bytes = (dim + (LANES - 1)) // LANES * (LANES * 4 * n)
    with code.loop(start - start % LANES, stop, LANES) as near:
        place = goal + near // n * part_bytes + near % n * 4
        last, later = stop - near - 1, place_ahead(code, k, stride, near, stop, ahead)
        code.call("transpose", VOID, k + near * stride, stride, last, dim, later, place)
    code.builder.ret_void()


def _add_decode_values(module: ir.Module, isa: Isa, type_v: str) -> None:
    """Emit `decode_values(v, stride, start, stop, head_dim, goal)`.

    Decodes a block's values start … stop - 1 into rows of whole vectors, padded with zeros.
    """
    code, (v, stride, start, stop, dim, goal) = internal(module, "decode_values", 6)
    codec: CacheCodec = CODECS[type_v](code, isa)
    row_bytes = (dim + (LANES - 1)) // LANES * UNIT_BYTES
    n_units = dim // codec.width
    with code.loop(start, stop) as position:
        source, row = v + position * stride, goal + position * row_bytes
        with code.loop(code.number(0), n_units) as unit:
            for n, part in enumerate(codec.read(source + unit * codec.n_bytes)):
                code.store(part, row + unit * (4 * codec.width) + n * UNIT_BYTES)
        if isinstance(codec, PlainCodec):
            with code.when(dim % LANES > 0):
                part = codec.read_part(source + n_units * codec.n_bytes, dim % LANES)
                code.store(part, row + n_units * UNIT_BYTES)
    code.builder.ret_void()


def _add_tile_scores(module: ir.Module, isa: Isa, known: int) -> None:
    """Emit `tile_scores(q, n_units, k, out)`: q·k for some rows and positions.

    q has `SCORE_ROWS` rows of `n_units` vectors; k is laid out by `transpose`.

    Args:
        known: number of vectors for which the function is specialised; 0 for any number.
    """
    name = f"tile_scores_{known}" if known else "tile_scores"
    code, (q, n_units, k, out) = internal(module, name, 4)
    if known:
        n_units = code.number(known)
    n_vectors, n_rows = _n_vectors(isa), SCORE_ROWS
    q_rows = [q + n_units * (UNIT_BYTES * row) for row in range(n_rows)]
    tile_bytes = n_rows * n_vectors * UNIT_BYTES
    quarters = code.stack_buffer(F32, 4 * tile_bytes // 4)

    def of_lanes(lanes: Sequence[Value]) -> list[list[Value]]:
        zero = code.constant(FLOATS, 0.0)
        sums = [[[code.variable(zero) for _ in range(n_vectors)] for _ in q_rows] for _ in lanes]
        starts = [k + n_units * lane * (UNIT_BYTES * n_vectors) for lane in lanes]

        def add(unit: Value) -> None:
            for lane, start, rows in zip(lanes, starts, sums, strict=True):
                place = start + unit * (UNIT_BYTES * n_vectors)
                keys = [code.load(place + UNIT_BYTES * n, FLOATS) for n in range(n_vectors)]
                for row, totals in zip(q_rows, rows, strict=True):
                    query = code.splat(code.load(row + unit * UNIT_BYTES + lane * 4, F32))
                    for key, total in zip(keys, totals, strict=True):
                        total.set(code.fma(query, key, total.get()))

        for number in range(known):
            add(code.number(number))
        if not known:
            with code.loop(code.number(0), n_units) as unit:
                add(unit)
        return [[total.get() for totals in rows for total in totals] for rows in sums]

    def of_pair(lane: Value) -> list[Value]:
        pair = lane, lane + 8
        found = of_lanes(pair) if _n_lanes(isa) == 2 else [of_lanes([one])[0] for one in pair]
        return [a + b for a, b in zip(*found, strict=True)]

    with code.loop(code.number(0), code.number(4)) as lane:
        place = quarters + lane * tile_bytes
        for n, (a, b) in enumerate(zip(of_pair(lane), of_pair(lane + 4), strict=True)):
            code.store(a + b, place + n * UNIT_BYTES)
    for n in range(n_rows * n_vectors):
        row, part = divmod(n, n_vectors)
        a, b, c, d = (
            code.load(quarters + (tile_bytes * lane + n * UNIT_BYTES), FLOATS)
            for lane in (0, 2, 1, 3)
        )
        code.store((a + b) + (c + d), out + (SCORE_BYTES * row + UNIT_BYTES * part))
    code.builder.ret_void()


def _add_row_scores(module: ir.Module, n_vectors: int, known: Sequence[int]) -> None:
    """Emit `row_scores(q, n_units, first, last, k, stop, out)`.

    Computes q·k for the rows first … last - 1 and at least a block's positions before `stop`. It
    may overwrite the scores of up to `SCORE_ROWS` other rows.

    Args:
        known: numbers of vectors for which `tile_scores` is specialised.
    """
    code, (q, n_units, first, last, k, stop, out) = internal(module, "row_scores", 7)
    step, n_rows = n_vectors * LANES, SCORE_ROWS
    end = last - n_rows  # where the last tile starts, unless there are fewer rows

    def compute(name: str) -> None:
        with code.loop(code.number(0), stop, step) as near, code.loop(first, last, n_rows) as index:
            row = code.min_signed(index, end)
            row = code.where(row < 0, code.number(0), row)
            code.call(
                name, VOID, q + row * n_units * UNIT_BYTES, n_units,
                k + near * n_units * UNIT_BYTES, out + row * SCORE_BYTES + near * 4,
            )  # fmt: skip

    def choose(left: Sequence[int]) -> None:
        if not left:
            compute("tile_scores")
            return
        with code.if_else(n_units.equals(left[0])) as (same, others):
            with same:
                compute(f"tile_scores_{left[0]}")
            with others:
                choose(left[1:])

    choose(known)
    code.builder.ret_void()


def _add_plain_sum(module: ir.Module, isa: Isa) -> None:
    """Emit `plain_sum(first, last, weights, start, stop, v, n_units, column, …)`.

    The last arguments are `width, goal, row_bytes`. For rows first … last - 1, it adds weights ×
    `width` elements, starting at byte `column`, of a block's values start … stop - 1. `v` has rows
    of `n_units` vectors; the sums at `goal` are `row_bytes` apart, each followed by its state.
    """
    code, arguments = internal(module, "plain_sum", 11)
    first, last, weights, start, stop, v, n_units, column, width, goal, row_bytes = arguments
    stride = n_units * UNIT_BYTES
    for_heads(
        code, sizes(isa), first, last,
        lambda size, row: code.call(
            f"plain_sum_{size}", VOID, weights + row * SCORE_BYTES + start * 4, stop - start,
            v + start * stride + column, stride, width, stride - column,
            goal + row * row_bytes + column, row_bytes,
        ),
    )  # fmt: skip
    code.builder.ret_void()


def row_range(
    code: Code, firsts: Value, begin: Value, n_rows: Value, limit: Value
) -> tuple[Value, Value]:
    """Return the range of rows from `begin` (at least 0) on that see a position before `limit`.

    Args:
        firsts: address of each row's first visible position, for `n_rows` rows.
    """
    begin = code.min_signed(code.where(begin < 0, code.number(0), begin), n_rows)
    stop = code.variable(n_rows)
    with code.forever() as leave:
        leave(stop.get() <= begin)
        leave(code.load(firsts + (stop.get() - 1) * 8, I64) < limit)
        stop.set(stop.get() - 1)
    return begin, stop.get()
