"""The ranks' threads, one each, kept for the life of a model."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from engine.errors import Cancelled, CommError, LeftAlone, Sentence
from engine.parallel.watchdog import LOOK_S, RankActivity, RankGroup, Watchdog

T = TypeVar("T")

GRACE_S = 0.5
"""Seconds that ranks are given to finish after a failure has woken them."""


class _Job(Generic[T]):
    """One function call for all ranks, with its results and errors."""

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
        try:
            self.results[rank] = self._fn(rank)
        except BaseException as error:  # noqa: BLE001 raised again on the calling thread
            self.fail(error)
        self.end(rank)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._is_over:
                self.errors.append(error)
        self._on_failure()

    def end(self, rank: int) -> None:
        with self._lock:
            self.busy.discard(rank)
            is_last = not self.busy
        if is_last:
            self.is_done.set()

    def take_cause(self) -> BaseException:
        with self._lock:
            cause = min(self.errors, key=_distance)
            self.errors.clear()
            self._is_over = True
        return cause


def _distance(error: BaseException) -> int:
    # from 0 (own failure) to 2: how unlikely an error is to be the cause of the others
    return 2 if isinstance(error, LeftAlone | Cancelled) else int(isinstance(error, CommError))


class RankThreads:
    """Threads on which `engine.backends.executor.RankExecutor` calls functions for all ranks.

    Each rank has a separate thread, so the caller regains control even if one of them hangs.

    Args:
        on_failure: called when a rank fails, to wake the ranks that wait for it.
        on_start: called once on each rank's thread.

    Attributes:
        lost: ranks with a hung thread. The others are useless without them, and memory that a lost
            rank uses must not be freed, because its thread may continue at any time.
    """

    def __init__(
        self, n_ranks: int, on_failure: Callable[[], None], on_start: Callable[[], None],
        group: RankGroup | None = None,
    ) -> None:  # fmt: skip
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
        """Call `fn(rank)` on all threads simultaneously; return the results in rank order.

        Args:
            is_watched: whether ranks without a sign of life for seconds count as lost; see
                `engine.parallel.watchdog`.

        Raises:
            CommError: a rank is lost; see `lost`.
            BaseException: the first failure on any rank, after all ranks have finished.
        """
        assert not self.lost, "lost ranks cannot be called"
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
        # until all have finished or are lost, even if a signal interrupts
        guard = None if group is None else _Guard(job, group, self._activities)
        while True:
            try:
                # without a timeout, Windows delivers no Ctrl+C; a SimpleQueue forgets its timeout
                # if a signal's handler outlasts it
                if job.is_done.wait(LOOK_S):
                    return
                dead = [rank for rank in sorted(job.busy) if not self._threads[rank].is_alive()]
                if guard is not None and (lost := guard.look(dead)):
                    self.lost = frozenset(lost)
                    return
            except BaseException as error:  # noqa: BLE001 raised again once all have finished
                job.fail(error)

    def close(self) -> None:
        """Stop the threads, except lost ones; safe to call twice."""
        for inbox in self._inboxes:
            inbox.put(None)
        for rank, thread in enumerate(self._threads):
            if rank not in self.lost:
                thread.join()
        self._inboxes.clear()
        self._threads.clear()

    def _work(self, rank: int, inbox: queue.SimpleQueue[_Job[Any] | None]) -> None:
        self._activities[rank] = RankActivity()
        self._on_start()
        while (job := inbox.get()) is not None:
            job.compute(rank)
            del job  # it keeps the model and the last results in memory


class _Guard(Generic[T]):
    """Watchdog for one job; it ends the wait for the job even if ranks hang."""

    def __init__(self, job: _Job[T], group: RankGroup, activities: dict[int, RankActivity]) -> None:
        self._job = job
        self._group = group
        self._watch = Watchdog(group, activities)
        self._failed_at: float | None = None

    def look(self, dead: list[int]) -> list[int]:
        """Look for signs of life; wake all ranks if one has failed or is lost.

        Args:
            dead: ranks with a thread that died in the middle of the job.

        Returns:
            The lost ranks, once all others have finished; empty before that, and if none is lost.
        """
        job, watch = self._job, self._watch
        busy = sorted(job.busy)
        if job.errors:
            watch.look_at(busy)
        elif dead:
            problem = Sentence("stopped in the middle of a step")
            job.fail(watch.error(dead, problem))
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
