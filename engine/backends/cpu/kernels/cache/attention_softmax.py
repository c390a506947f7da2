"""Attention's online softmax over blocks of positions.

Scores are scaled by log2(e) because powers of two take fewer instructions than powers of e.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import NamedTuple

from llvmlite import ir

from engine.backends.cpu.kernels.language import maths
from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import SimdLanes, for_each_vector
from engine.backends.cpu.kernels.language.values import (  # fmt: skip
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    VOID,
    Code,
    Value,
    Variable,
    internal,
    vector,
)
from engine.model.forward.state import ATTENTION_BLOCK as BLOCK


def for_heads(
    code: Code,
    tiles: Sequence[int],
    start: Value,
    stop: Value,
    body: Callable[[int, Value], object],
) -> None:
    """Emit a loop over the heads start … stop - 1, in tiles that are as large as possible.

    Args:
        tiles: tile sizes: a power of two and all smaller ones, largest first.
    """
    most, *fewer = tiles
    n = stop - start
    with code.loop(start, stop - n % most, most) as head:
        body(most, head)
    for size in fewer:
        with code.when((n & size) > 0):
            body(size, stop - n % (2 * size))


MAX_NUMBER, SUM, FACTOR, SUMS = 0, 4, 8, 32
"""Byte offsets in a head's state: the largest score so far, the sum of the weights relative to it,
the factor that rescales the values so far, and the `N_SUMS` partial sums that a page's state has
instead of the sum."""

N_SUMS = 8
"""Number of partial sums of a page's weights; each contains every eighth weight."""

SCORE_BYTES = 4 * BLOCK
"""Bytes per row of scores in a block."""

STATE_BYTES = 64
"""Size of a head's state, in bytes."""

FRESH = -1.0
"""Sum and factor in a head's state before any values; the memory for values is uninitialised."""

ONE = 0x3F800000
"""Bits of 1.0 as F32."""

MINUS_INFINITY = float("-inf")


def add_softmax(module: ir.Module, isa: Isa) -> None:
    """Emit `cap`, `mask` and `softmax`."""
    _add_cap(module)
    _add_mask(module)
    for size in _sizes(isa):
        _add_tile_softmax(module, isa, size)
    _add_softmax(module, isa)


def _sizes(isa: Isa) -> tuple[int, ...]:
    """Return how many heads' weights may be computed together, largest first.

    A single head's instructions would be one dependency chain.
    """
    return (4, 2, 1) if isa.tile_tokens >= 8 else (1,)


def _add_cap(module: ir.Module) -> None:
    """Emit `cap(first, last, x, scale, softcap)`: returns the scores' factor, F32 bits.

    With a softcap, it scales and caps the scores x of the heads first … last - 1.
    """
    code, (first, last, x, *factors) = internal(module, "cap", 5, I64)
    scale, softcap = (factor.to(I32).bitcast(F32) for factor in factors)
    factor = code.variable(scale * maths.LOG2_E)
    with code.when(factors[1].differs(0)):
        factor.set(code.constant(F32, maths.LOG2_E))
        spread, limit = code.splat(scale), code.splat(softcap)
        with code.loop(first * SCORE_BYTES, last * SCORE_BYTES, 4 * LANES) as place:
            score = code.load(x + place, FLOATS) * spread
            code.store(limit * maths.tanh(code, score / limit), x + place)
    code.builder.ret(factor.get().bitcast(I32).to(I64).raw)


def _add_mask(module: ir.Module) -> None:
    """Emit `mask(n, x, start, stop, distance, factor, slopes)`, for n heads of one token.

    It scales the heads' scores x in a block, adds the ALiBi biases, and sets scores outside start …
    stop - 1 to -inf. `distance` is the block's first position minus the token's; factor is F32
    bits; slopes is the address of the heads' slopes, or 0.
    """
    code, (n, x, start, stop, distance, factor, slopes) = internal(module, "mask", 7)
    spread = code.splat(factor.to(I32).bitcast(F32))
    begin, end = code.splat(start.to(I32)), code.splat(stop.to(I32))
    before, lowest = code.splat(distance.to(F32)), code.constant(FLOATS, MINUS_INFINITY)
    with code.loop(code.number(0), n) as head:
        slope = code.variable(code.constant(F32, 0.0))
        with code.when(slopes.differs(0)):
            slope.set(code.load(slopes + head * 4, F32) * maths.LOG2_E)
        for first in range(0, BLOCK, LANES):
            numbers, at = range(first, first + LANES), x + head * SCORE_BYTES + 4 * first
            lanes = code.vector_of(INTS, numbers)
            place = before + code.vector_of(FLOATS, numbers)
            sloped = code.fma(place, code.splat(slope.get()), code.load(at, FLOATS) * spread)
            code.store(code.where((lanes >= begin) & (lanes < end), sloped, lowest), at)
    code.builder.ret_void()


def _add_softmax(module: ir.Module, isa: Isa) -> None:
    """Emit `softmax(first, last, x, factor, state, row_bytes)`: calls `softmax_m`."""
    code, (first, last, x, factor, state, row_bytes) = internal(module, "softmax", 6)
    for_heads(
        code, _sizes(isa), first, last,
        lambda size, head: code.call(
            f"softmax_{size}", VOID, x + head * SCORE_BYTES, factor, state + head * row_bytes,
            row_bytes,
        ),
    )  # fmt: skip
    code.builder.ret_void()


def _add_tile_softmax(module: ir.Module, isa: Isa, size: int) -> None:
    """Emit `softmax_m(x, factor, state, row_bytes)`, for m heads.

    It turns the heads' scores x in a block, times the factor (F32 bits), into weights, and updates
    the heads' states, which are `row_bytes` apart.
    """
    code, (x, factor, state, row_bytes) = internal(module, f"softmax_{size}", 4)
    spread = code.splat(factor.to(I32).bitcast(F32))
    heads = range(size)
    rows = [[x + (SCORE_BYTES * head + n) for n in range(0, SCORE_BYTES, 64)] for head in heads]
    scores = [[code.load(place, FLOATS) * spread for place in row] for row in rows]
    states = [state + row_bytes * head for head in heads]
    greater = partial(larger, code)
    before = code.gathered([each + MAX_NUMBER for each in states], F32)
    largest = greater(code.reduce_each([reduce(greater, row) for row in scores], greater), before)
    least, zero = (code.constant(before.kind, number) for number in (MINUS_INFINITY, 0.0))
    base = code.where(largest > least, largest, zero)
    factors = maths.exp2(code, isa, (before - base).shuffle([n % size for n in range(LANES)]))
    low, high = (range(n, n + N_SUMS) for n in (0, N_SUMS))
    for head, (row, places, at) in enumerate(zip(scores, rows, states, strict=True)):
        own = base.shuffle([head] * LANES)
        weights = [maths.exp2(code, isa, score - own) for score in row]
        for weight, place in zip(weights, places, strict=True):
            code.store(weight, place)
        total = reduce(operator.add, weights)
        past = code.load(at + SUMS, vector(F32, N_SUMS))
        total = total.shuffle(low) + total.shuffle(high)
        code.store(code.fma(past, factors.shuffle([head] * N_SUMS), total), at + SUMS)
        code.store(largest[head], at + MAX_NUMBER)
        fresh = code.load(at + SUM, F32) < 0.0
        code.store(code.constant(F32, 0.0), at + SUM)
        code.store(code.where(fresh, code.constant(F32, FRESH), factors[head]), at + FACTOR)
    code.builder.ret_void()


def larger(code: Code, a: Value, b: Value) -> Value:
    """Return the larger of two floats, element by element; b if either is NaN.

    This takes one instruction, and suffices because a NaN score's weight is NaN anyway.
    """
    return code.where(a > b, a, b)


def mark_fresh(code: Code, state: Value) -> None:
    """Initialise a head's state for a page."""
    code.store(code.constant(F32, MINUS_INFINITY), state + MAX_NUMBER)
    code.store(code.constant(F32, FRESH), state + SUM)
    code.store(code.constant(vector(F32, N_SUMS), 0.0), state + SUMS)


def page_sum(code: Code, state: Value) -> Value:
    """Return the sum of a page's weights, given the page's state."""
    return code.reduce("add", code.load(state + SUMS, vector(F32, N_SUMS)))


PAST_FACTOR = 12
"""Byte offset in a page's state: the factor for the previous pages' merged result."""


class _Softmax(NamedTuple):
    """One row's running maximum and sum."""

    largest: Variable
    total: Variable

    @classmethod
    def begun(cls, code: Code, sinks: Value, head: Value) -> _Softmax:
        """Return the initial state; a sink counts as a score with weight 1."""
        largest = code.variable(code.constant(F32, MINUS_INFINITY))
        total = code.variable(code.constant(F32, 0.0))
        with code.when(sinks.differs(0)):
            largest.set(code.load(sinks + head * 4, F32) * maths.LOG2_E)
            total.set(code.constant(F32, 1.0))
        return cls(largest, total)

    def add(self, code: Code, isa: Isa, state: Value) -> tuple[Value, Value]:
        """Add a page's state; return the factors for its values and for the previous values."""
        zero, one = code.constant(F32, 0.0), code.constant(F32, 1.0)
        least = code.constant(F32, MINUS_INFINITY)
        before, page = self.largest.get(), code.load(state + MAX_NUMBER, F32)
        largest = larger(code, before, page)
        base = code.where(largest > least, largest, zero)
        is_before = before >= page
        smaller = maths.exp2(code, isa, code.where(is_before, page, before) - base)
        factor = code.where(is_before, smaller, one)
        past_factor = code.where(is_before, one, smaller)
        self.largest.set(largest)
        self.total.set(code.fma(page_sum(code, state), factor, self.total.get() * past_factor))
        return factor, past_factor


def add_merges(module: ir.Module, isa: Isa) -> None:
    """Emit `merge_all`, `begin_row`, `add_page` and `end_row`."""
    _add_merge_all(module, isa)
    _add_begin_row(module)
    _add_add_page(module, isa)
    _add_end_row(module)


def _add_merge_all(module: ir.Module, isa: Isa) -> None:
    """Emit `merge_all(row, offset, apart, n_pages, head_dim, sinks, head, out)`.

    It merges a row's pages and writes the row's result. The first page has its values at `row` and
    its state at `row + offset`; the others follow at intervals of `apart` bytes.
    """
    code, (row, offset, apart, n_pages, dim, sinks, head, out) = internal(module, "merge_all", 8)
    state, softmax = row + offset, _Softmax.begun(code, sinks, head)
    begin = code.variable(code.number(0))
    with code.when(sinks.equals(0)):  # start from the first page
        softmax.largest.set(code.load(state + MAX_NUMBER, F32))
        softmax.total.set(page_sum(code, state))
        begin.set(code.number(1))
    start = begin.get()
    with code.loop(start, n_pages) as n:
        factor, past_factor = softmax.add(code, isa, state + n * apart)
        code.store(factor, state + n * apart + FACTOR)
        code.store(past_factor, state + n * apart + PAST_FACTOR)
    inverse = code.constant(F32, 1.0) / softmax.total.get()

    def finish(lanes: SimdLanes) -> None:
        zero = code.constant(FLOATS, 0.0)
        first = code.load(row + lanes.index * 4, FLOATS) + zero
        result = code.variable(code.where(start > 0, first, zero))
        with code.loop(start, n_pages) as n:
            values = code.load(row + n * apart + lanes.index * 4, FLOATS)
            result.set(_merged(code, values, result.get(), state + n * apart))
        lanes.store(result.get() * code.splat(inverse), out)

    for_each_vector(code, dim, finish)
    code.builder.ret_void()


def _merged(code: Code, values: Value, before: Value, state: Value) -> Value:
    factor, past_factor = (code.load(state + at, F32) for at in (FACTOR, PAST_FACTOR))
    return code.fma(values, code.splat(factor), before * code.splat(past_factor))


def _add_begin_row(module: ir.Module) -> None:
    """Emit `begin_row(state, sinks, head)`: initialises a row's state."""
    code, (state, sinks, head) = internal(module, "begin_row", 3)
    softmax = _Softmax.begun(code, sinks, head)
    code.store(softmax.largest.get(), state + MAX_NUMBER)
    code.store(softmax.total.get(), state + SUM)
    code.store(code.constant(F32, FRESH), state + FACTOR)
    code.builder.ret_void()


def _add_add_page(module: ir.Module, isa: Isa) -> None:
    """Emit `add_page(page, row, offset, n_units)`: merges a page's result into the row's.

    Both results are `n_units` vectors, with the state at `offset`.
    """
    code, (page, row, offset, n_units) = internal(module, "add_page", 4)
    state, page_state = row + offset, page + offset
    largest, total = (code.variable(code.load(state + at, F32)) for at in (MAX_NUMBER, SUM))
    fresh = code.load(state + FACTOR, F32).equals(FRESH)
    softmax = _Softmax(largest, total)
    factor, past_factor = softmax.add(code, isa, page_state)
    code.store(factor, page_state + FACTOR)
    code.store(past_factor, page_state + PAST_FACTOR)
    zero = code.constant(FLOATS, 0.0)
    with code.loop(code.number(0), n_units) as unit:
        before = code.where(fresh, zero, code.load(row + unit * 64, FLOATS))
        values = code.load(page + unit * 64, FLOATS)
        code.store(_merged(code, values, before, page_state), row + unit * 64)
    code.store(largest.get(), state + MAX_NUMBER)
    code.store(total.get(), state + SUM)
    code.store(code.constant(F32, 1.0), state + FACTOR)
    code.builder.ret_void()


def _add_end_row(module: ir.Module) -> None:
    """Emit `end_row(row, offset, head_dim, out)`: normalises and writes a row's merged result."""
    code, (row, offset, dim, out) = internal(module, "end_row", 4)
    inverse = code.splat(code.constant(F32, 1.0) / code.load(row + offset + SUM, F32))

    def finish(lanes: SimdLanes) -> None:
        lanes.store(code.load(row + lanes.index * 4, FLOATS) * inverse, out)

    for_each_vector(code, dim, finish)
    code.builder.ret_void()
