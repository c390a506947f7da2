"""Mutual exclusion between threads that call one model, and answer streams.

A *use* is the part of a call that computes: usually the whole call, for an answer a single step.
Uses run in order of arrival.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from engine.errors import Cancelled, EngineError, ModelBusy, Sentence
from engine.generation.results import Finished, GenerationEvent, Timings, Usage
from engine.generation.sequence import TokenSequence
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from engine.generation.scheduler import Scheduler
    from engine.generation.sequence import Steps

P = ParamSpec("P")
R = TypeVar("R")

POLL_S = 0.05
"""Seconds between a waiting thread's checks for changes that do not notify it, such as
`is_cancelled`."""

COMPUTING = Sentence("it is computing an answer")

EXIT_S = 2.0
"""Seconds that the program waits for a use at exit."""


class Use:
    """One call to a model while it computes, or waits for others that do.

    Args:
        doing: what the model is doing, for example "it is being re-split".
        closes: whether it closes the model.

    Attributes:
        thread: identifier of the calling thread.
    """

    __slots__ = ("closes", "doing", "thread")

    def __init__(self, doing: str, *, closes: bool = False) -> None:
        self.doing, self.closes = doing, closes
        self.thread = threading.get_ident()


class Occupancy:
    """The uses of one model: active and waiting.

    Attributes:
        is_closing: whether the model is closed or about to be.
    """

    def __init__(self) -> None:
        self.is_closing = False
        self._lock = threading.RLock()  # a signal handler may acquire it again
        self._changed = threading.Condition(self._lock)
        self._users: dict[int, Use] = {}  # at most one; `setdefault` is an atomic test-and-set
        self._waiting: list[Use] = []
        self._free: Callable[[], None] | None = None
        self._called_back = threading.local()
        _models.add(self)
        _watch_exit()

    @contextmanager
    def use(self, doing: str, is_cancelled: IsCancelled = never) -> Iterator[IsCancelled]:
        """Use the model exclusively, after waiting for others.

        Yields:
            `is_cancelled`, extended to also return True when the model is about to be closed.

        Raises:
            EngineError: see `enter`.
        """
        use = Use(doing)
        try:
            self.enter(use, is_cancelled)
            yield self.called_back(lambda: self.is_closing or is_cancelled())
        finally:
            self.leave(use)

    def called_back(self, callback: Callable[P, R]) -> Callable[P, R]:
        """Return a function that calls `callback`, on any thread, as part of the active use.

        The use waits for the callback, so if that calls the model, the call is refused.
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
        return getattr(self._called_back, "is_running", False)

    def enter(self, use: Use, is_cancelled: IsCancelled = never) -> None:
        """Start a use; `leave` must follow, even after an error.

        Raises:
            ModelBusy: the call comes from inside the active use.
            EngineError: the model has been closed.
            Cancelled: `is_cancelled` was true while waiting for others.
        """
        if not self._waiting and self._takes(use):
            return
        with self._lock:
            if (user := self._inside()) is not None:
                raise ModelBusy(user.doing)
        self._wait(use, is_cancelled)

    def _takes(self, use: Use) -> bool:
        if self._users.setdefault(0, use) is not use:
            return False
        if self.is_closing and not use.closes:
            self._users.clear()
            return False
        return True

    def leave(self, use: Use) -> None:
        """End a use; no effect if it has not started."""
        if self._users.get(0) is not use:
            return
        if self._free is not None:
            free, self._free = self._free, None
            free()
        self._users.clear()
        if self._waiting:
            with self._lock:
                self._changed.notify_all()

    def close(self, free: Callable[[], None]) -> None:
        """Cancel the active use, wait for it, and free the model; safe to call twice.

        From inside a use (a callback, a signal handler), it returns immediately, and the use frees
        the model at its end.

        Args:
            free: frees the model; it must not raise.
        """
        with self._lock:
            self.is_closing = True
            self._changed.notify_all()
            if self._inside() is not None:
                self._free = free
                return
        use = Use(Sentence("it is being closed"), closes=True)
        try:
            self.enter(use)
            free()
        finally:
            self.leave(use)

    def _inside(self) -> Use | None:
        """Return the active use if the caller is inside it and so cannot wait for it."""
        user = self._users.get(0)
        if user is not None and (user.thread == threading.get_ident() or self._is_called_back):
            return user
        return None

    def check_open(self) -> None:
        """Check that the model is open, for calls that compute nothing.

        Raises:
            EngineError: it has been closed.
        """
        if self.is_closing:
            raise EngineError("The model has been unloaded.", "Load it again.")

    def _wait(self, use: Use, is_cancelled: IsCancelled) -> None:
        try:
            with self._lock:
                self._waiting.insert(0 if use.closes else len(self._waiting), use)
            while not self._has_begun(use):
                if is_cancelled():
                    raise Cancelled(Sentence("Waiting for the model"))
        finally:
            with self._lock:
                if use in self._waiting:
                    self._waiting.remove(use)
                    self._changed.notify_all()

    def _has_begun(self, use: Use) -> bool:
        """Start a use if it is next, else wait a moment; return whether it has started."""
        with self._lock:
            if not use.closes:
                self.check_open()
            if use is self._waiting[0] and self._takes(use):
                self._waiting.remove(use)
                return True
            self._changed.wait(POLL_S)
            return False


_models: weakref.WeakSet[Occupancy] = weakref.WeakSet()


@cache
def _watch_exit() -> None:
    """Register `_end_uses` to run at exit, before finalizers stop the threads of loaded models."""
    atexit.register(_end_uses)


def _end_uses() -> None:
    """Wait for active uses, and let no others start.

    Python kills daemon threads when they return to it, which aborts programs inside C++ code.
    """
    end = time.monotonic() + EXIT_S
    for occupancy in list(_models):
        with suppress(EngineError):  # the model is closed, or the use takes longer
            use = Use(Sentence("the program is ending"))
            occupancy.enter(use, lambda: time.monotonic() > end)


class AnswerStream(Iterator[GenerationEvent]):
    """The events of one answer; several threads that read it share the events.

    If the queue is empty, a reader runs one step for all of the model's answers. An answer that is
    not read pauses after a few events, and one that is dropped ends with the next step.

    Args:
        occupancy: the model's uses; each step is one.
        steps: the answer, which starts when its first event is read.
        is_cancelled: called before each step, on the thread that computes it.
        wake: event to set when the answer can continue after background work; None for a new one.
    """

    def __init__(
        self, occupancy: Occupancy, scheduler: Scheduler, steps: Steps, is_cancelled: IsCancelled,
        wake: threading.Event | None = None,
    ) -> None:  # fmt: skip
        self._occupancy, self._scheduler, self._is_cancelled = occupancy, scheduler, is_cancelled
        self._wake = wake or threading.Event()
        self._sequence = TokenSequence(steps, occupancy.called_back(is_cancelled), self._wake.set)
        self._has_begun = self._is_closed = False

    @property
    def ids(self) -> Sequence[int]:
        """Tokens of the prompt and answer that are computed, or are computed next."""
        return self._sequence.tokens

    @property
    def is_over(self) -> bool:
        """Whether all events, and any error that ended the answer, have been read."""
        sequence = self._sequence
        return self._is_closed or (
            sequence.is_over and not sequence.events and sequence.error is None
        )

    @property
    def is_waiting(self) -> bool:
        """Whether there will be no event until background work is done."""
        return self._sequence.background is not None and not self._sequence.events

    def __next__(self) -> GenerationEvent:
        """Return the next event; until there is one, compute or wait for others that compute.

        Raises:
            EngineError: the prompt cannot be used, the model was closed, or a device failed.
        """
        sequence = self._sequence
        while not self._is_closed:
            event = self._taken()
            if event is not None:
                return event
            if sequence.is_over:
                break
            try:
                self._step()
            except Cancelled:
                return self._cancelled()
            if sequence.background is not None and self._scheduler.is_idle:
                self._wait()
        error, sequence.error = sequence.error, None
        self._is_closed = True
        if error is not None:
            raise error
        raise StopIteration

    def ready(self) -> list[GenerationEvent]:
        """Return the queued events, without computing; see `Model.step`.

        Raises:
            EngineError: see `__next__`; only after all events were returned.
        """
        if not self._has_begun:
            with self._occupancy.use(COMPUTING):
                self._begin()
        events = []
        while (event := self._taken()) is not None:
            events.append(event)
        error = self._sequence.error
        if error is not None and not events:
            self._sequence.error = None
            raise error
        return events

    def _begin(self) -> None:
        self._has_begun = True
        self._scheduler.submit(self._sequence)

    def _taken(self) -> GenerationEvent | None:
        try:
            return self._sequence.events.popleft()
        except IndexError:
            return None

    def _step(self) -> None:
        use, sequence = Use(COMPUTING), self._sequence
        try:
            self._occupancy.enter(use, never if self._has_begun else self._is_cancelled)
            if not self._has_begun:
                self._begin()
            if not sequence.events and not sequence.is_over:
                self._compute()
        finally:
            self._occupancy.leave(use)

    def _compute(self) -> None:
        """Compute a step; an interruption such as Ctrl+C ends only this answer."""
        try:
            self._scheduler.step()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        try:
            self._wake.wait(POLL_S)
            self._wake.clear()
        except BaseException:
            self.close()
            raise

    def _cancelled(self) -> GenerationEvent:
        self._is_closed = True
        return Finished("cancelled", Usage(), Timings())

    def close(self) -> None:
        """End the answer; its pages are freed in the next step."""
        self._is_closed = True
        self._sequence.drop()

    def __del__(self) -> None:
        """Drop the answer without taking a lock, as a finalizer may run anywhere."""
        self._sequence.drop()
