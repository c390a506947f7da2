"""Takes turns between threads that call one model, of which one at a time computes.

A *use* is a call while it computes: all of most methods, but one step of an answer, up to its next
event. Uses follow each other in the order in which they came. Between its steps an answer is
*under way*: calls that would replace what it has cached wait for its end, others come in between.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from engine.errors import Cancelled, EngineError, ModelBusy
from engine.generation.results import Finished, GenerationEvent, Timings, Usage
from engine.progress import IsCancelled, never

P = ParamSpec("P")
R = TypeVar("R")

POLL_S = 0.05
"""Seconds between two looks of a waiting thread at what nobody tells it, such as `is_cancelled`."""

ABANDONED_S = 30.0
"""Seconds for which nobody reads an answer before others need not wait for its end any more."""


class Use:
    """One call of a model while it computes, or waits for others that do.

    Args:
        doing: what the model is doing then, such as "it is being split anew".
        replaces: whether the call replaces what is cached, so that an answer cannot go on.
        answer: answer that it is a step of; None for other calls.
        closes: whether it closes the model.

    Attributes:
        thread: identifier of the calling thread.
    """

    __slots__ = ("answer", "closes", "doing", "replaces", "thread")

    def __init__(
        self,
        doing: str,
        replaces: bool = False,
        answer: AnswerStream | None = None,
        closes: bool = False,
    ) -> None:
        self.doing, self.replaces, self.answer, self.closes = doing, replaces, answer, closes
        self.thread = threading.get_ident()


class Occupancy:
    """The uses of one model: the one under way, those that wait, and the answer under way.

    An answer is known by a weak reference, so that one that nobody holds any more is none: no
    finalizer, which could run in the middle of anything, has to take a lock.

    Attributes:
        is_closing: whether the model is closed, or about to be.
    """

    def __init__(self) -> None:
        self.is_closing = False
        self._lock = threading.RLock()  # a signal's handler may come in twice
        self._changed = threading.Condition(self._lock)
        self._users: dict[int, Use] = {}  # one at most; `setdefault` tests and sets at once
        self._waiting: list[Use] = []
        self._answer: Callable[[], AnswerStream | None] = _nothing
        self._free: Callable[[], None] | None = None
        self._called_back = threading.local()

    @contextmanager
    def use(
        self, doing: str, is_cancelled: IsCancelled = never, *, replaces: bool = False
    ) -> Iterator[IsCancelled]:
        """Use the model, alone; wait for others first.

        Yields:
            A check that is also true once the model is to be closed.

        Raises:
            EngineError: see `enter`.
        """
        use = Use(doing, replaces=replaces)
        try:
            self.enter(use, is_cancelled)
            yield self.called_back(lambda: self.is_closing or is_cancelled())
        finally:
            self.leave(use)

    def called_back(self, callback: Callable[P, R]) -> Callable[P, R]:
        """Return a function that calls `callback`, on any thread, as a part of the use under way.

        The use waits for it, so if it calls the model, that must be refused rather than wait.
        """

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            outer, self._called_back.is_running = self._is_called_back, True
            try:
                return callback(*args, **kwargs)
            finally:
                self._called_back.is_running = outer

        return call

    @property
    def _is_called_back(self) -> bool:
        """Whether the calling thread is inside a callback of the use under way."""
        return getattr(self._called_back, "is_running", False)

    def enter(self, use: Use, is_cancelled: IsCancelled = never) -> None:
        """Begin a use; `leave` has to follow, also after an error.

        Raises:
            ModelBusy: the call comes from inside the use under way.
            EngineError: the model has been closed.
            Cancelled: `is_cancelled` was true while others were waited for.
        """
        if not use.replaces and not self._waiting and self._takes(use):
            return
        with self._lock:
            if (user := self._inside()) is not None:
                raise ModelBusy(user.doing)
        self._wait(use, is_cancelled)

    def _takes(self, use: Use) -> bool:
        """Make a use the one under way if there is none; return whether it is now."""
        if self._users.setdefault(0, use) is not use:
            return False
        if self.is_closing and not use.closes:
            self._users.clear()
            return False
        return True

    def leave(self, use: Use) -> None:
        """End a use; without effect if it has not begun."""
        if self._users.get(0) is not use:
            return
        if self._free is not None:
            free, self._free = self._free, None
            free()
        self._users.clear()
        if self._waiting:
            with self._lock:
                if self._next() is not None:
                    self._changed.notify_all()

    def wake(self) -> None:
        """Have those that wait look again, as an answer has ended."""
        with self._lock:
            self._changed.notify_all()

    def close(self, free: Callable[[], None]) -> None:
        """End what is under way, wait for that, and free the model; safe to call twice.

        From inside a use (a callback, a signal's handler) it only asks for that: the use frees the
        model at its end.

        Args:
            free: frees the model, and raises nothing.
        """
        with self._lock:
            self.is_closing = True
            self._changed.notify_all()
            if self._inside() is not None:
                self._free = free
                return
        use = Use("it is being closed", closes=True)
        try:
            self.enter(use)
            free()
        finally:
            self.leave(use)

    def _inside(self) -> Use | None:
        """Return the use under way if the caller is inside of it, so that it cannot end now."""
        user = self._users.get(0)
        if user is not None and (user.thread == threading.get_ident() or self._is_called_back):
            return user
        return None

    def _check_open(self, use: Use) -> None:
        if self.is_closing and not use.closes:
            raise EngineError("The model has been unloaded.", "Load it again.")

    def _wait(self, use: Use, is_cancelled: IsCancelled) -> None:
        """Begin a use once it is the next one."""
        try:
            with self._lock:
                self._let_go(use)
                self._waiting.insert(0 if use.closes else len(self._waiting), use)
            while not self._has_begun(use):
                if is_cancelled():
                    raise Cancelled("Waiting for the model")
        finally:
            with self._lock:
                if use in self._waiting:
                    self._waiting.remove(use)
                    self._changed.notify_all()

    def _let_go(self, use: Use) -> None:
        """Forget the answer that the caller itself is to replace: others need not wait for it."""
        answer = self._answer()
        if use.replaces and answer is not None and answer.reader == use.thread:
            self._answer = _nothing
            self._changed.notify_all()

    def _has_begun(self, use: Use) -> bool:
        """Begin a use if it is the next one, else wait a moment; return whether it has begun."""
        with self._lock:
            self._check_open(use)
            if use is self._next() and self._takes(use):
                self._waiting.remove(use)
                if use.replaces:
                    self._answer = _nothing if use.answer is None else weakref.ref(use.answer)
                return True
            self._changed.wait(POLL_S)
            return False

    def _next(self) -> Use | None:
        """Return the first of the waiting uses that the answer under way does not keep waiting."""
        return next((use for use in self._waiting if not self._has_to_wait(use)), None)

    def _has_to_wait(self, use: Use) -> bool:
        """Return whether a use would replace what another thread's answer goes on from."""
        if not use.replaces:
            return False
        answer = self._answer()
        if answer is None or answer is use.answer or answer.reader == use.thread:
            return False
        return answer.is_read


def _nothing() -> None:
    """Return None, as a weak reference to what is gone does."""


class AnswerStream(Iterator[GenerationEvent]):
    """The events of one answer of a model; threads that read it together share the events.

    Args:
        occupancy: uses of the model; each event is computed in one.
        events: source of the events.
        is_cancelled: asked while the answer waits for others to end, before its first event.

    Attributes:
        reader: identifier of the thread that has read the last event; 0 before the first.
    """

    def __init__(
        self, occupancy: Occupancy, events: Iterator[GenerationEvent], is_cancelled: IsCancelled
    ) -> None:
        self._occupancy, self._events, self._is_cancelled = occupancy, events, is_cancelled
        self._is_over = self._has_begun = False
        self._idle_since: float | None = None  # None while somebody reads
        self.reader = 0

    @property
    def is_read(self) -> bool:
        """Whether somebody goes on reading, so that the answer will end."""
        since = self._idle_since
        is_late = since is not None and time.monotonic() - since >= ABANDONED_S
        return not self._is_over and not is_late

    def __next__(self) -> GenerationEvent:
        """Compute the next event; wait for other uses of the model first.

        Raises:
            EngineError: the model was closed or asked something else, or a device failed.
        """
        use = Use("it computes an answer", replaces=not self._has_begun, answer=self)
        self._idle_since = None
        try:
            try:
                self._occupancy.enter(use, never if self._has_begun else self._is_cancelled)
            except Cancelled:
                return self._cancelled()
            return self._read()
        finally:
            self.reader, self._idle_since = use.thread, time.monotonic()
            self._occupancy.leave(use)

    def _read(self) -> GenerationEvent:
        """Return the next event; the model is in use for it."""
        if self._is_over:
            raise StopIteration
        self._has_begun = True
        is_over = True
        try:
            event = next(self._events)
            is_over = isinstance(event, Finished)
        finally:
            self._is_over = is_over
        return event

    def _cancelled(self) -> GenerationEvent:
        """Return the end of an answer that was cancelled before it could begin."""
        if self._is_over:
            raise StopIteration
        self._is_over = True
        return Finished("cancelled", Usage(), Timings())

    def close(self) -> None:
        """End the answer where it is, so that nobody waits for it any more."""
        self._is_over = True
        self._occupancy.wake()
