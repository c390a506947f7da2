"""All-reduce among threads: each shows its numbers, spins until all have arrived, and adds up all.

Every member has a seat, which holds the number of rounds in which it has arrived. A member writes
that number after what it shows in the round: the address and the number of its F32 values. Two
slots for these alternate. Nobody waits until the others have read: a member may write the next slot
while a slower one still reads this one, but to write this one again, it must have met all others in
the round in between.

Members spin because waking a thread takes longer than adding a few thousand numbers. They spin for
a bounded time: then a member counts itself as asleep, and whoever completes the round is told to
wake it. A sleeper counts itself first and then looks once more for the others; a member that
arrives writes its round first and then looks for sleepers. So one of the two sees the other.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.language.loops import for_each_vector
from engine.backends.cpu.kernels.language.values import I64, function, internal
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.call_log import CallLog, Finish
from engine.backends.cpu.kernels.running.fastcall import Kernel, bind
from engine.backends.cpu.kernels.running.thread_pool import (
    TICKS,
    YIELD,
    load,
    pause,
    store,
    tick_s,
    yield_address,
)

IS_BROKEN, N_ASLEEP, N_SEAT, HEAD_BYTES = 0, 8, 64, 128
"""Byte offsets in the shared head: abort flag, number of members asleep, number of seats. As in a
pool's memory, the address of the system's yield is at `YIELD`."""

ROUND, SHOWN, RESULT, SEAT_BYTES = 0, 8, 64, 128
"""Byte offsets in a seat: number of rounds; two slots of an address and a count; result of the last
call, in a cache line that the others do not read. That line also has `TICKS`, as a pool's memory:
a seat is the first argument of a bound kernel."""
assert RESULT < TICKS < SEAT_BYTES

COMPLETE, ADDED, OTHERS_SLEEP = 1, 2, 4
"""Bits of a call's result: all have arrived; `out` has the sum; members are to be woken."""

NO_NUMBERS = -1
"""Count that a member shows for a value that cannot be added here."""

YIELD_TURNS = 50
"""Turns of spinning after which the core is yielded. Fewer than a pool's: where there are fewer
cores than ranks, the rank that is waited for may need this core."""

ALL_REDUCE = ("head", "round", "address", "n", "out", "turns")
COUNT_ASLEEP = ("head", "round", "change")
"""Arguments of the kernels, after the seat. `round` is a number from 1, or 0 for the seat's next
one; `turns` is the number of turns that a thread spins before it gives up."""


def build(module: ir.Module) -> None:
    """Write `all_reduce` and `count_asleep`: see the methods of `ThreadAllReduce`."""
    _add_all_arrived(module)
    _add_wait(module)
    _add_sum(module)
    _build_all_reduce(module)
    code, (seat, head, number, change) = function(module, "count_asleep", 1 + len(COUNT_ASLEEP))
    place = code.builder.inttoptr((head + N_ASLEEP).raw, I64.as_pointer())
    code.builder.atomic_rmw("add", place, change.raw, "seq_cst")
    store(code, code.call("all_arrived", I64, head, number), seat + RESULT)
    code.builder.ret_void()


def _build_all_reduce(module: ir.Module) -> None:
    """Write `all_reduce(seat, *ALL_REDUCE)`: see `ThreadAllReduce.all_reduce`."""
    code, (seat, head, given, address, n, out, turns) = function(
        module, "all_reduce", 1 + len(ALL_REDUCE)
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


def _add_all_arrived(module: ir.Module) -> None:
    """Write `all_arrived(head, round)`: returns 1 if all have arrived in the round, else 0."""
    code, (head, number) = internal(module, "all_arrived", 2, I64)
    with (
        code.loop(code.number(0), load(code, head + N_SEAT)) as index,
        code.when(load(code, head + HEAD_BYTES + index * SEAT_BYTES + ROUND) < number),
    ):
        code.builder.ret(code.number(0).raw)
    code.builder.ret(code.number(1).raw)


def _add_wait(module: ir.Module) -> None:
    """Write `wait(head, round, turns)`: spins until all have arrived; returns 1, 0 if it gave up.

    It returns 0 after an abort even if all have arrived: members that left may have freed what they
    show.
    """
    code, (head, number, turns) = internal(module, "wait", 3, I64)
    waited = code.variable(code.number(0))
    with code.forever() as leave:
        leave(load(code, head + IS_BROKEN) > 0)
        here = code.call("all_arrived", I64, head, number)
        with code.when(here > 0):
            code.builder.ret(here.raw)
        leave(waited.get() >= turns)
        pause(code, head, waited, YIELD_TURNS)
    code.builder.ret(code.number(0).raw)


def _add_sum(module: ir.Module) -> None:
    """Write `add_up(shown, n_seat, n, out)`: returns 1 if all that show values show n, else 0.

    The sum is made in the order of the seats, so that all members get the same bits.
    """
    code, (shown, n_seat, n, out) = internal(module, "add_up", 4, I64)
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
            with code.if_else(n_added.get() < 1) as (is_first, is_other):
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
    """The compiled kernels, and the address of `all_reduce` for logs."""

    all_reduce: Kernel
    count_asleep: Kernel
    all_reduce_address: int


@cache
def _kernels() -> _Kernels:
    found = jit.addresses_by_source(
        "thread-all-reduce", chosen(), ["all_reduce", "count_asleep"], build
    )
    return _Kernels(
        bind(found["all_reduce"], 1 + len(ALL_REDUCE), holds_gil=False),
        bind(found["count_asleep"], 1 + len(COUNT_ASLEEP), holds_gil=True),
        found["all_reduce"],
    )


class ThreadAllReduce:
    """The shared memory of an all-reduce among threads, each of which has a seat of its own.

    Methods that return bits return `COMPLETE` and others, or 0 if they gave up or after an abort.
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
        self._all_reduce, self._count_asleep, self._all_reduce_address = _kernels()

    def round(self, seat: int) -> int:
        """Return the last round in which a seat has arrived, 0 for none."""
        return self._words[self._starts[seat] + ROUND // 8]

    def result(self, seat: int) -> int:
        """Return the bits of the last call for a seat."""
        return self._words[self._starts[seat] + RESULT // 8]

    def all_reduce(self, seat: int, number: int, x: int, n: int, out: int, turns: int) -> int:
        """Arrive in a round, spin until all have, and add up what they show; return bits.

        Args:
            seat: index of the member's seat.
            number: number of the round, from 1.
            x: address of n F32 numbers, which must not change before the next round is complete; 0
                for a member that shows nothing.
            n: number of values that the others show, 0 if it is not known, or `NO_NUMBERS`. Values
                are added only where all members that show any show n.
            out: address for the sum.
            turns: number of turns to spin before giving up.
        """
        self._all_reduce(self._seats[seat], self._head, number, x, n, out, turns)
        return self.result(seat)

    def called_s(self, seat: int) -> float | None:
        """Return the seconds that a seat's calls from Python have taken; None without a counter."""
        length = tick_s()
        return length and length * self._words[self._starts[seat] + TICKS // 8]

    def record(
        self, log: CallLog, seat: int, x: int, n: int, out: int, turns: int, end: Finish
    ) -> None:
        """Record an all-reduce, to be replayed in the seat's next round.

        Args:
            log: log to record in.
            seat, x, n, out, turns: see `all_reduce`.
            end: function that is called where a replay's bits are not just `COMPLETE | ADDED`.
        """
        arguments = self._seats[seat], self._head, 0, x, n, out, turns
        log.add_checked(self._all_reduce_address, arguments, end)

    def count_asleep(self, seat: int, number: int, change: int) -> int:
        """Change the number of members asleep, then look whether all have arrived; return bits."""
        self._count_asleep(self._seats[seat], self._head, number, change)
        return self.result(seat)

    def abort(self) -> None:
        """Abort: members that wait give up, now and in all later rounds."""
        self._words[IS_BROKEN // 8] = 1
