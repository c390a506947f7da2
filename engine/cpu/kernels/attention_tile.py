"""The steps of attention over a block of positions: scores, softmax, weighted sum of values.

Query heads of one key-value head are computed in tiles that fit the registers, so that each key and
value is decoded once for all of them. The sum for one head and position is made in the same order
in tiles of every size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce

from llvmlite import ir

from engine.config.kv_types import KVTypes
from engine.cpu.kernels import maths
from engine.cpu.kernels.cache_codec import CODECS, CacheCodec, PlainCodec
from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.values import (  # fmt: skip
    F32,
    FLOATS,
    I32,
    INTS,
    LANES,
    VOID,
    Code,
    Value,
    Variable,
    function,
)
from engine.forward.state import ATTENTION_BLOCK as BLOCK

LARGEST, SUM, FACTOR = 0, 4, 8
"""Byte offsets in a head's state: the largest score so far, the sum of the weights relative to it,
and the factor by which the values so far are to be rescaled."""

STATE_BYTES = 64
"""Size of a head's state, in bytes."""

FRESH = -1.0
"""Sum and factor in a head's state where nothing has been added up yet: what lies in its memory
means nothing."""

MINUS_INFINITY = float("-inf")


def add_parts(module: ir.Module, isa: Isa, types: KVTypes) -> None:
    """Write `scores`, `online_softmax` and `weighted_sum`: see the functions below."""
    for size in sizes(isa):
        _add_dots(module, isa, types.k, size)
        add_weighted_sum(module, isa, "weighted_sum", types.v, size)
    _add_scores(module, isa)
    _add_cap(module)
    _add_online_softmax(module)
    code, (n, weights, *others, row, row_bytes) = function(module, "weighted_sum", 11)
    code.builder.function.linkage = "internal"
    for_heads(
        code, sizes(isa), code.number(0), n,
        lambda size, head: code.call(
            f"weighted_sum_{size}", VOID, weights + head * (4 * BLOCK), *others,
            row + head * row_bytes, row_bytes,
        ),
    )  # fmt: skip
    code.builder.ret_void()


def sizes(isa: Isa) -> tuple[int, ...]:
    """Return the numbers of heads of a tile, largest first."""
    return (4, 2, 1) if isa.tile_tokens >= 8 else (2, 1)


def for_heads(
    code: Code,
    tiles: Sequence[int],
    start: Value,
    stop: Value,
    body: Callable[[int, Value], object],
) -> None:
    """Write a loop over heads start … stop - 1, in the largest tiles that they fill.

    Args:
        tiles: sizes of tiles: a power of two and all smaller ones, largest first.
    """
    most, *fewer = tiles
    n = stop - start
    with code.loop(start, stop - n % most, most) as head:
        body(most, head)
    for size in fewer:
        with code.when((n & size) > 0):
            body(size, stop - n % (2 * size))


def _add_scores(module: ir.Module, isa: Isa) -> None:
    """Write `scores(n, q, head_dim, k, stride, start, stop, ahead, ahead_stride, out)`.

    Computes q·k for n heads and the positions start … stop - 1 of a block, and prefetches the rows
    at `ahead` meanwhile. Results at other positions mean nothing.
    """
    code, arguments = function(module, "scores", 10)
    n, q, dim, k, stride, start, stop, ahead, ahead_stride, out = arguments
    code.builder.function.linkage = "internal"
    with code.loop(start - start % LANES, stop, LANES) as near:
        end = code.min_signed(near + LANES, stop)
        with code.loop(near * ahead_stride, end * ahead_stride, 64) as at:
            code.prefetch(ahead + at)

        def tiles(size: int, head: Value) -> None:
            with code.loop(near, end, _n_sums(isa) // size) as position:
                code.call(
                    f"dots_{size}", VOID, q + head * dim * 4, dim, k + position * stride, stride,
                    stop - position - 1, out + (head * BLOCK + position) * 4,
                )  # fmt: skip

        for_heads(code, sizes(isa), code.number(0), n, tiles)
    code.builder.ret_void()


def _n_sums(isa: Isa) -> int:
    """Return the number of vectors that a tile of scores sums up at once."""
    return sizes(isa)[0] ** 2


def _add_dots(module: ir.Module, isa: Isa, type_k: str, size: int) -> None:
    """Write `dots_m(q, head_dim, k, stride, last, out)`: q·k for m heads and adjacent positions.

    Positions after the `last` are not read; their results in `out` mean nothing.
    """
    code, (q, dim, k, stride, last, out) = function(module, f"dots_{size}", 6)
    code.builder.function.linkage = "internal"
    codec = CODECS[type_k](code, isa)
    n_positions = _n_sums(isa) // size
    rows = [k + code.min_signed(code.number(n), last) * stride for n in range(n_positions)]
    zero = code.constant(FLOATS, 0.0)
    sums = [[code.variable(zero) for _ in rows] for _ in range(size)]

    def add(queries: list[Value], keys: list[Value]) -> None:
        for query, row in zip(queries, sums, strict=True):
            for key, total in zip(keys, row, strict=True):
                total.set(code.fma(query, key, total.get()))

    n_units = dim // codec.width
    with code.loop(code.number(0), n_units) as unit:
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
    totals = sums_of([total.get() for row in sums for total in row])
    for head in range(size):
        mine = totals.shuffle(range(head * n_positions, (head + 1) * n_positions))
        code.store(mine, out + head * (4 * BLOCK))
    code.builder.ret_void()


def sums_of(vectors: Sequence[Value]) -> Value:
    """Return the sum over the lanes of each of 1, 2, 4, … vectors, each in the same order."""
    n_groups = 1
    while len(vectors) > 1:
        vectors = [
            _folded(a, b, n_groups) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        n_groups *= 2
    (total,) = vectors
    while total.kind.count > n_groups:
        total = _folded(total, None, n_groups)
    return total


def _folded(a: Value, b: Value | None, n_groups: int) -> Value:
    """Add the two halves of each group of lanes; the results of b follow those of a."""
    n = a.kind.count
    size = n // n_groups
    starts = range(0, n if b is None else 2 * n, size)
    low, high = (
        [start + lane for start in starts for lane in part]
        for part in (range(size // 2), range(size // 2, size))
    )
    return a.shuffle(low, b) + a.shuffle(high, b)


def _add_cap(module: ir.Module) -> None:
    """Write `cap(x, scale, softcap)`: scales the scores x of a block and caps them."""
    code, (x, *factors) = function(module, "cap", 3)
    code.builder.function.linkage = "internal"
    scale, softcap = (code.splat(factor.to(I32).bitcast(F32)) for factor in factors)
    with code.loop(code.number(0), code.number(BLOCK), LANES) as index:
        score = code.load(x + index * 4, FLOATS) * scale
        code.store(softcap * maths.tanh(code, score / softcap), x + index * 4)
    code.builder.ret_void()


def _add_online_softmax(module: ir.Module) -> None:
    """Write `online_softmax(x, start, stop, distance, scale, softcap, slope, state)`.

    Replaces the scores x of one head (q·k) in a block by weights and updates the head's state; all
    positions but start … stop - 1 get no weight. `distance` is the block's first position minus
    that of the query. scale, softcap and slope are the bits of F32.
    """
    code, (x, start, stop, distance, *factors, state) = function(module, "online_softmax", 8)
    code.builder.function.linkage = "internal"
    code.builder.function.attributes.add("alwaysinline")
    scale, slope = (factor.to(I32).bitcast(F32) for factor in factors[::2])
    factor_left = code.variable(scale)
    with code.when(factors[1].differs(0)):
        code.call("cap", VOID, x, *factors[:2])
        factor_left.set(code.constant(F32, 1.0))
    scale, slope = code.splat(factor_left.get()), code.splat(slope)
    begin, end = code.splat(start.to(I32)), code.splat(stop.to(I32))
    places, lowest = code.splat(distance.to(F32)), code.constant(FLOATS, MINUS_INFINITY)
    scores = []
    for index in range(0, BLOCK, LANES):
        score = code.load(x + index * 4, FLOATS) * scale
        numbers = range(index, index + LANES)
        lanes = code.vector_of(INTS, numbers)
        sloped = code.fma(places + code.vector_of(FLOATS, numbers), slope, score)
        scores.append(code.where((lanes >= begin) & (lanes < end), sloped, lowest))
    zero, least = code.constant(F32, 0.0), code.constant(F32, MINUS_INFINITY)
    so_far = code.load(state + SUM, F32)
    fresh = so_far < 0.0
    before = code.where(fresh, least, code.load(state + LARGEST, F32))
    largest = larger(code, _largest(code, reduce(partial(larger, code), scores)), before)
    base = code.where(largest > least, largest, zero)
    weights = [maths.exp(code, score - code.splat(base)) for score in scores]
    for n, weight in enumerate(weights):
        code.store(weight, x + n * (4 * LANES))
    factor = maths.exp(code, before - base)
    total = code.reduce("add", reduce(operator.add, weights))
    code.store(largest, state + LARGEST)
    code.store(code.where(fresh, zero, so_far * factor) + total, state + SUM)
    code.store(code.where(fresh, code.constant(F32, FRESH), factor), state + FACTOR)
    code.builder.ret_void()


def larger(code: Code, a: Value, b: Value) -> Value:
    """Return the larger of two floats, element by element: one instruction; b where one is NaN.

    The weight of a score that is NaN is NaN whatever the largest one.
    """
    return code.where(a > b, a, b)


def _largest(code: Code, a: Value) -> Value:
    """Return the largest element of a vector, as `larger` does."""
    while a.kind.count > 1:
        half = a.kind.count // 2
        a = larger(code, a.shuffle(range(half)), a.shuffle(range(half, 2 * half)))
    return a[0]


def mark_fresh(code: Code, state: Value) -> None:
    """Write into a head's state that nothing has been added up yet."""
    code.store(code.constant(F32, FRESH), state + SUM)


def add_weighted_sum(
    module: ir.Module, isa: Isa, name: str, type_v: str, size: int, *, prefetches: bool = True
) -> None:
    """Write `name_m(weights, count, v, stride, ahead, ahead_stride, head_dim, offset, …)`.

    The last arguments are `row, row_bytes`. Rescales the sums of m heads by the factors in their
    states and adds weights × values of `count` positions. The sums are rows `row_bytes` apart, each
    with its state `offset` bytes on. The cache's rows at `ahead` are prefetched meanwhile.

    Args:
        prefetches: whether the kernel does so, and takes `ahead` and `ahead_stride`.
    """
    code, (weights, count, v, stride, *others) = function(
        module, f"{name}_{size}", 10 if prefetches else 8
    )
    *ahead, dim, offset, row, row_bytes = others
    state = row + offset
    code.builder.function.linkage = "internal"
    codec = CODECS[type_v](code, isa)

    def columns(start: Value, n_units: int, left: Value | None = None) -> None:
        column = start // codec.width * codec.n_bytes
        places = v + column
        goals = [row + row_bytes * head + start * 4 for head in range(size)]
        sums = _begun(code, goals, state, row_bytes, n_units * codec.width // LANES)
        with code.loop(code.number(0), count) as position:
            for at in range(0, n_units * codec.n_bytes if ahead else 0, 64):
                code.prefetch(ahead[0] + column + position * ahead[1] + at)
            values = _values(codec, places + position * stride, n_units, left)
            for head, totals in enumerate(sums):
                weight = code.load(weights + head * (4 * BLOCK) + position * 4, F32)
                for total, value in zip(totals, values, strict=True):
                    total.set(code.fma(code.splat(weight), value, total.get()))
        for goal, totals in zip(goals, sums, strict=True):
            for n, total in enumerate(totals):
                code.store(total.get(), goal + 64 * n)

    wide = sizes(isa)[0] * LANES
    with code.loop(code.number(0), dim - dim % wide, wide) as start:
        columns(start, wide // codec.width)
    with code.loop(dim - dim % wide, dim - dim % codec.width, codec.width) as start:
        columns(start, 1)
    if isinstance(codec, PlainCodec):
        with code.when(dim % LANES > 0):
            columns(dim - dim % LANES, 1, dim % LANES)
    code.builder.ret_void()


def _begun(
    code: Code, goals: Sequence[Value], state: Value, row_bytes: Value, n: int
) -> list[list[Variable]]:
    """Return the sums to start from: each head's n vectors at its goal, rescaled, or zeros."""
    zero = code.constant(FLOATS, 0.0)
    sums = []
    for head, goal in enumerate(goals):
        factor = code.splat(code.load(state + row_bytes * head + FACTOR, F32))
        parts = [code.load(goal + 64 * part, FLOATS) * factor for part in range(n)]
        fresh = factor.equals(FRESH)
        sums.append([code.variable(code.where(fresh, zero, part)) for part in parts])
    return sums


def _values(codec: CacheCodec, address: Value, n_units: int, left: Value | None) -> list[Value]:
    """Read adjacent values of the cache as F32: n units, or the first `left` elements of one."""
    if left is not None and isinstance(codec, PlainCodec):
        return [codec.read_part(address, left)]
    return [
        value for unit in range(n_units) for value in codec.read(address + unit * codec.n_bytes)
    ]
