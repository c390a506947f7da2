"""Two computations that take turns on one rank: one computes while the other waits for other ranks.

Each is plain code that yields to the other at certain points (`BatchOverlap.switch`). Only one runs
at any time, so they may share objects that are not thread-safe. They alternate strictly, so all
ranks with the same computations run their collectives in the same order.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from engine.parallel.watchdog import RankActivity

T = TypeVar("T")
U = TypeVar("U")

Inbox = queue.SimpleQueue[Callable[[], None] | None]
"""Queue of work for the second thread; None stops the thread."""


class _Dropped(BaseException):
    """Stops a computation after the other one has failed."""


class BatchOverlap:
    """A second thread, and the order in which the two computations take turns.

    The first computation has seat 0, on the calling thread; the second has seat 1. Activity on the
    second thread counts as a sign of life from the same rank.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._is_over = [True, True]
        self._has_failed = False
        self._seat = threading.local()
        inbox: Inbox = queue.SimpleQueue()
        self._inbox = inbox
        thread = threading.Thread(
            target=_work, args=(inbox, RankActivity.of_this_thread()), daemon=True
        )
        thread.name = f"{threading.current_thread().name}-second-batch"
        thread.start()
        weakref.finalize(self, inbox.put, None)

    def both(self, first: Callable[[], T], second: Callable[[], U]) -> tuple[T, U]:
        """Call both functions and return both results.

        `second` starts when `first` yields for the first time or finishes.

        Raises:
            BaseException: one function's error; the other function stops the next time it yields.
        """
        self._turn, self._has_failed = 0, False
        self._is_over = [False, False]
        found: list[U] = []
        errors: list[BaseException] = []
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()

        def work() -> None:
            try:
                self._enter(1)
                found.append(second())
            except _Dropped:
                pass
            except BaseException as error:  # noqa: BLE001 raised again on the calling thread
                errors.append(error)
            finally:
                self._leave(1, failed=not found)
                ended.put(None)

        self._inbox.put(work)
        try:
            result = self._first(first)
        finally:
            ended.get()
        if errors:
            raise errors.pop()
        assert result, "the first one only ends without a result if the second one failed"
        return result[0], found[0]

    def _first(self, first: Callable[[], T]) -> list[T]:
        # a list with the result; empty if the other computation has failed
        has_failed = True
        try:
            self._enter(0)
            result = [first()]
            has_failed = False
        except _Dropped:
            return []
        finally:
            self._leave(0, failed=has_failed)
        return result

    def switch(self) -> None:
        """Let the other computation continue until it yields or finishes."""
        seat: int = self._seat.number
        with self._condition:
            if self._is_over[1 - seat] and not self._has_failed:
                return
            self._turn = 1 - seat
            self._condition.notify_all()
        self._wait(seat)

    def _enter(self, seat: int) -> None:
        self._seat.number = seat
        self._wait(seat)

    def _wait(self, seat: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == seat or self._has_failed)
            if self._has_failed:
                raise _Dropped

    def _leave(self, seat: int, *, failed: bool) -> None:
        with self._condition:
            self._is_over[seat] = True
            self._has_failed = self._has_failed or failed
            self._turn = 1 - seat
            self._condition.notify_all()


def _work(inbox: Inbox, activity: RankActivity | None) -> None:
    # has no reference to `BatchOverlap`, because collecting that object stops the thread
    if activity is not None:
        activity.include_this_thread()
    while (work := inbox.get()) is not None:
        work()
        del work
