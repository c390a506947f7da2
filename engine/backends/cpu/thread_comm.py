"""Collectives between ranks that are threads.

A group's members all make the same calls in the same order. Each member adds up partial sums in
rank order, so all get the same bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.backends.cpu.kernels.running.call_log import CallLog, current_log
from engine.backends.cpu.kernels.running.thread_all_reduce import (
    ADDED,
    NO_NUMBERS,
    OTHERS_SLEEP,
    ThreadAllReduce,
)
from engine.backends.cpu.kernels.small.small_ops import is_plain
from engine.errors import LeftAlone
from engine.model.forward.recording import recording_to, refuse_replay
from engine.parallel.transfers import DeviceCopier, check_alike, check_fit
from engine.parallel.watchdog import CollectiveCounter, RankGroup

if TYPE_CHECKING:
    from engine.model.forward.communicator import Communicator, FusedAllReduce, Group

SPIN_TURNS = 30_000
"""Number of spins before a waiting rank sleeps: about a millisecond."""

MAX_ADDED = 1 << 17
"""Up to this many elements, each rank adds natively on one thread; for more, torch uses several."""


class Slice(NamedTuple):
    """A rank's part of a gathered tensor.

    Attributes:
        value: the part, or None.
        alike: tensor whose bits must be equal on all ranks of the same kind, or None.
    """

    value: Tensor | None
    alike: Tensor | None


Shown = Tensor | Slice | None
"""A rank's contribution to an exchange, or None."""


class Barrier:
    """Exchange of values among a group's members; waiting members sleep.

    A member's seat is its index in the group. Two sets of slots alternate: while a slow member is
    still reading one set, a fast one can only write the other, as every round needs all members.

    There is no timeout: the watchdog (`engine.parallel.watchdog`) aborts the exchange.

    Args:
        size: number of members.
        counter: counter of collectives; this class counts replayed exchanges in it.

    Attributes:
        slots: the two sets of values, each indexed by seat.
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
            out: memory for the sum, from `place_for`; None if no sum is wanted.

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
        """Return memory for the sum if `exchange` can add up values like x; otherwise None."""
        return None

    def note(self, log: CallLog, seat: int, x: Tensor | None, out: Tensor) -> None:
        """Record an all-reduce of x into `out`; replays read and write the same memory."""
        refuse_replay("ranks exchange values in Python")

    def waited_s(self, seat: int) -> float:
        """Return how long a member has waited, in seconds, excluding replayed exchanges."""
        return self._slept_s[seat]

    def abort(self) -> None:
        """Wake all waiting members with an error; later exchanges fail too."""
        with self._condition:
            self._break()

    def clear(self) -> None:
        """Drop the exchanged values."""
        for slots in self.slots:
            slots[:] = [None] * len(slots)

    def missing(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the seats of the waiting members, and the seats that they wait for."""
        rounds = [self._round(seat) for seat in range(len(self._rounds))]
        last = max(rounds)
        absent = [seat for seat, number in enumerate(rounds) if number < last]
        return [seat for seat in range(len(rounds)) if absent and seat not in absent], absent

    def _enter(self, seat: int, x: Shown) -> tuple[int, list[Shown]]:
        number = self._next_round(seat)
        slots = self.slots[number & 1]
        slots[seat] = x
        return number, slots

    def _next_round(self, seat: int) -> int:
        self._rounds[seat] += 1
        return self._rounds[seat]

    def _round(self, seat: int) -> int:
        return self._rounds[seat]

    @contextmanager
    def _sleeping(self, seat: int) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            with self._condition:
                yield
        finally:
            self._slept_s[seat] += time.perf_counter() - begun

    def _sleep_until(self, is_complete: Callable[[], bool]) -> None:
        """Wait until a round is complete; the caller holds the condition's lock."""
        while not (complete := is_complete()) and not self._is_broken:
            self._condition.wait()
        if not complete and not is_complete():
            raise threading.BrokenBarrierError

    def _break(self) -> None:
        self._is_broken = True
        self._condition.notify_all()


class SpinningBarrier(Barrier):
    """Exchange among CPU ranks: members spin before they sleep, and add in native code."""

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
        """Wait until a member's round is complete, wake sleepers, and return the result bits.

        Args:
            shown: address of the value, its element count, address of the sum; 0 for none.
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
        """Finish a replayed all-reduce; raise BrokenBarrierError if there is no sum."""
        self._counter.count += 1
        if not self._finish(seat, shown) & ADDED:
            raise threading.BrokenBarrierError

    def waited_s(self, seat: int) -> float:
        return self._slept_s[seat] + (self._board.called_s(seat) or 0.0)

    def place_for(self, x: Tensor | None) -> Tensor | None:
        if x is None or x.numel() > MAX_ADDED or not is_plain(x):
            return None
        return torch.empty_like(x)

    def _sleep(self, seat: int, number: int) -> None:
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


class ThreadGroup(RankGroup):
    """State shared by one model's communicators.

    Args:
        spins: whether waiting ranks spin before they sleep; requires the CPU kernels.

    Attributes:
        notes: sentences that tell the user about connections between devices.
        collectives, abroad: see `RankGroup`.
    """

    def __init__(self, *, spins: bool = False) -> None:
        super().__init__()
        self._kind = SpinningBarrier if spins else Barrier
        self._lock = threading.Lock()
        self._barriers: dict[Group, Barrier] = {}
        self._is_aborted = False
        self._is_aborted_for_good = False
        self.notes: tuple[str, ...] = ()

    def barrier(self, group: Group) -> Barrier:
        """Return a group's barrier."""
        return self._barriers.get(group) or self._new_barrier(group)

    def _new_barrier(self, group: Group) -> Barrier:
        """Create a group's barrier unless another thread has just done so."""
        with self._lock:
            barrier = self._barriers.get(group)
            if barrier is None:
                barrier = self._kind(len(group), self.collectives)
                if self._is_aborted:
                    barrier.abort()
                self._barriers[group] = barrier
            return barrier

    def communicator(self, rank: int, device: torch.device) -> Communicator:
        """Return a new communicator for a rank on a device."""
        return ThreadCommunicator(self, rank, device)

    def waiting(self) -> Mapping[int, Sequence[int]]:
        """Map each waiting rank to the ranks that it waits for."""
        found: dict[int, Sequence[int]] = {}
        for group, barrier in list(self._barriers.items()):
            waiting, missing = barrier.missing()
            found.update((group[seat], [group[other] for other in missing]) for seat in waiting)
        return found

    def waited_s(self, rank: int) -> float:
        """Return how long a rank has waited, in seconds, excluding replayed exchanges."""
        barriers = list(self._barriers.items())
        return sum(m.waited_s(group.index(rank)) for group, m in barriers if rank in group)

    def abort(self) -> None:
        """Wake all waiting ranks with an error after one rank has failed."""
        with self._lock:
            self._is_aborted = True
            for barrier in self._barriers.values():
                barrier.abort()

    def abort_for_good(self) -> None:
        """Abort permanently, as a lost rank may return at any time and must then not wait."""
        self._is_aborted_for_good = True
        self.abort()

    def close(self) -> None:
        """Free all barriers, which no rank may be using any longer; safe to call twice."""
        self._barriers.clear()

    def settle(self) -> None:
        """Drop exchanged values and reset an abort; no rank may be in a collective."""
        with self._lock:
            if self._is_aborted_for_good:
                return
            if self._is_aborted:
                self._is_aborted = False
                self._barriers.clear()
            for barrier in self._barriers.values():
                barrier.clear()


class ThreadCommunicator:
    """Communicator for a rank that is a thread; reads other ranks' tensors in place.

    Args:
        shared: group of the ranks.
        rank: index of the rank.
        device: the rank's device, where results are placed.
    """

    def __init__(self, shared: ThreadGroup, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._shared = shared
        self._copier = DeviceCopier(device)
        shared.join(rank, device)

    @property
    def waited_s(self) -> float:
        return self._shared.waited_s(self.rank)

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        self._shared.collectives.count += 1
        if len(group) == 1:
            assert x is not None, "a group of one needs a value"
            return x
        return self._noted(x, group, lambda: self._sum(x, group))

    def _noted(self, x: Tensor | None, group: Group, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of `compute`; in a recording, record it as a single all-reduce."""
        log = current_log()
        if log is None:
            return compute()
        with recording_to(None):
            total = compute().clone()
        if total.numel() <= MAX_ADDED and all(t is None or is_plain(t) for t in (x, total)):
            self._shared.barrier(group).note(log, group.index(self.rank), x, total)
        else:
            refuse_replay("ranks exchange values that no kernel can add up")
        return total

    def _sum(self, x: Tensor | None, group: Group) -> Tensor:
        barrier = self._shared.barrier(group)
        out = barrier.place_for(x)
        shown, is_added = self._exchange(barrier, x, group, out)
        values = _present(shown, group)
        assert values, "no rank of the group had a value"
        check_fit(values, self._shared.device)
        if is_added:
            assert out is not None, "the sum needs memory"
            return out
        first, *others = (self._copier.to_device(value) for value in values.values())
        return sum(others, start=first)

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        return None

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        refuse_replay("slices are joined in Python")
        if len(group) == 1:
            return x
        is_alike = alike is not None and alike.is_cpu and alike.dtype is torch.float32
        shown = self._shown(Slice(x, alike if is_alike else None), group)
        return self._join(shown, group) if self.rank == group[0] else None

    def _join(self, shown: Sequence[Shown], group: Group) -> Tensor | None:
        slices = [s for s in shown if isinstance(s, Slice)]
        if alike := _present([s.alike for s in slices], group):
            check_alike(alike, self._shared.device)
        values = _present([s.value for s in slices], group)
        if not values:
            return None
        check_fit(values, self._shared.device, all_but_last=True)
        found = [self._copier.to_device(value) for value in values.values()]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        return self._noted(
            x if self.rank == source else None, group, lambda: self._sent(x, source, group)
        )

    def _sent(self, x: Tensor | None, source: int, group: Group) -> Tensor:
        value = x if len(group) == 1 else self._shown(x, group)[group.index(source)]
        assert isinstance(value, Tensor), "the source must have a value"
        return self._copier.to_device(value)

    def _shown(self, x: Shown, group: Group) -> Sequence[Shown]:
        return self._exchange(self._shared.barrier(group), x, group)[0]

    def _exchange(
        self, barrier: Barrier, x: Shown, group: Group, out: Tensor | None = None
    ) -> tuple[Sequence[Shown], bool]:
        """Exchange x once it has been computed; see `Barrier.exchange`."""
        value = x.value if isinstance(x, Slice) else x
        if value is not None and value.is_cuda:  # peers read it from other streams
            torch.cuda.current_stream(value.device).synchronize()
        try:
            return barrier.exchange(group.index(self.rank), x, out)
        except threading.BrokenBarrierError:
            raise LeftAlone(self.rank, str(self.device)) from None


def _present(shown: Sequence[Shown], group: Group) -> dict[int, Tensor]:
    """Return the members' tensors by rank."""
    return {rank: x for rank, x in zip(group, shown, strict=True) if isinstance(x, Tensor)}
