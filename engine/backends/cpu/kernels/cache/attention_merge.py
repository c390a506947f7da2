"""Merging of attention's results over the pages of a row, in order, into the row's result.

The result so far, and that of each page, has values, the largest score, and a sum of weights
relative to it. What is added next is always a page, so the bits depend only on the row.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from engine.backends.cpu.kernels.cache.attention_softmax import (
    FACTOR,
    FRESH,
    MAX_NUMBER,
    MINUS_INFINITY,
    SUM,
    larger,
    page_sum,
)
from engine.backends.cpu.kernels.language import maths
from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import SimdLanes, for_each_vector
from engine.backends.cpu.kernels.language.values import F32, FLOATS, Code, Value, Variable, function

PAST_FACTOR = 12
"""Byte offset in a page's state: the factor on the result of the pages before."""


class _Softmax(NamedTuple):
    """The largest score and the sum of the weights so far, of one row."""

    largest: Variable
    total: Variable

    @classmethod
    def begun(cls, code: Code, sinks: Value, head: Value) -> _Softmax:
        """Return the state before the first page: a sink is a score of weight 1, if any."""
        largest = code.variable(code.constant(F32, MINUS_INFINITY))
        total = code.variable(code.constant(F32, 0.0))
        with code.when(sinks.differs(0)):
            largest.set(code.load(sinks + head * 4, F32) * maths.LOG2_E)
            total.set(code.constant(F32, 1.0))
        return cls(largest, total)

    def add(self, code: Code, isa: Isa, state: Value) -> tuple[Value, Value]:
        """Add a page by its state; return the factors on its values and on those before."""
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
    """Write `merge_all`, `begin_row`, `add_page` and `end_row`: see the functions."""
    _add_merge_all(module, isa)
    _add_begin_row(module)
    _add_add_page(module, isa)
    _add_end_row(module)


def _add_merge_all(module: ir.Module, isa: Isa) -> None:
    """Write `merge_all(row, offset, apart, n_pages, head_dim, sinks, head, out)`.

    Merges the pages of a row and writes its result. The first has its values at `row` and its state
    `offset` bytes on; the next ones follow `apart` bytes on.
    """
    code, (row, offset, apart, n_pages, dim, sinks, head, out) = function(module, "merge_all", 8)
    code.builder.function.linkage = "internal"
    state, softmax = row + offset, _Softmax.begun(code, sinks, head)
    begin = code.variable(code.number(0))
    with code.when(sinks.equals(0)):  # then the first page is taken as it is
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
    """Add the values of a page to those before, by the factors in the page's state."""
    factor, past_factor = (code.load(state + at, F32) for at in (FACTOR, PAST_FACTOR))
    return code.fma(values, code.splat(factor), before * code.splat(past_factor))


def _add_begin_row(module: ir.Module) -> None:
    """Write `begin_row(state, sinks, head)`: writes the state of a row without any page."""
    code, (state, sinks, head) = function(module, "begin_row", 3)
    code.builder.function.linkage = "internal"
    softmax = _Softmax.begun(code, sinks, head)
    code.store(softmax.largest.get(), state + MAX_NUMBER)
    code.store(softmax.total.get(), state + SUM)
    code.store(code.constant(F32, FRESH), state + FACTOR)
    code.builder.ret_void()


def _add_add_page(module: ir.Module, isa: Isa) -> None:
    """Write `add_page(page, row, offset, n_units)`: merges a page's result into the row's.

    Both are `n_units` vectors with the state `offset` bytes on.
    """
    code, (page, row, offset, n_units) = function(module, "add_page", 4)
    code.builder.function.linkage = "internal"
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
    """Write `end_row(row, offset, head_dim, out)`: writes a row's result, all pages merged."""
    code, (row, offset, dim, out) = function(module, "end_row", 4)
    code.builder.function.linkage = "internal"
    inverse = code.splat(code.constant(F32, 1.0) / code.load(row + offset + SUM, F32))

    def finish(lanes: SimdLanes) -> None:
        lanes.store(code.load(row + lanes.index * 4, FLOATS) * inverse, out)

    for_each_vector(code, dim, finish)
    code.builder.ret_void()
