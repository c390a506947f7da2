"""Attention's products over a block of positions: scores, and the weighted sum of values.

The query heads of a key-value head are computed in register tiles, so that each key and value is
decoded once for all of them. Tiles of every size add in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from engine.backends.cpu.kernels.cache.attention_softmax import FACTOR, FRESH, for_heads
from engine.backends.cpu.kernels.cache.attention_words import QUERY_BYTES, in_words, word_products
from engine.backends.cpu.kernels.cache.cache_codec import CODECS, CacheCodec, PlainCodec
from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    LANES,
    VOID,
    Code,
    Value,
    Variable,
    internal,
)
from engine.load_params import KVTypes
from engine.model.forward.state import ATTENTION_BLOCK as BLOCK

MAX_INT16_HEADS = 2
"""Largest number of heads for which int16 keys are multiplied in place. For more heads, transposing
the keys is faster than adding up lanes."""

AHEAD_BYTES = 8 << 10
"""Bytes of keys or values to prefetch ahead; together with those being read, they fit in L1."""


def add_parts(module: ir.Module, isa: Isa, types: KVTypes) -> None:
    """Emit `scores` and `weighted_sum`."""
    has_words = in_words(isa, types.k)
    for size in sizes(isa):
        if not has_words:
            _add_dots(module, isa, types.k, size)
        elif size <= MAX_INT16_HEADS:
            _add_word_dots(module, isa, types.k, size)
        add_weighted_sum(module, isa, "weighted_sum", types.v, size)
    _add_scores(module, isa, MAX_INT16_HEADS if has_words else sizes(isa)[0])
    _add_weighted_sum(module, isa)


def _add_weighted_sum(module: ir.Module, isa: Isa) -> None:
    """Emit `weighted_sum(n, weights, count, v, stride, ahead, head_dim, offset, row, row_bytes)`.

    It calls `weighted_sum_m` (see `add_weighted_sum`) with as many positions per call as fit in L1.
    """
    code, arguments = internal(module, "weighted_sum", 10)
    n, weights, count, v, stride, ahead, dim, offset, row, row_bytes = arguments
    step, start = rows_ahead(code, stride), code.variable(code.number(0))
    with code.forever() as leave:
        at = start.get()
        leave(at >= count)
        later = at + step
        next_v = code.where(later < count, v + later * stride, ahead)
        n_positions = code.min_signed(step, count - at)
        for_heads(
            code, sizes(isa), code.number(0), n,
            lambda size, head: code.call(
                f"weighted_sum_{size}", VOID, weights + head * (4 * BLOCK) + at * 4, n_positions,
                v + at * stride, stride, next_v, dim, offset, row + head * row_bytes, row_bytes,
            ),
        )  # fmt: skip
        start.set(later)
    code.builder.ret_void()


def sizes(isa: Isa) -> tuple[int, ...]:
    """Return the possible numbers of heads per tile, largest first."""
    return (8, 4, 2, 1) if isa.tile_tokens >= 8 else (2, 1)


def _add_scores(module: ir.Module, isa: Isa, most: int) -> None:
    """Emit `scores(n, q, head_dim, k, stride, start, stop, ahead, out)`.

    It computes q·k for n heads and a block's positions start … stop - 1; results for others are
    undefined. It prefetches the keys `rows_ahead` later, then from `ahead` on.

    Args:
        most: largest number of heads in a tile.
    """
    code, (n, q, dim, k, stride, start, stop, ahead, out) = internal(module, "scores", 9)
    with code.loop(start - start % LANES, stop, LANES) as near:
        end = code.min_signed(near + LANES, stop)
        place = place_ahead(code, k, stride, near, stop, ahead)

        def tiles(size: int, head: Value) -> None:
            with code.loop(near, end, n_sums(isa) // size) as position:
                code.call(
                    f"dots_{size}", VOID, q + head * dim * 4, dim, k + position * stride, stride,
                    stop - position - 1, place + (position - near) * stride,
                    out + (head * BLOCK + position) * 4,
                )  # fmt: skip

        used = [size for size in sizes(isa) if size <= most]
        for_heads(code, used, code.number(0), n, tiles)
    code.builder.ret_void()


def place_ahead(
    code: Code, k: Value, stride: Value, near: Value, stop: Value, ahead: Value
) -> Value:
    """Return the address to prefetch while the keys k are read from position `near` on.

    Args:
        stop: end of the block's positions.
        ahead: address that is read after the block.
    """
    later = near + rows_ahead(code, stride)
    return code.where(later < stop, k + later * stride, ahead + (later - stop) * stride)


def rows_ahead(code: Code, stride: Value) -> Value:
    """Return the prefetch distance in positions: about 8 KiB, but from 16 to BLOCK positions."""
    some = code.where(stride > 2 * AHEAD_BYTES // BLOCK, code.number(16), code.number(32))
    return code.where(stride > AHEAD_BYTES // BLOCK, some, code.number(BLOCK))


def n_sums(isa: Isa) -> int:
    """Return the number of vectors of sums in a register tile."""
    return 16 if isa.tile_tokens >= 8 else 4


def tile_width(isa: Isa, size: int) -> int:
    """Return how many elements of a value a register tile of `size` heads covers."""
    return LANES * max(2, min(n_sums(isa) // size, sizes(isa)[0] // 2))


def _add_dots(module: ir.Module, isa: Isa, type_k: str, size: int) -> None:
    """Emit `dots_m(q, head_dim, k, stride, last, ahead, out)`: q·k for m heads.

    It multiplies by the keys at adjacent positions, and prefetches as many bytes from `ahead`.
    Positions after `last` are not read; their results in `out` are undefined.
    """
    code, (q, dim, k, stride, last, ahead, out) = internal(module, f"dots_{size}", 7)
    codec = CODECS[type_k](code, isa)
    n_positions = n_sums(isa) // size
    rows = [k]
    for n in range(1, n_positions):
        rows.append(rows[-1] + code.where(last < n, code.number(0), stride))
    zero = code.constant(FLOATS, 0.0)
    sums = [[code.variable(zero) for _ in rows] for _ in range(size)]

    def add(queries: list[Value], keys: list[Value]) -> None:
        for query, row in zip(queries, sums, strict=True):
            for key, total in zip(keys, row, strict=True):
                total.set(code.fma(query, key, total.get()))

    n_units = dim // codec.width
    n_bytes = n_positions * codec.n_bytes
    with code.loop(code.number(0), n_units) as unit:
        for line in range(0, n_bytes, 64):
            code.prefetch(ahead + unit * n_bytes + line, cache=2)
        keys = [codec.read(row + unit * codec.n_bytes) for row in rows]
        for part in range(codec.width // LANES):
            at = q + unit * (4 * codec.width) + 64 * part
            queries = [code.load(at + dim * (4 * head), FLOATS) for head in range(size)]
            add(queries, [key[part] for key in keys])
    if isinstance(codec, PlainCodec):
        with code.when(dim % LANES > 0):
            left, at = dim % LANES, q + n_units * (4 * LANES)
            queries = [code.load_part(at + dim * (4 * h), FLOATS, left) for h in range(size)]
            add(queries, [codec.read_part(row + n_units * codec.n_bytes, left) for row in rows])
    totals = code.reduce_each([total.get() for row in sums for total in row])
    for head in range(size):
        mine = totals.shuffle(range(head * n_positions, (head + 1) * n_positions))
        code.store(mine, out + head * (4 * BLOCK))
    code.builder.ret_void()


def _add_word_dots(module: ir.Module, isa: Isa, type_k: str, size: int) -> None:
    """Emit `dots_m` as in `_add_dots`, for queries from `query_words`."""
    code, (q, dim, k, stride, last, ahead, out) = internal(module, f"dots_{size}", 7)
    codec = CODECS[type_k]
    n_positions = n_sums(isa) // size
    rows = [k]
    for n in range(1, n_positions):
        rows.append(rows[-1] + code.where(last < n, code.number(0), stride))
    total, n_bytes = code.variable(code.constant(FLOATS, 0.0)), n_positions * codec.n_bytes
    with code.loop(code.number(0), dim // codec.width) as index:
        for line in range(0, n_bytes, 64):
            code.prefetch(ahead + index * n_bytes + line, cache=2)
        queries = [q + dim * (4 * head) + index * QUERY_BYTES for head in range(size)]
        keys = [row + index * codec.n_bytes for row in rows]
        products, scales, factors = word_products(code, isa, type_k, queries, keys)
        total.set(code.fma(code.reduce_each(products).to(FLOATS) * scales, factors, total.get()))
    for head in range(size):
        mine = total.get().shuffle(range(head * n_positions, (head + 1) * n_positions))
        code.store(mine, out + head * (4 * BLOCK))
    code.builder.ret_void()


def add_weighted_sum(
    module: ir.Module, isa: Isa, name: str, type_v: str, size: int, *, prefetches: bool = True
) -> None:
    """Emit `name_m(weights, count, v, stride, ahead, head_dim, offset, row, row_bytes)`.

    It rescales m heads' sums by the factors in their states, adds weights × values for `count`
    positions, and resets the factors to 1. The sums are rows `row_bytes` apart, with their states
    at `offset`. The same number of bytes is prefetched from `ahead`.

    Args:
        prefetches: whether to prefetch; otherwise there is no `ahead`, and the factors are kept.
    """
    code, (weights, count, v, stride, *others) = internal(
        module, f"{name}_{size}", 9 if prefetches else 8
    )
    *ahead, dim, offset, row, row_bytes = others
    state = row + offset
    codec = CODECS[type_v](code, isa)

    def columns(start: Value, n_units: int, left: Value | None = None) -> None:
        column, n_bytes = start // codec.width * codec.n_bytes, n_units * codec.n_bytes
        places = v + column
        goals = [row + row_bytes * head + start * 4 for head in range(size)]
        sums = _begun(code, goals, state, row_bytes, n_units * codec.width // LANES)
        with code.loop(code.number(0), count) as position:
            for line in range(0, n_bytes if ahead else 0, 64):
                code.prefetch(ahead[0] + column * count + position * n_bytes + line, cache=2)
            values = _values(codec, places + position * stride, n_units, left)
            for head, totals in enumerate(sums):
                weight = code.load(weights + head * (4 * BLOCK) + position * 4, F32)
                for total, value in zip(totals, values, strict=True):
                    total.set(code.fma(code.splat(weight), value, total.get()))
        for goal, totals in zip(goals, sums, strict=True):
            for n, total in enumerate(totals):
                code.store(total.get(), goal + 64 * n)

    wide = tile_width(isa, size)
    with code.loop(code.number(0), dim - dim % wide, wide) as start:
        columns(start, wide // codec.width)
    with code.loop(dim - dim % wide, dim - dim % codec.width, codec.width) as start:
        columns(start, 1)
    if isinstance(codec, PlainCodec):
        with code.when(dim % LANES > 0):
            columns(dim - dim % LANES, 1, dim % LANES)
    if prefetches:
        for head in range(size):
            code.store(code.constant(F32, 1.0), state + row_bytes * head + FACTOR)
    code.builder.ret_void()


def _begun(
    code: Code, goals: Sequence[Value], state: Value, row_bytes: Value, n: int
) -> list[list[Variable]]:
    zero = code.constant(FLOATS, 0.0)
    sums = []
    for head, goal in enumerate(goals):
        factor = code.splat(code.load(state + row_bytes * head + FACTOR, F32))
        parts = [code.load(goal + 64 * part, FLOATS) * factor for part in range(n)]
        fresh = factor.equals(FRESH)
        sums.append([code.variable(code.where(fresh, zero, part)) for part in parts])
    return sums


def _values(codec: CacheCodec, address: Value, n_units: int, left: Value | None) -> list[Value]:
    """Read adjacent values as F32: n units, or the first `left` elements of one unit."""
    if left is not None and isinstance(codec, PlainCodec):
        return [codec.read_part(address, left)]
    return [
        value for unit in range(n_units) for value in codec.read(address + unit * codec.n_bytes)
    ]
