"""Threads of the ranks, one each, kept for the life of a model."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from engine.errors import Cancelled, CommError, LeftAlone
from engine.parallel.watchdog import LOOK_S, RankActivity, RankGroup, Watchdog

T = TypeVar("T")

GRACE_S = 0.5
"""Seconds that ranks get to end after a failure has woken them."""


class _Job(Generic[T]):
    """One function call for all ranks, with its results and errors.

    Args:
        fn: the function, given the number of a rank.
        on_failure: called after each failure, to wake ranks that wait for the failed one.

    Attributes:
        results: result of each rank, by rank; None until it has ended.
        errors: failures so far, in order of time.
        busy: ranks that have not ended.
        is_done: set when the last rank has ended.
    """

    def __init__(
        self, fn: Callable[[int], T], n_ranks: int, on_failure: Callable[[], None]
    ) -> None:
        self.results: list[T | None] = [None] * n_ranks
        self.errors: list[BaseException] = []
        self.busy = set(range(n_ranks))
        self.is_done = threading.Event()
        self._fn = fn
        self._on_failure = on_failure
        self._is_over = False
        self._lock = threading.Lock()

    def compute(self, rank: int) -> None:
        """Call the function for a rank; keep its result or its error."""
        try:
            self.results[rank] = self._fn(rank)
        except BaseException as error:  # noqa: BLE001 it is raised again on the calling thread
            self.fail(error)
        self.end(rank)

    def fail(self, error: BaseException) -> None:
        """Keep a failure and wake the ranks that wait for the failed one."""
        with self._lock:
            if not self._is_over:
                self.errors.append(error)
        self._on_failure()

    def end(self, rank: int) -> None:
        """Mark a rank as ended; called once for each."""
        with self._lock:
            self.busy.discard(rank)
            is_last = not self.busy
        if is_last:
            self.is_done.set()

    def take_cause(self) -> BaseException:
        """Return the failure that caused the others, as far as can be told; drop all of them.

        They are dropped because an error holds the frames it passed through, and their tensors.
        """
        with self._lock:
            cause = min(self.errors, key=_distance)
            self.errors.clear()
            self._is_over = True
        return cause


def _distance(error: BaseException) -> int:
    """Return how unlikely an error is to be the cause of the others: 0 (own failure) to 2."""
    return 2 if isinstance(error, LeftAlone | Cancelled) else int(isinstance(error, CommError))


class RankThreads:
    """Threads on which `engine.backends.executor.RankExecutor` calls functions for all ranks.

    Each rank has a thread of its own, so the caller gets control back even if one of them hangs.

    Args:
        n_ranks: number of ranks.
        on_failure: called when a rank fails, to wake those that wait for it.
        on_start: called once on each rank's thread.
        group: group of the ranks, if they are to be watched.

    Attributes:
        n_ranks: number of ranks.
        lost: ranks whose thread hangs. The others are of no use without them, and memory that a
            lost rank uses must stay as it is: its thread may continue at any time.
    """

    def __init__(
        self,
        n_ranks: int,
        on_failure: Callable[[], None],
        on_start: Callable[[], None],
        group: RankGroup | None = None,
    ) -> None:
        self.n_ranks = n_ranks
        self.lost: frozenset[int] = frozenset()
        self._on_failure = on_failure
        self._on_start = on_start
        self._group = group
        self._activities: dict[int, RankActivity] = {}
        self._inboxes: list[queue.SimpleQueue[_Job[Any] | None]] = []
        self._threads: list[threading.Thread] = []
        for rank in range(n_ranks):
            inbox: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._work, args=(rank, inbox), name=f"tandem-rank-{rank}", daemon=True
            )
            self._inboxes.append(inbox)
            self._threads.append(thread)
            thread.start()

    def call_on_all(self, fn: Callable[[int], T], *, is_watched: bool = True) -> list[T]:
        """Call `fn(rank)` on all threads at once; return the results in rank order.

        Args:
            is_watched: whether ranks without a sign of life for seconds count as lost, see
                `engine.parallel.watchdog`.

        Raises:
            CommError: a rank is lost, see `lost`.
            BaseException: the first failure of any rank, after all have ended.
        """
        assert not self.lost, "there is no way to go on"
        assert self._threads, "it is closed"
        job: _Job[T] = _Job(fn, self.n_ranks, self._on_failure)
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

    def _wait(self, job: _Job[T], group: RankGroup | None) -> None:
        """Wait until all ranks have ended `job` or are lost, even if a signal interrupts."""
        guard = None if group is None else _Guard(job, group, self._activities)
        while True:
            try:
                # without a timeout Windows delivers no Ctrl+C; a SimpleQueue's would be forgotten
                # if a signal's handler outlasted it
                if job.is_done.wait(LOOK_S):
                    return
                if guard is not None and (lost := guard.look(self._dead(job))):
                    self.lost = frozenset(lost)
                    return
            except BaseException as error:  # noqa: BLE001 raised again once all have ended
                job.fail(error)

    def _dead(self, job: _Job[T]) -> list[int]:
        return [rank for rank in sorted(job.busy) if not self._threads[rank].is_alive()]

    def close(self) -> None:
        """End the threads, except lost ones; safe to call twice."""
        for inbox in self._inboxes:
            inbox.put(None)
        for rank, thread in enumerate(self._threads):
            if rank not in self.lost:
                thread.join()
        self._inboxes.clear()
        self._threads.clear()

    def _work(self, rank: int, inbox: queue.SimpleQueue[_Job[Any] | None]) -> None:
        """Compute jobs from a rank's inbox until it holds None; runs on the rank's thread."""
        self._activities[rank] = RankActivity()
        self._on_start()
        while (job := inbox.get()) is not None:
            job.compute(rank)
            del job  # it holds the model and the last results


class _Guard(Generic[T]):
    """Watchdog of one job: ends the wait for it even if ranks hang."""

    def __init__(self, job: _Job[T], group: RankGroup, activities: dict[int, RankActivity]) -> None:
        self._job = job
        self._group = group
        self._watch = Watchdog(group, activities)
        self._failed_at: float | None = None

    def look(self, dead: list[int]) -> list[int]:
        """Look for signs of life; wake all ranks if one has failed or is lost.

        Args:
            dead: ranks whose thread has ended in the middle of the job.

        Returns:
            The lost ranks, once all others have ended; empty before, and if none is lost.
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
        self._group.abort_for_good()
        return lost
