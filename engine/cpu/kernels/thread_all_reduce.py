"""Threads that meet: each shows the others some numbers, waits awake for theirs and adds all up.

Every member has a seat, which says in how many rounds it has arrived. That is written after what it
shows in the round: an address, and how many F32 numbers lie there. Two places for these alternate.
A member can only be writing the next one while a slower one still reads this one, because the place
after that needs all of them in the round in between; so nobody waits until the others have read.

Waking a thread takes longer than adding a few thousand numbers, hence the waiting awake. It is
bounded: a member that has waited long enough counts as asleep, and whoever completes the round is
told to wake it. It first counts and then looks once more, and who arrives does so first and then
looks whether someone sleeps; so one of the two sees the other.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from engine.cpu.kernels import jit
from engine.cpu.kernels.call_log import CallLog, Finish
from engine.cpu.kernels.fastcall import Kernel, bind
from engine.cpu.kernels.isa import chosen
from engine.cpu.kernels.team import TICKS, YIELD, load, pause, store, yield_address
from engine.cpu.kernels.timestamp_counter import tick_s
from engine.cpu.kernels.values import I64, function
from engine.cpu.kernels.vector_loop import for_each_vector

IS_BROKEN, N_ASLEEP, N_SEAT, HEAD_BYTES = 0, 8, 64, 128
"""Of what all share, which also has `YIELD` like a team: offsets in bytes."""

ROUND, SHOWN, RESULT, SEAT_BYTES = 0, 8, 64, 128
"""Of a seat, offsets in bytes: rounds; twice an address and a count; what a call has come to, in a
cache line that the others do not look at. That line also has a team's `TICKS`: see `bind`."""
assert RESULT < TICKS < SEAT_BYTES

COMPLETE, ADDED, OTHERS_SLEEP = 1, 2, 4
"""What a call has come to, as bits: all are here; `out` has the sum; someone is to be woken."""

NO_NUMBERS = -1
"""Shown as a count for what cannot be added here."""

YIELD_TURNS = 50
"""As `cpu.kernels.team`'s, but often: where there are fewer cores than ranks, the one that is
waited for may need this core."""

ALL_REDUCE = ("head", "round", "address", "n", "out", "turns")
COUNT_ASLEEP = ("head", "round", "change")
"""Arguments behind the seat. `round` is a number from 1, or 0 for the seat's next; `turns` is how
often a waiting thread looks before it gives up."""


def build(module: ir.Module) -> None:
    """`meet` and `count_asleep`: see the methods of `ThreadAllReduce`."""
    _add_are_here(module)
    _add_wait(module)
    _add_sum(module)
    _build_meet(module)
    code, (seat, head, number, change) = function(module, "count_asleep", 1 + len(COUNT_ASLEEP))
    place = code.builder.inttoptr((head + N_ASLEEP).raw, I64.as_pointer())
    code.builder.atomic_rmw("add", place, change.raw, "seq_cst")
    store(code, code.call("are_here", I64, head, number), seat + RESULT)
    code.builder.ret_void()


def _build_meet(module: ir.Module) -> None:
    code, (seat, head, given, address, n, out, turns) = function(
        module, "meet", 1 + len(ALL_REDUCE)
    )
    number = code.where(given.equals(0), load(code, seat + ROUND) + 1, given)
    shown = (number & 1) * 16 + SHOWN
    store(code, address, seat + shown)
    store(code, code.where((n > 0) & address.equals(0), code.number(0), n), seat + shown + 8)
    store(code, number, seat + ROUND)
    result = code.variable(code.call("wait", I64, head, number, turns))
    with code.when(result.get() > 0):
        asleep = (load(code, head + N_ASLEEP) > 0).to(I64, signed=False)
        n_seat, first = load(code, head + N_SEAT), head + HEAD_BYTES + shown
        added = code.call("add_up", I64, first, n_seat, n, out)
        result.set(added * ADDED + asleep * OTHERS_SLEEP + COMPLETE)
    store(code, result.get(), seat + RESULT)
    code.builder.ret_void()


def _add_are_here(module: ir.Module) -> None:
    """`are_here(head, round)`: 1 if all members have arrived in it, else 0."""
    code, (head, number) = function(module, "are_here", 2, I64)
    code.builder.function.linkage = "internal"
    with (
        code.loop(code.number(0), load(code, head + N_SEAT)) as index,
        code.when(load(code, head + HEAD_BYTES + index * SEAT_BYTES + ROUND) < number),
    ):
        code.builder.ret(code.number(0).raw)
    code.builder.ret(code.number(1).raw)


def _add_wait(module: ir.Module) -> None:
    """`wait(head, round, turns)`: the same, awake; 0 as well if it is broken off.

    Even if all have arrived then: those who left may have freed what they show.
    """
    code, (head, number, turns) = function(module, "wait", 3, I64)
    code.builder.function.linkage = "internal"
    waited = code.variable(code.number(0))
    with code.forever() as leave:
        leave(load(code, head + IS_BROKEN) > 0)
        here = code.call("are_here", I64, head, number)
        with code.when(here > 0):
            code.builder.ret(here.raw)
        leave(waited.get() >= turns)
        pause(code, head, waited, YIELD_TURNS)
    code.builder.ret(code.number(0).raw)


def _add_sum(module: ir.Module) -> None:
    """`add_up(shown, n_seat, n, out)`: 1 if all who show something show n numbers, else 0.

    The sum runs in the order of the seats, so that all get the same bits.
    """
    code, (shown, n_seat, n, out) = function(module, "add_up", 4, I64)
    code.builder.function.linkage = "internal"
    with code.when(n < 1):
        code.builder.ret(code.number(0).raw)
    with code.loop(code.number(0), n_seat) as index:
        count = load(code, shown + index * SEAT_BYTES + 8)
        with code.when(count.differs(n) & count.differs(0)):
            code.builder.ret(code.number(0).raw)
    n_added, so_far = code.variable(code.number(0)), code.variable(out)
    with code.loop(code.number(0), n_seat) as index:
        x = load(code, shown + index * SEAT_BYTES)
        with code.when(load(code, shown + index * SEAT_BYTES + 8) > 0):
            with code.either(n_added.get() < 1) as (is_first, is_other):
                with is_first:
                    so_far.set(x)
                with is_other:
                    left = so_far.get()
                    for_each_vector(code, n, lambda at: at.store(at.load(left) + at.load(x), out))
                    so_far.set(out)
            n_added.set(n_added.get() + 1)
    with code.when(n_added.get().equals(1)):
        for_each_vector(code, n, lambda at: at.store(at.load(so_far.get()), out))
    code.builder.ret(code.number(1).raw)


class _Kernels(NamedTuple):
    meet: Kernel
    count_asleep: Kernel
    meet_address: int


@cache
def _kernels() -> _Kernels:
    """Waiting lets go of Python's lock."""
    found = jit.addresses_by_source("meeting", chosen(), ["meet", "count_asleep"], build)
    return _Kernels(
        bind(found["meet"], 1 + len(ALL_REDUCE), holds_gil=False),
        bind(found["count_asleep"], 1 + len(COUNT_ASLEEP), holds_gil=True),
        found["meet"],
    )


class ThreadAllReduce:
    """The memory by which threads meet; each of them uses a seat of its own.

    Methods that return bits return `COMPLETE` and more, or 0 if they gave up or it is broken off.
    """

    def __init__(self, n_seats: int) -> None:
        self._memory = np.zeros((HEAD_BYTES + n_seats * SEAT_BYTES + 64) // 8, np.int64)
        self._head = -(-self._memory.ctypes.data // 64) * 64
        first = (self._head - self._memory.ctypes.data) // 8
        self._words = self._memory[first:].data
        self._words[N_SEAT // 8] = n_seats
        self._words[YIELD // 8] = yield_address()
        self._seats = [self._head + HEAD_BYTES + n * SEAT_BYTES for n in range(n_seats)]
        self._starts = [(HEAD_BYTES + n * SEAT_BYTES) // 8 for n in range(n_seats)]
        self._meet, self._count_asleep, self._meet_address = _kernels()

    def round(self, seat: int) -> int:
        """The one in which a seat has arrived last; 0 for none."""
        return self._words[self._starts[seat] + ROUND // 8]

    def result(self, seat: int) -> int:
        """What the last call for a seat has come to."""
        return self._words[self._starts[seat] + RESULT // 8]

    def meet(self, seat: int, number: int, x: int, n: int, out: int, turns: int) -> int:
        """Arrive in a round, wait for all and add up what they show.

        Args:
            number: of the round, from 1.
            x: address of n F32 numbers, which stay as they are until the next round is complete;
                0 for a seat that shows nothing.
            n: as many as the others show, 0 if that is not known, or `NO_NUMBERS`. Nothing is
                added here unless all who show something show n.
            out: address for the sum.
        """
        self._meet(self._seats[seat], self._head, number, x, n, out, turns)
        return self.result(seat)

    def called_s(self, seat: int) -> float | None:
        """Seconds that calls for a seat have taken, but for repeated ones; None without a clock."""
        length = tick_s()
        return length and length * self._words[self._starts[seat] + TICKS // 8]

    def note(
        self, log: CallLog, seat: int, x: int, n: int, out: int, turns: int, end: Finish
    ) -> None:
        """Note a meeting to be repeated, in the round that is then the next.

        Args:
            end: called where a repetition has not come to just `COMPLETE | ADDED`.
        """
        arguments = self._seats[seat], self._head, 0, x, n, out, turns
        log.add_checked(self._meet_address, arguments, end)

    def count_asleep(self, seat: int, number: int, change: int) -> int:
        """Note how many more sleep now, and then look whether all have arrived in a round."""
        self._count_asleep(self._seats[seat], self._head, number, change)
        return self.result(seat)

    def break_off(self) -> None:
        """Let those who wait give up, for good."""
        self._words[IS_BROKEN // 8] = 1
