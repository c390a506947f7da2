"""Where ranks that are threads exchange values."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cpu.kernels.call_log import CallLog
from engine.cpu.kernels.small_ops import is_plain
from engine.cpu.kernels.thread_all_reduce import ADDED, NO_NUMBERS, OTHERS_SLEEP, ThreadAllReduce
from engine.forward.recording import refuse_replay

AWAKE_TURNS = 30_000
"""How often a waiting rank looks for the others before it sleeps; about a millisecond."""

MOST_ADDED = 1 << 17
"""Numbers of a value that each rank adds up by one thread; torch has several."""


class Slice(NamedTuple):
    """What a rank shows to be joined.

    Attributes:
        value: None on a rank that has nothing.
        alike: what has the same bits on all ranks that compute alike; None where this one does not.
    """

    value: Tensor | None
    alike: Tensor | None


Shown = Tensor | Slice | None


class CollectiveCounter:
    """Counts collectives of all ranks; a lost increment does no harm."""

    def __init__(self) -> None:
        self.count = 0


class Meeting:
    """Where the members of one group exchange values; who waits for the others sleeps.

    Two sets of slots alternate: a member can only be writing the next set while a slower one still
    reads this one, because the set after that needs all of them in the round in between.

    Members wait as long as it takes; who watches them (`engine.parallel.watch`) aborts it.
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
        """Show `x` to the others.

        Args:
            out: see `place_for`.

        Returns:
            The values of all members, and whether `out` has their sum.

        Raises:
            threading.BrokenBarrierError: it was aborted.
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
        """Memory for the sum, if values like x may be added up in the exchange itself."""
        return None

    def note(self, log: CallLog, seat: int, x: Tensor | None, out: Tensor) -> None:
        """Note an exchange that made `out` the sum, to be repeated with what then lies there."""
        refuse_replay("ranks exchange values in Python")

    def waited_s(self, seat: int) -> float:
        """Seconds that a member has waited here, but for repeated calls."""
        return self._slept_s[seat]

    def abort(self) -> None:
        """Wake all who wait, with an error; for good."""
        with self._condition:
            self._break()

    def clear(self) -> None:
        """Let go of what was exchanged."""
        for slots in self.slots:
            slots[:] = [None] * len(slots)

    def missing(self) -> tuple[Sequence[int], Sequence[int]]:
        """The seats of those who wait here now, and of those they wait for."""
        rounds = [self._round(seat) for seat in range(len(self._rounds))]
        last = max(rounds)
        absent = [seat for seat, number in enumerate(rounds) if number < last]
        return [seat for seat in range(len(rounds)) if absent and seat not in absent], absent

    def _enter(self, seat: int, x: Shown) -> tuple[int, list[Shown]]:
        """The number of a member's next round, and its slots."""
        number = self._next_round(seat)
        slots = self.slots[number & 1]
        slots[seat] = x
        return number, slots

    def _next_round(self, seat: int) -> int:
        self._rounds[seat] += 1
        return self._rounds[seat]

    def _round(self, seat: int) -> int:
        """In how many rounds a member has arrived."""
        return self._rounds[seat]

    @contextmanager
    def _sleeping(self, seat: int) -> Iterator[None]:
        """Hold the condition, and count the time as waiting."""
        begun = time.perf_counter()
        try:
            with self._condition:
                yield
        finally:
            self._slept_s[seat] += time.perf_counter() - begun

    def _sleep_until(self, is_complete: Callable[[], bool]) -> None:
        """Wait, with the condition held, until a round is complete."""
        while not (complete := is_complete()) and not self._is_broken:
            self._condition.wait()
        if not complete and not is_complete():
            raise threading.BrokenBarrierError

    def _break(self) -> None:
        self._is_broken = True
        self._condition.notify_all()


class AwakeMeeting(Meeting):
    """The same for ranks that compute on the CPU: they wait awake at first, and add up natively."""

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
        self._board.all_reduce(seat, number, *shown, AWAKE_TURNS)
        return slots, bool(self._finish(seat, shown) & ADDED)

    def note(self, log: CallLog, seat: int, x: Tensor | None, out: Tensor) -> None:
        shown = 0 if x is None else x.data_ptr(), out.numel(), out.data_ptr()
        log.kept.append(out)
        self._board.record(log, seat, *shown, AWAKE_TURNS, partial(self._finish_again, seat, shown))

    def _next_round(self, seat: int) -> int:
        return self._round(seat) + 1  # where repeated calls count as well

    def _round(self, seat: int) -> int:
        return self._board.round(seat)

    def _finish(self, seat: int, shown: tuple[int, int, int]) -> int:
        """Wait as long as it takes, wake those who do, and tell what a meeting has come to.

        Raises:
            threading.BrokenBarrierError: it was aborted.
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
        """The same for a meeting that was repeated: the sum is all that it is for.

        Raises:
            threading.BrokenBarrierError: it was aborted.
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
        """Wait until a round is complete."""
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
