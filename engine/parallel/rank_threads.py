"""One thread per rank, kept for the life of a model."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from engine.errors import Cancelled, CommError, LeftAlone
from engine.parallel.liveness import Life
from engine.parallel.watch import LOOK_S, Meetings, Watch

T = TypeVar("T")

GRACE_S = 0.5
"""Seconds in which ranks that were woken by a failure end, if they can at all."""


class Watched(Meetings, Protocol):
    """Where the ranks of a pool meet, to be watched while they do."""

    def lose(self) -> None:
        """Wake all ranks, now and whenever one comes back."""
        ...


class _Job(Generic[T]):
    """One function for all ranks, and what came of it.

    Attributes:
        busy: the ranks that have not ended.
        done: gets something when the last one has.
    """

    def __init__(
        self, fn: Callable[[int], T], n_ranks: int, on_failure: Callable[[], None]
    ) -> None:
        self.results: list[T | None] = [None] * n_ranks
        self.errors: list[BaseException] = []
        self.busy = set(range(n_ranks))
        self.done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._fn = fn
        self._on_failure = on_failure
        self._is_over = False
        self._lock = threading.Lock()

    def compute(self, rank: int) -> None:
        try:
            self.results[rank] = self._fn(rank)
        except BaseException as error:  # noqa: BLE001 it is raised again on the calling thread
            self.fail(error)
        self.end(rank)

    def fail(self, error: BaseException) -> None:
        """Note a failure and wake the ranks that wait for the one that failed."""
        with self._lock:
            if not self._is_over:
                self.errors.append(error)
        self._on_failure()

    def end(self, rank: int) -> None:
        """Note that a rank does nothing more; once."""
        with self._lock:
            self.busy.discard(rank)
            is_last = not self.busy
        if is_last:
            self.done.put(None)

    def take_cause(self) -> BaseException:
        """The failure that made the others fail, if it can be told apart; forgets all of them.

        An error holds the frames it passed through, and with them every tensor they hold.
        """
        with self._lock:
            cause = min(self.errors, key=_distance)
            self.errors.clear()
            self._is_over = True
        return cause


def _distance(error: BaseException) -> int:
    """How far an error is from being the cause of the others."""
    return 2 if isinstance(error, LeftAlone | Cancelled) else int(isinstance(error, CommError))


class RankThreads:
    """The threads on which `engine.parallel.executor.RankExecutor` calls functions.

    A single rank runs on the calling thread, so that it costs no hand-over at all. Several have
    threads of their own, all of them: so whoever calls comes back even if one of them does not.

    Args:
        on_failure: called when a rank fails, to wake those that wait for it.
        on_start: called once on each rank's thread.
        group: where the ranks meet, if they are to be watched.

    Attributes:
        lost: ranks that do not come back. The others are of no use without them, and what these
            hold must stay as it is: they may go on at any time.
    """

    def __init__(
        self,
        n_ranks: int,
        on_failure: Callable[[], None],
        on_start: Callable[[], None],
        group: Watched | None = None,
    ) -> None:
        self.n_ranks = n_ranks
        self.lost: frozenset[int] = frozenset()
        self._on_failure = on_failure
        self._on_start = on_start
        self._group = group
        self._lives: dict[int, Life] = {}
        self._inboxes: list[queue.SimpleQueue[_Job[Any] | None]] = []
        self._threads: list[threading.Thread] = []
        for rank in range(n_ranks if n_ranks > 1 else 0):
            inbox: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._work, args=(rank, inbox), name=f"tandem-rank-{rank}", daemon=True
            )
            self._inboxes.append(inbox)
            self._threads.append(thread)
            thread.start()

    def call_on_all(self, fn: Callable[[int], T], *, is_watched: bool = True) -> list[T]:
        """Call `fn(rank)` on every rank and return the results in rank order.

        Args:
            is_watched: ranks that do nothing for seconds are taken for lost, see
                `engine.parallel.watch`.

        Raises:
            CommError: a rank is lost, see `lost`.
            BaseException: the first failure of any rank, after all have ended.
        """
        assert not self.lost, "there is no way to go on"
        assert self._threads or self.n_ranks == 1, "it is closed"
        job: _Job[T] = _Job(fn, self.n_ranks, self._on_failure)
        if not self._threads:
            job.compute(0)
        for inbox in self._inboxes:
            inbox.put(job)
        self._wait(job, self._group if is_watched else None)
        if not job.errors:
            return job.results  # type: ignore[return-value]  # every entry was set
        cause = job.take_cause()
        try:
            raise cause
        finally:
            del cause, job

    def _wait(self, job: _Job[T], group: Watched | None) -> None:
        """Wait until no rank works on `job` any more, even if someone interrupts."""
        guard = None if group is None else _Guard(job, group, self._lives)
        while True:
            try:
                job.done.get(timeout=LOOK_S)  # without one Windows lets nobody interrupt
                return
            except queue.Empty:
                if guard is not None and (lost := guard.look(self._dead(job))):
                    self.lost = frozenset(lost)
                    return
            except BaseException as error:  # noqa: BLE001 raised again once all have ended
                job.fail(error)

    def _dead(self, job: _Job[T]) -> list[int]:
        """The ranks whose thread has ended in the middle of a job."""
        return [rank for rank in sorted(job.busy) if not self._threads[rank].is_alive()]

    def close(self) -> None:
        """End the threads, but for those that are lost; safe to call twice."""
        for inbox in self._inboxes:
            inbox.put(None)
        for rank, thread in enumerate(self._threads):
            if rank not in self.lost:
                thread.join()
        self._inboxes.clear()
        self._threads.clear()

    def _work(self, rank: int, inbox: queue.SimpleQueue[_Job[Any] | None]) -> None:
        self._lives[rank] = Life()
        self._on_start()
        while (job := inbox.get()) is not None:
            job.compute(rank)
            del job  # it holds the model and the last results


class _Guard(Generic[T]):
    """Sees to it that a job comes to an end, whatever its ranks do."""

    def __init__(self, job: _Job[T], group: Watched, lives: dict[int, Life]) -> None:
        self._job = job
        self._group = group
        self._watch = Watch(group, lives)
        self._failed_at: float | None = None

    def look(self, dead: list[int]) -> list[int]:
        """See what the ranks do, and wake all where one is lost.

        Args:
            dead: ranks that are known to be.

        Returns:
            The ranks that will not end, if all others have.
        """
        job, watch = self._job, self._watch
        busy = sorted(job.busy)
        if job.errors:
            watch.look_at(busy)
        elif dead:
            job.fail(watch.error(dead, "ended in the middle of a step"))
        elif error := watch.look(busy):
            job.fail(error)
        if not job.errors:
            return []
        if self._failed_at is None:
            self._failed_at = time.perf_counter()
        lost = [rank for rank in busy if rank in dead or watch.is_silent(rank)]
        if lost != busy or time.perf_counter() < self._failed_at + GRACE_S:
            return []
        self._group.lose()
        return lost
