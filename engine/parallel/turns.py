"""Two computations that take turns, so that one has work to do while the other waits.

Each is plain code that says where the other may go on (`Turns.pass_on`). Only one of them runs at
any time, so they may share what is not made for threads; and they alternate strictly, so that all
ranks that do the same meet in the same order.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from engine.parallel.liveness import Life

T = TypeVar("T")
U = TypeVar("U")

Inbox = queue.SimpleQueue[Callable[[], None] | None]


class _Dropped(BaseException):
    """The other computation has failed; nobody wants the result of this one."""


class Turns:
    """A second thread for the one that makes this, and whose turn it is.

    What the second thread does counts as a sign of life of the same rank.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._is_over = [True, True]
        self._has_failed = False
        self._seat = threading.local()
        inbox: Inbox = queue.SimpleQueue()
        self._inbox = inbox
        thread = threading.Thread(target=_work, args=(inbox, Life.present()), daemon=True)
        thread.name = f"{threading.current_thread().name}-second-half"
        thread.start()
        weakref.finalize(self, inbox.put, None)

    def both(self, first: Callable[[], T], second: Callable[[], U]) -> tuple[T, U]:
        """Call both; `second` begins when `first` passes on, or is over.

        Raises:
            BaseException: what one of them raised; the other ends where it passes on next.
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
        assert result, "the first one ends without a result only if the second one failed"
        return result[0], found[0]

    def _first(self, first: Callable[[], T]) -> list[T]:
        """Its result; nothing if the other has failed."""
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

    def pass_on(self) -> None:
        """Let the other one go on until it passes on as well, or is over."""
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


def _work(inbox: Inbox, life: Life | None) -> None:
    """The second thread; it knows no `Turns`, which end it when they are dropped."""
    if life is not None:
        life.include_this_thread()
    while (work := inbox.get()) is not None:
        work()
        del work
