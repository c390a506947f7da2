"""One thread per rank, kept for the life of a model."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from engine.errors import Cancelled, CommError

T = TypeVar("T")


class _Job(Generic[T]):
    """One function for all ranks, and what came of it."""

    def __init__(
        self, fn: Callable[[int], T], n_ranks: int, on_failure: Callable[[], None]
    ) -> None:
        self.results: list[T | None] = [None] * n_ranks
        self.errors: list[BaseException] = []
        self._fn = fn
        self._on_failure = on_failure
        self._lock = threading.Lock()

    def run(self, rank: int) -> None:
        try:
            self.results[rank] = self._fn(rank)
        except BaseException as error:  # noqa: BLE001 it is raised again on the calling thread
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Note a failure and wake the ranks that wait for the one that failed."""
        with self._lock:
            self.errors.append(error)
        self._on_failure()

    def take_cause(self) -> BaseException:
        """The failure that made the others fail, if it can be told apart; forgets all of them.

        An error holds the frames it passed through, and with them every tensor they hold.
        """
        followers = (CommError, Cancelled)
        cause = next((e for e in self.errors if not isinstance(e, followers)), self.errors[0])
        self.errors.clear()
        return cause


class RankPool:
    """Runs a function once per rank, all at the same time.

    Rank 0 runs on the calling thread, so that one rank costs no hand-over at all.

    Args:
        on_failure: called when a rank fails, to wake those that wait for it.
        on_start: called once on each rank's thread.
    """

    def __init__(
        self, n_ranks: int, on_failure: Callable[[], None], on_start: Callable[[], None]
    ) -> None:
        self.n_ranks = n_ranks
        self._on_failure = on_failure
        self._on_start = on_start
        self._inboxes: list[queue.SimpleQueue[_Job[Any] | None]] = []
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for rank in range(1, n_ranks):
            inbox: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._work, args=(rank, inbox), name=f"tandem-rank-{rank}", daemon=True
            )
            self._inboxes.append(inbox)
            self._threads.append(thread)
            thread.start()

    def run(self, fn: Callable[[int], T]) -> list[T]:
        """Call `fn(rank)` on every rank and return the results in rank order.

        Raises:
            BaseException: the first failure of any rank, after all have ended.
        """
        job: _Job[T] = _Job(fn, self.n_ranks, self._on_failure)
        for inbox in self._inboxes:
            inbox.put(job)
        job.run(0)
        self._wait(job)
        if not job.errors:
            return job.results  # type: ignore[return-value]  # every entry was set
        cause = job.take_cause()
        try:
            raise cause
        finally:
            del cause, job

    def _wait(self, job: _Job[T]) -> None:
        """Wait until no rank works on `job` any more, even if someone interrupts."""
        n_left = len(self._inboxes)
        while n_left:
            try:
                self._done.get()
                n_left -= 1
            except BaseException as error:  # noqa: BLE001 raised again once all have ended
                job.fail(error)

    def close(self) -> None:
        """End the threads; safe to call twice."""
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        self._inboxes.clear()
        self._threads.clear()

    def _work(self, rank: int, inbox: queue.SimpleQueue[_Job[Any] | None]) -> None:
        self._on_start()
        while (job := inbox.get()) is not None:
            job.run(rank)
            del job  # it holds the model and the last results
            self._done.put(None)
