"""Collectives between ranks: one interface, and the implementation for ranks that are threads.

Every member of a group makes the same calls in the same order. Sums run in rank order on every
rank, so all members end with the same bits, whatever the number of ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.errors import CommError
from engine.kernels.log import Log, present, present_log, refuse
from engine.kernels.meeting import ADDED, NO_NUMBERS, OTHERS_SLEEP, Board
from engine.kernels.steps import is_plain
from engine.parallel.moving import Mover

if TYPE_CHECKING:
    from engine.gpu.lane import Lane

Group = tuple[int, ...]

STALL_TIMEOUT_S = 300.0
"""When no rank reaches a collective for this long, those that are waited for are taken for lost.

A rank may well compute for minutes while another waits, but it passes one in every block.
"""

AWAKE_TURNS = 30_000
"""How often a waiting rank looks for the others before it sleeps; about a millisecond."""

MOST_ADDED = 1 << 17
"""Numbers of a value that each rank adds up by one thread; torch has several."""


class Communicator(Protocol):
    """What a model may ask of the other ranks; `None` stands for a rank that has nothing to give.

    Raises:
        CommError: a rank left or stalled; the model must be loaded again.
    """

    rank: int

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far, but for repeated calls."""
        ...

    def all_reduce(self, x: Tensor | None, group: Group) -> Tensor:
        """Sum over the group; every member gets the result, with the same bits."""
        ...

    def gather(self, x: Tensor | None, group: Group) -> Tensor | None:
        """Join along the last dimension in rank order, on the first member of the group.

        The others get None.
        """
        ...

    def broadcast(self, x: Tensor | None, source: int, group: Group) -> Tensor:
        """The tensor of rank `source`, on every member of the group."""
        ...

    def lane(self, group: Group, n: int) -> Lane | None:
        """Where kernels sum n numbers of each member by themselves; None on all if they do not."""
        ...


class _Progress:
    """Counts collectives of all ranks; a lost increment does no harm."""

    def __init__(self) -> None:
        self.count = 0


class _Meeting:
    """Where the members of one group exchange values; who waits for the others sleeps.

    Two sets of slots alternate: a member can only be writing the next set while a slower one still
    reads this one, because the set after that needs all of them in the round in between.

    A member that waits has a timeout, which runs only while nobody makes progress.
    """

    def __init__(self, size: int, progress: _Progress) -> None:
        self.slots: tuple[list[Tensor | None], list[Tensor | None]] = ([None] * size, [None] * size)
        self._progress = progress
        self._rounds = [0] * size
        self._condition = threading.Condition()
        self._n_waiting = 0
        self._n_complete = 0
        self._slept_s = [0.0] * size
        self._is_broken = False

    def exchange(
        self, seat: int, x: Tensor | None, out: Tensor | None = None
    ) -> tuple[Sequence[Tensor | None], bool]:
        """Show `x` to the others.

        Args:
            out: see `place_for`.

        Returns:
            The values of all members, and whether `out` has their sum.

        Raises:
            threading.BrokenBarrierError: it was aborted, or all ranks stand still.
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

    def note(self, log: Log, seat: int, x: Tensor | None, out: Tensor) -> None:
        """Note an exchange that made `out` the sum, to be repeated with what then lies there."""
        refuse("ranks exchange values in Python")

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

    def _enter(self, seat: int, x: Tensor | None) -> tuple[int, list[Tensor | None]]:
        """The number of a member's next round, and its slots."""
        number = self._next_round(seat)
        slots = self.slots[number & 1]
        slots[seat] = x
        return number, slots

    def _next_round(self, seat: int) -> int:
        self._rounds[seat] += 1
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
            seen = self._progress.count
            if not self._condition.wait(STALL_TIMEOUT_S) and seen == self._progress.count:
                self._break()
        if not complete and not is_complete():
            raise threading.BrokenBarrierError

    def _break(self) -> None:
        self._is_broken = True
        self._condition.notify_all()


class _AwakeMeeting(_Meeting):
    """The same for ranks that compute on the CPU: they wait awake at first, and add up natively."""

    def __init__(self, size: int, progress: _Progress) -> None:
        super().__init__(size, progress)
        self._board = Board(size)

    def exchange(
        self, seat: int, x: Tensor | None, out: Tensor | None = None
    ) -> tuple[Sequence[Tensor | None], bool]:
        number, slots = self._enter(seat, x)
        if x is None:
            shown = 0, 0, 0
        elif out is None:
            shown = 0, NO_NUMBERS, 0
        else:
            shown = x.data_ptr(), x.numel(), out.data_ptr()
        self._board.meet(seat, number, *shown, AWAKE_TURNS)
        return slots, bool(self._finish(seat, shown) & ADDED)

    def note(self, log: Log, seat: int, x: Tensor | None, out: Tensor) -> None:
        shown = 0 if x is None else x.data_ptr(), out.numel(), out.data_ptr()
        log.kept.append(out)
        self._board.note(log, seat, *shown, AWAKE_TURNS, partial(self._finish_again, seat, shown))

    def _next_round(self, seat: int) -> int:
        return self._board.round(seat) + 1  # where repeated calls count as well

    def _finish(self, seat: int, shown: tuple[int, int, int]) -> int:
        """Wait as long as it takes, wake those who do, and tell what a meeting has come to."""
        board = self._board
        found = board.result(seat)
        if not found:
            number = board.round(seat)
            self._sleep(seat, number)
            found = board.meet(seat, number, *shown, 0)
        if found & OTHERS_SLEEP:
            with self._condition:
                self._condition.notify_all()
        return found

    def _finish_again(self, seat: int, shown: tuple[int, int, int]) -> None:
        """The same for a meeting that was repeated: the sum is all that it is for.

        Raises:
            threading.BrokenBarrierError: it was aborted, or all ranks stand still.
        """
        self._progress.count += 1
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
        self._board.break_off()
        super()._break()


class ThreadGroup:
    """The shared side of all communicators of one model.

    Args:
        is_awake: ranks wait for each other awake for a while, which takes kernels for the CPU.
    """

    def __init__(self, *, is_awake: bool = False) -> None:
        self._kind = _AwakeMeeting if is_awake else _Meeting
        self._lock = threading.Lock()
        self._meetings: dict[Group, _Meeting] = {}
        self._is_aborted = False
        self.progress = _Progress()

    def meeting(self, group: Group) -> _Meeting:
        """Where the members of a group find each other."""
        return self._meetings.get(group) or self._new_meeting(group)

    def _new_meeting(self, group: Group) -> _Meeting:
        with self._lock:
            meeting = self._meetings.get(group)
            if meeting is None:
                meeting = self._kind(len(group), self.progress)
                if self._is_aborted:
                    meeting.abort()
                self._meetings[group] = meeting
            return meeting

    def communicator(self, rank: int, device: torch.device) -> Communicator:
        """What a rank on a device meets the others by."""
        return ThreadCommunicator(self, rank, device)

    def waited_s(self, rank: int) -> float:
        """Seconds that a rank has waited for others so far, but for repeated calls."""
        meetings = list(self._meetings.items())
        return sum(m.waited_s(group.index(rank)) for group, m in meetings if rank in group)

    def abort(self) -> None:
        """Wake every rank that waits, with an error; called when one of them has failed."""
        with self._lock:
            self._is_aborted = True
            for meeting in self._meetings.values():
                meeting.abort()

    def settle(self) -> None:
        """Let go of what was exchanged, once no rank is inside a collective; undoes an abort."""
        with self._lock:
            if self._is_aborted:
                self._is_aborted = False
                self._meetings.clear()
            for meeting in self._meetings.values():
                meeting.clear()


class ThreadCommunicator:
    """A rank that is a thread of this process; peers' tensors are read where they are."""

    def __init__(self, shared: ThreadGroup, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._shared = shared
        self._mover = Mover(device)

    @property
    def waited_s(self) -> float:
        return self._shared.waited_s(self.rank)

    def all_reduce(self, x: Tensor | None, group: Group) -> Tensor:
        self._shared.progress.count += 1
        if len(group) == 1:
            assert x is not None, "a group of one has nobody else to give a value"
            return x
        return self._noted(x, group, lambda: self._sum(x, group))

    def _noted(self, x: Tensor | None, group: Group, compute: Callable[[], Tensor]) -> Tensor:
        """The sum of what the members show, from `compute`, which is not noted itself."""
        log = present()
        if log is None:
            return compute()
        with present_log(None):
            total = compute().clone()
        if total.numel() <= MOST_ADDED and all(t is None or is_plain(t) for t in (x, total)):
            self._shared.meeting(group).note(log, group.index(self.rank), x, total)
        else:
            refuse("ranks exchange what no kernel adds up")
        return total

    def _sum(self, x: Tensor | None, group: Group) -> Tensor:
        meeting = self._shared.meeting(group)
        out = meeting.place_for(x)
        values, is_added = self._exchange(meeting, x, group, out)
        if is_added:
            assert out is not None, "nothing is added without a place for it"
            return out
        total: Tensor | None = None
        for value in values:
            if value is not None:
                value = self._mover.moved(value)
                total = value if total is None else total + value
        assert total is not None, "no rank of the group had a value"
        return total

    def lane(self, group: Group, n: int) -> Lane | None:
        return None

    def gather(self, x: Tensor | None, group: Group) -> Tensor | None:
        refuse("slices are joined in Python")
        values = self._shown(x, group)
        return self._join(values) if self.rank == group[0] else None

    def _join(self, values: Sequence[Tensor | None]) -> Tensor:
        present = [self._mover.moved(v) for v in values if v is not None]
        return present[0] if len(present) == 1 else torch.cat(present, dim=-1)

    def broadcast(self, x: Tensor | None, source: int, group: Group) -> Tensor:
        return self._noted(
            x if self.rank == source else None, group, lambda: self._sent(x, source, group)
        )

    def _sent(self, x: Tensor | None, source: int, group: Group) -> Tensor:
        value = self._shown(x, group)[group.index(source)]
        assert value is not None, "the source must have a value"
        return self._mover.moved(value)

    def _shown(self, x: Tensor | None, group: Group) -> Sequence[Tensor | None]:
        """The values of all members, in group order; nobody else is needed for a group of one."""
        if len(group) == 1:
            return [x]
        return self._exchange(self._shared.meeting(group), x, group)[0]

    def _exchange(
        self, meeting: _Meeting, x: Tensor | None, group: Group, out: Tensor | None = None
    ) -> tuple[Sequence[Tensor | None], bool]:
        if x is not None and x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()  # peers read it from other streams
        try:
            return meeting.exchange(group.index(self.rank), x, out)
        except threading.BrokenBarrierError:
            raise CommError(self.rank, "lost the other ranks in the middle of a step") from None
