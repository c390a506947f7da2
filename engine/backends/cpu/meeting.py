"""Exchange of values between ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.backends.cpu.kernels.running.call_log import CallLog
from engine.backends.cpu.kernels.running.thread_all_reduce import (
    ADDED,
    NO_NUMBERS,
    OTHERS_SLEEP,
    ThreadAllReduce,
)
from engine.backends.cpu.kernels.small.small_ops import is_plain
from engine.model.forward.recording import refuse_replay

SPIN_TURNS = 30_000
"""Number of times a waiting rank polls the others before it sleeps; takes about a millisecond."""

MOST_ADDED = 1 << 17
"""Largest number of elements that each rank sums with one native thread; torch uses several."""


class Slice(NamedTuple):
    """A rank's part of a gathered tensor.

    Attributes:
        value: the part; None on a rank that has none.
        alike: tensor that has the same bits on all ranks of one kind, for comparison; None on a
            rank that is not compared.
    """

    value: Tensor | None
    alike: Tensor | None


Shown = Tensor | Slice | None
"""A rank's value for an exchange; None if it has none."""


class CollectiveCounter:
    """Counter of the collectives of all ranks, without a lock: a lost increment does no harm."""

    def __init__(self) -> None:
        self.count = 0


class Meeting:
    """Exchange of values among the members of one group; members that wait sleep.

    A member's seat is its index in the group. Two sets of slots alternate: while a slow member
    still reads one set, a fast one can write only the other, because every round needs all members.

    Members wait without a limit; the watchdog (`engine.parallel.watch`) aborts the exchange.

    Args:
        size: number of members.
        counter: counter of collectives; replayed exchanges are counted here.

    Attributes:
        slots: the two sets of values, by seat.
    """

    def __init__(self, size: int, counter: CollectiveCounter) -> None:
        self.slots: tuple[list[Shown], list[Shown]] = ([None] * size, [None] * size)
        self._counter = counter
        self._rounds = [0] * size
        self._condition = threading.Condition()
        self._n_waiting = 0
        self._n_complete = 0
        self._slept_s = [0.0] * size
        self._is_broken = False

    def exchange(
        self, seat: int, x: Shown, out: Tensor | None = None
    ) -> tuple[Sequence[Shown], bool]:
        """Exchange `x` for the values of all members.

        Args:
            seat: seat of the calling member.
            out: memory for the sum from `place_for`; None if no sum is wanted.

        Returns:
            The values of all members by seat, and whether `out` holds their sum.

        Raises:
            threading.BrokenBarrierError: the exchange was aborted.
        """
        number, slots = self._enter(seat, x)
        with self._sleeping(seat):
            self._n_waiting += 1
            if self._n_waiting == len(self._rounds) and not self._is_broken:
                self._n_waiting = 0
                self._n_complete = number
                self._condition.notify_all()
            self._sleep_until(lambda: self._n_complete >= number)
        return slots, False

    def place_for(self, x: Tensor | None) -> Tensor | None:
        """Return memory for the sum if `exchange` can add up values like x, else None."""
        return None

    def note(self, log: CallLog, seat: int, x: Tensor | None, out: Tensor) -> None:
        """Record an all-reduce of x into `out`; replays read and write the same memory."""
        refuse_replay("ranks exchange values in Python")

    def waited_s(self, seat: int) -> float:
        """Return the seconds that a member has waited here, without replayed exchanges."""
        return self._slept_s[seat]

    def abort(self) -> None:
        """Wake all waiting members with an error; no later exchange succeeds."""
        with self._condition:
            self._break()

    def clear(self) -> None:
        """Drop the exchanged values."""
        for slots in self.slots:
            slots[:] = [None] * len(slots)

    def missing(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the seats of the members that wait now, and of those they wait for."""
        rounds = [self._round(seat) for seat in range(len(self._rounds))]
        last = max(rounds)
        absent = [seat for seat, number in enumerate(rounds) if number < last]
        return [seat for seat in range(len(rounds)) if absent and seat not in absent], absent

    def _enter(self, seat: int, x: Shown) -> tuple[int, list[Shown]]:
        """Put a member's value into the slots of its next round; return the round and the slots."""
        number = self._next_round(seat)
        slots = self.slots[number & 1]
        slots[seat] = x
        return number, slots

    def _next_round(self, seat: int) -> int:
        """Return the number of the round that a member enters now."""
        self._rounds[seat] += 1
        return self._rounds[seat]

    def _round(self, seat: int) -> int:
        """Return the number of rounds that a member has entered."""
        return self._rounds[seat]

    @contextmanager
    def _sleeping(self, seat: int) -> Iterator[None]:
        """Hold the condition's lock and count the time as waiting."""
        begun = time.perf_counter()
        try:
            with self._condition:
                yield
        finally:
            self._slept_s[seat] += time.perf_counter() - begun

    def _sleep_until(self, is_complete: Callable[[], bool]) -> None:
        """Wait until a round is complete; the caller holds the condition's lock.

        Raises:
            threading.BrokenBarrierError: the exchange was aborted.
        """
        while not (complete := is_complete()) and not self._is_broken:
            self._condition.wait()
        if not complete and not is_complete():
            raise threading.BrokenBarrierError

    def _break(self) -> None:
        self._is_broken = True
        self._condition.notify_all()


class SpinningMeeting(Meeting):
    """Exchange among ranks on the CPU: members spin before they sleep, and sum natively."""

    def __init__(self, size: int, counter: CollectiveCounter) -> None:
        super().__init__(size, counter)
        self._board = ThreadAllReduce(size)

    def exchange(
        self, seat: int, x: Shown, out: Tensor | None = None
    ) -> tuple[Sequence[Shown], bool]:
        number, slots = self._enter(seat, x)
        if x is None:
            shown = 0, 0, 0
        elif out is None or isinstance(x, Slice):
            shown = 0, NO_NUMBERS, 0
        else:
            shown = x.data_ptr(), x.numel(), out.data_ptr()
        self._board.all_reduce(seat, number, *shown, SPIN_TURNS)
        return slots, bool(self._finish(seat, shown) & ADDED)

    def note(self, log: CallLog, seat: int, x: Tensor | None, out: Tensor) -> None:
        shown = 0 if x is None else x.data_ptr(), out.numel(), out.data_ptr()
        log.kept.append(out)
        self._board.record(log, seat, *shown, SPIN_TURNS, partial(self._finish_again, seat, shown))

    def _next_round(self, seat: int) -> int:
        return self._round(seat) + 1  # its count includes replayed exchanges

    def _round(self, seat: int) -> int:
        return self._board.round(seat)

    def _finish(self, seat: int, shown: tuple[int, int, int]) -> int:
        """Wait until a member's round is complete, wake sleeping members, return the result word.

        Args:
            shown: address of the value, its number of elements, address of the sum; 0 for none.

        Raises:
            threading.BrokenBarrierError: the exchange was aborted.
        """
        board = self._board
        found = board.result(seat)
        if not found:
            number = board.round(seat)
            self._sleep(seat, number)
            found = board.all_reduce(seat, number, *shown, 0)
        if not found:
            raise threading.BrokenBarrierError
        if found & OTHERS_SLEEP:
            with self._condition:
                self._condition.notify_all()
        return found

    def _finish_again(self, seat: int, shown: tuple[int, int, int]) -> None:
        """Finish a replayed all-reduce, whose sum must be there in the end.

        Raises:
            threading.BrokenBarrierError: the exchange was aborted, or nothing was added up.
        """
        self._counter.count += 1
        if not self._finish(seat, shown) & ADDED:
            raise threading.BrokenBarrierError

    def waited_s(self, seat: int) -> float:
        return self._slept_s[seat] + (self._board.called_s(seat) or 0.0)

    def place_for(self, x: Tensor | None) -> Tensor | None:
        if x is None or x.numel() > MOST_ADDED or not is_plain(x):
            return None
        return torch.empty_like(x)

    def _sleep(self, seat: int, number: int) -> None:
        """Sleep until a round is complete, counted among the sleeping members meanwhile."""
        board = self._board
        with self._sleeping(seat):
            board.count_asleep(seat, number, 1)
            try:
                self._sleep_until(lambda: board.count_asleep(seat, number, 0) != 0)
            finally:
                board.count_asleep(seat, number, -1)

    def _break(self) -> None:
        self._board.abort()
        super()._break()
