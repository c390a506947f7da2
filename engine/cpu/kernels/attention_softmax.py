"""Softmax of attention over blocks of positions: scores become weights, relative to the largest.

Scores count in powers of two, as processors compute these with fewer instructions than those of e:
they are multiplied by log2(e) with their scale.
"""

from __future__ import annotations

import operator
from functools import partial, reduce

from llvmlite import ir

from engine.cpu.kernels import maths
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
    function,
    vector,
)
from engine.forward.state import ATTENTION_BLOCK as BLOCK

LARGEST, SUM, FACTOR, SUMS = 0, 4, 8, 32
"""Byte offsets in a head's state: the largest score so far, the sum of the weights relative to it,
the factor by which the values so far are to be rescaled, and, in a page's state, `N_SUMS` parts of
the sum in place of the whole."""

N_SUMS = 8
"""Number of parts of the sum of a page's weights, each of which has every eighth one."""

STATE_BYTES = 64
"""Size of a head's state, in bytes."""

FRESH = -1.0
"""Sum and factor in a head's state where nothing has been added up yet: what lies in the memory of
its values means nothing."""

MINUS_INFINITY = float("-inf")


def add_softmax(module: ir.Module, isa: Isa) -> None:
    """Write `cap` and `online_softmax`: see the functions."""
    _add_cap(module)
    _add_online_softmax(module, isa)


def _add_cap(module: ir.Module) -> None:
    """Write `cap(x, scale, softcap)`: scales the scores x of a block and caps them."""
    code, (x, *factors) = function(module, "cap", 3)
    code.builder.function.linkage = "internal"
    scale, softcap = (code.splat(factor.to(I32).bitcast(F32)) for factor in factors)
    with code.loop(code.number(0), code.number(BLOCK), LANES) as index:
        score = code.load(x + index * 4, FLOATS) * scale
        code.store(softcap * maths.tanh(code, score / softcap), x + index * 4)
    code.builder.ret_void()


def _add_online_softmax(module: ir.Module, isa: Isa) -> None:
    """Write `online_softmax(x, start, stop, distance, scale, softcap, slope, state)`.

    Replaces the scores x of one head (q·k) in a block by weights and updates the head's state; all
    positions but start … stop - 1 get no weight. `distance` is the block's first position minus
    that of the query. scale, softcap and slope are the bits of F32.
    """
    code, (x, start, stop, *factors, state) = function(module, "online_softmax", 8)
    code.builder.function.linkage = "internal"
    code.builder.function.attributes.add("alwaysinline")
    scores = _scores(code, x, start, stop, *factors)
    least = code.constant(F32, MINUS_INFINITY)
    before = code.load(state + LARGEST, F32)
    largest = larger(code, _largest(code, reduce(partial(larger, code), scores)), before)
    base = code.splat(code.where(largest > least, largest, code.constant(F32, 0.0)))
    weights = [maths.exp2(code, isa, score - base) for score in scores]
    for n, weight in enumerate(weights):
        code.store(weight, x + n * (4 * LANES))
    factor = maths.exp2(code, isa, code.splat(before) - base)
    total = reduce(operator.add, weights)
    low, high = (range(n, n + N_SUMS) for n in (0, N_SUMS))
    past = code.load(state + SUMS, vector(F32, N_SUMS))
    total = code.fma(past, factor.shuffle(low), total.shuffle(low) + total.shuffle(high))
    code.store(largest, state + LARGEST)
    code.store(total, state + SUMS)
    fresh = code.load(state + SUM, F32) < 0.0
    code.store(code.constant(F32, 0.0), state + SUM)
    code.store(code.where(fresh, code.constant(F32, FRESH), factor[0]), state + FACTOR)
    code.builder.ret_void()


def _scores(
    code: Code, x: Value, start: Value, stop: Value, distance: Value, scale: Value, softcap: Value,
    slope: Value,
) -> list[Value]:  # fmt: skip
    """Return the scores of a block, scaled, and -inf at all positions but start … stop - 1."""
    slope = slope.to(I32).bitcast(F32) * maths.LOG2_E
    factor = code.variable(scale.to(I32).bitcast(F32) * maths.LOG2_E)
    with code.when(softcap.differs(0)):
        code.call("cap", VOID, x, scale, softcap)
        factor.set(code.constant(F32, maths.LOG2_E))
    spread = code.splat(factor.get())
    places = range(0, BLOCK, LANES)
    scores = [code.variable(code.load(x + 4 * n, FLOATS) * spread) for n in places]
    with code.when(start.differs(0) | stop.differs(BLOCK) | slope.differs(0.0)):
        begin, end = code.splat(start.to(I32)), code.splat(stop.to(I32))
        before, lowest = code.splat(distance.to(F32)), code.constant(FLOATS, MINUS_INFINITY)
        for n, score in zip(places, scores, strict=True):
            numbers = range(n, n + LANES)
            lanes = code.vector_of(INTS, numbers)
            place = before + code.vector_of(FLOATS, numbers)
            sloped = code.fma(place, code.splat(slope), score.get())
            score.set(code.where((lanes >= begin) & (lanes < end), sloped, lowest))
    return [score.get() for score in scores]


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
    """Write into the state of a head and page that nothing has been added up yet."""
    code.store(code.constant(F32, MINUS_INFINITY), state + LARGEST)
    code.store(code.constant(F32, FRESH), state + SUM)
    code.store(code.constant(vector(F32, N_SUMS), 0.0), state + SUMS)


def page_sum(code: Code, state: Value) -> Value:
    """Return the sum of the weights of a page by its state."""
    return code.reduce("add", code.load(state + SUMS, vector(F32, N_SUMS)))
