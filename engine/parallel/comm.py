"""Collectives between ranks: one interface, and the implementation for ranks that are threads.

Every member of a group makes the same calls in the same order. Sums run in rank order on every
rank, so all members end with the same bits, whatever the number of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import CommError

Group = tuple[int, ...]

STALL_TIMEOUT_S = 300.0
"""When no rank reaches a collective for this long, those that are waited for are taken for lost.

A rank may well compute for minutes while another waits, but it passes one in every block.
"""


class Communicator(Protocol):
    """What a model may ask of the other ranks; `None` stands for a rank that has nothing to give.

    Raises:
        CommError: a rank left or stalled; the model must be loaded again.
    """

    rank: int

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


class _Progress:
    """Counts collectives of all ranks; a lost increment does no harm."""

    def __init__(self) -> None:
        self.count = 0


class _Barrier:
    """Like `threading.Barrier`, but its timeout runs only while nobody makes progress."""

    def __init__(self, size: int, progress: _Progress) -> None:
        self._size = size
        self._progress = progress
        self._condition = threading.Condition()
        self._n_waiting = 0
        self._round = 0
        self._is_broken = False

    def wait(self) -> None:
        """Return when all members have come.

        Raises:
            threading.BrokenBarrierError: it was aborted, or all ranks stand still.
        """
        with self._condition:
            entered = self._round
            self._n_waiting += 1
            if self._n_waiting == self._size and not self._is_broken:
                self._n_waiting = 0
                self._round += 1
                self._condition.notify_all()
            while entered == self._round and not self._is_broken:
                seen = self._progress.count
                if not self._condition.wait(STALL_TIMEOUT_S) and seen == self._progress.count:
                    self._break()
            if entered == self._round:
                raise threading.BrokenBarrierError

    def abort(self) -> None:
        """Wake all who wait, with an error; for good."""
        with self._condition:
            self._break()

    def _break(self) -> None:
        self._is_broken = True
        self._condition.notify_all()


class _Meeting:
    """Where the members of one group exchange values.

    Two sets of slots alternate: a member can only be writing the next set while a slower one still
    reads this one, because the set after that needs all of them at the barrier in between.
    """

    def __init__(self, size: int, progress: _Progress) -> None:
        self.barrier = _Barrier(size, progress)
        self.phases = [0] * size
        self.slots: tuple[list[Tensor | None], list[Tensor | None]] = ([None] * size, [None] * size)

    def clear(self) -> None:
        for slots in self.slots:
            slots[:] = [None] * len(slots)


class ThreadGroup:
    """The shared side of all communicators of one model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[Group, _Meeting] = {}
        self._is_aborted = False
        self.progress = _Progress()

    def meeting(self, group: Group) -> _Meeting:
        with self._lock:
            meeting = self._meetings.get(group)
            if meeting is None:
                meeting = self._meetings[group] = _Meeting(len(group), self.progress)
                if self._is_aborted:
                    meeting.barrier.abort()
            return meeting

    def abort(self) -> None:
        """Wake every rank that waits, with an error; called when one of them has failed."""
        with self._lock:
            self._is_aborted = True
            for meeting in self._meetings.values():
                meeting.barrier.abort()

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

    def all_reduce(self, x: Tensor | None, group: Group) -> Tensor:
        self._shared.progress.count += 1
        if len(group) == 1:
            assert x is not None, "a group of one has nobody else to give a value"
            return x
        total: Tensor | None = None
        for value in self._exchange(x, group):
            if value is not None:
                value = value.to(self.device)
                total = value if total is None else total + value
        assert total is not None, "no rank of the group had a value"
        return total

    def gather(self, x: Tensor | None, group: Group) -> Tensor | None:
        values = self._exchange(x, group) if len(group) > 1 else [x]
        return self._join(values) if self.rank == group[0] else None

    def _join(self, values: Sequence[Tensor | None]) -> Tensor:
        present = [v.to(self.device) for v in values if v is not None]
        return present[0] if len(present) == 1 else torch.cat(present, dim=-1)

    def broadcast(self, x: Tensor | None, source: int, group: Group) -> Tensor:
        value = self._exchange(x, group)[group.index(source)] if len(group) > 1 else x
        assert value is not None, "the source must have a value"
        return value.to(self.device)

    def _exchange(self, x: Tensor | None, group: Group) -> Sequence[Tensor | None]:
        """Show `x` to the group; returns the values of all members, in group order."""
        if x is not None and x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()  # peers read it from other streams
        meeting = self._shared.meeting(group)
        index = group.index(self.rank)
        slots = meeting.slots[meeting.phases[index]]
        meeting.phases[index] ^= 1
        slots[index] = x
        try:
            meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise CommError(self.rank, "lost the other ranks in the middle of a step") from None
        return slots
