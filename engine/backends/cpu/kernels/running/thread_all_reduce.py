"""All-reduce among threads: each publishes its numbers, spins until all have, and adds them up.

Every member has a seat with the number of its last round. A member writes that number after the
round's slot: the address and the count of its F32 values. Two slots alternate, which makes a second
barrier unnecessary: a fast member can write the next slot while a slow one is still reading this
one, and it can only write this one again after meeting all others in the round in between.

Members spin because waking a thread takes longer than adding a few thousand numbers. After a
bounded time, a spinning member counts itself as asleep, and the member that completes the round
wakes it. A sleeper first counts itself, then checks the others again; an arriving member first
writes its round, then checks for sleepers. So at least one of the two sees the other.
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
"""Byte offsets in the shared header: abort flag, number of sleeping members, number of seats. The
address of the system's yield function is at `YIELD`, as in a pool's memory."""

ROUND, SHOWN, RESULT, SEAT_BYTES = 0, 8, 64, 128
"""Byte offsets in a seat: number of rounds; two slots with an address and a count each; result of
the last call, in a cache line that the others do not read. Like a pool's memory, that line also has
`TICKS`, as a seat is a bound kernel's first argument."""
assert RESULT < TICKS < SEAT_BYTES

COMPLETE, ADDED, OTHERS_SLEEP = 1, 2, 4
"""Bits in a call's result: all have arrived; `out` has the sum; members need waking."""

NO_NUMBERS = -1
"""Count to give for a value that this all-reduce cannot add."""

YIELD_TURNS = 50
"""Number of spins before yielding the core; fewer than in a pool, because the missing rank may need
this core if there are fewer cores than ranks."""

ALL_REDUCE = ("head", "round", "address", "n", "out", "turns")
COUNT_ASLEEP = ("head", "round", "change")
"""The kernels' arguments, after the seat. `round` counts from 1; 0 means the seat's next round.
`turns` is the number of spins before giving up."""


def build(module: ir.Module) -> None:
    """Emit `all_reduce` and `count_asleep`; see the methods of `ThreadAllReduce`."""
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
    """Emit `all_reduce(seat, *ALL_REDUCE)`; see `ThreadAllReduce.all_reduce`."""
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
    """Emit `all_arrived(head, round)`: returns 1 if all have arrived in the round, else 0."""
    code, (head, number) = internal(module, "all_arrived", 2, I64)
    with (
        code.loop(code.number(0), load(code, head + N_SEAT)) as index,
        code.when(load(code, head + HEAD_BYTES + index * SEAT_BYTES + ROUND) < number),
    ):
        code.builder.ret(code.number(0).raw)
    code.builder.ret(code.number(1).raw)


def _add_wait(module: ir.Module) -> None:
    """Emit `wait(head, round, turns)`: spins until all have arrived; returns 1, or 0 on giving up.

    It returns 0 after an abort even if all have arrived, as members may have freed their values.
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
    """Emit `add_up(shown, n_seat, n, out)`: returns 1 if all members with values have n, else 0.

    It adds in seat order, so that all members get the same bits.
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
    """The compiled kernels, and the address of `all_reduce`, for logs."""

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
    """Shared memory for an all-reduce among threads, with one seat per thread.

    Methods that return bits return `COMPLETE` and possibly others; 0 after giving up or an abort.
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
        """Return the last round in which a seat has arrived; 0 if none."""
        return self._words[self._starts[seat] + ROUND // 8]

    def result(self, seat: int) -> int:
        """Return the bits that a seat's last call returned."""
        return self._words[self._starts[seat] + RESULT // 8]

    def all_reduce(self, seat: int, number: int, x: int, n: int, out: int, turns: int) -> int:
        """Arrive in a round, spin until all have, and add up their values; return bits.

        Args:
            seat: index of the member's seat.
            number: number of the round, from 1.
            x: address of n F32 numbers, which must not change before the next round is complete; 0
                for a member without values.
            n: number of values; 0 if unknown, or `NO_NUMBERS`. Values are added only if all
                members with values have n.
            out: address of the sum.
            turns: number of spins before giving up.
        """
        self._all_reduce(self._seats[seat], self._head, number, x, n, out, turns)
        return self.result(seat)

    def called_s(self, seat: int) -> float | None:
        """Return the total seconds of a seat's calls from Python; None if there is no counter."""
        length = tick_s()
        return length and length * self._words[self._starts[seat] + TICKS // 8]

    def record(
        self, log: CallLog, seat: int, x: int, n: int, out: int, turns: int, end: Finish
    ) -> None:
        """Record an all-reduce, to be replayed in the seat's next round.

        Args:
            log: log in which to record.
            seat, x, n, out, turns: see `all_reduce`.
            end: function to call if a replay's bits are not `COMPLETE | ADDED`.
        """
        arguments = self._seats[seat], self._head, 0, x, n, out, turns
        log.add_checked(self._all_reduce_address, arguments, end)

    def count_asleep(self, seat: int, number: int, change: int) -> int:
        """Change the count of sleepers, then check whether all have arrived; return bits."""
        self._count_asleep(self._seats[seat], self._head, number, change)
        return self.result(seat)

    def abort(self) -> None:
        """Make waiting members give up, now and in all later rounds."""
        self._words[IS_BROKEN // 8] = 1
