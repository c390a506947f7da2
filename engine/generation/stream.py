"""Takes turns between threads that call one model, of which one at a time computes.

A *use* is a call while it computes: all of most methods, but one step of the answers under way.
Uses follow each other in the order in which they came.
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

from engine.errors import Cancelled, EngineError, ModelBusy
from engine.generation.results import Finished, GenerationEvent, Timings, Usage
from engine.generation.sequence import TokenSequence
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from engine.generation.scheduler import Scheduler
    from engine.generation.sequence import Steps

P = ParamSpec("P")
R = TypeVar("R")

POLL_S = 0.05
"""Seconds between two looks of a waiting thread at what nobody tells it, such as `is_cancelled`."""

EXIT_S = 2.0
"""Longest time that the program's end waits for a use, in seconds."""


class Use:
    """One call of a model while it computes, or waits for others that do.

    Args:
        doing: what the model is doing then, such as "it is being split anew".
        closes: whether it closes the model.

    Attributes:
        thread: identifier of the calling thread.
    """

    __slots__ = ("closes", "doing", "thread")

    def __init__(self, doing: str, *, closes: bool = False) -> None:
        self.doing, self.closes = doing, closes
        self.thread = threading.get_ident()


class Occupancy:
    """The uses of one model: the one under way, and those that wait.

    Attributes:
        is_closing: whether the model is closed, or about to be.
    """

    def __init__(self) -> None:
        self.is_closing = False
        self._lock = threading.RLock()  # a signal's handler may come in twice
        self._changed = threading.Condition(self._lock)
        self._users: dict[int, Use] = {}  # one at most; `setdefault` tests and sets at once
        self._waiting: list[Use] = []
        self._free: Callable[[], None] | None = None
        self._called_back = threading.local()
        _models.add(self)
        _watch_exit()

    @contextmanager
    def use(self, doing: str, is_cancelled: IsCancelled = never) -> Iterator[IsCancelled]:
        """Use the model, alone; wait for others first.

        Yields:
            A check that is also true once the model is to be closed.

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
        return getattr(self._called_back, "is_running", False)

    def enter(self, use: Use, is_cancelled: IsCancelled = never) -> None:
        """Begin a use; `leave` has to follow, also after an error.

        Raises:
            ModelBusy: the call comes from inside the use under way.
            EngineError: the model has been closed.
            Cancelled: `is_cancelled` was true while others were waited for.
        """
        if not self._waiting and self._takes(use):
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

    def check_open(self) -> None:
        """Check that the model is there, for what needs it but computes nothing.

        Raises:
            EngineError: it has been closed.
        """
        if self.is_closing:
            raise EngineError("The model has been unloaded.", "Load it again.")

    def _wait(self, use: Use, is_cancelled: IsCancelled) -> None:
        """Begin a use once it is the next one."""
        try:
            with self._lock:
                self._waiting.insert(0 if use.closes else len(self._waiting), use)
            while not self._has_begun(use):
                if is_cancelled():
                    raise Cancelled("Waiting for the model")
        finally:
            with self._lock:
                if use in self._waiting:
                    self._waiting.remove(use)
                    self._changed.notify_all()

    def _has_begun(self, use: Use) -> bool:
        """Begin a use if it is the next one, else wait a moment; return whether it has begun."""
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
    """Have `_end_uses` called when the program ends.

    That comes before what was registered earlier, so before weak references end the threads of a
    model that was loaded already.
    """
    atexit.register(_end_uses)


def _end_uses() -> None:
    """Wait for the uses under way, and let no other begin.

    Threads that do not keep a program alive may compute beyond its end. Python ends them where they
    come back to it, which aborts the program if that is in the middle of C++.
    """
    end = time.monotonic() + EXIT_S
    for occupancy in list(_models):
        with suppress(EngineError):  # it is closed, or takes longer
            occupancy.enter(Use("the program is ending"), lambda: time.monotonic() > end)


class AnswerStream(Iterator[GenerationEvent]):
    """The events of one answer of a model; threads that read it together share the events.

    Whoever finds no event computes a step of all answers of the model. One that nobody reads is
    computed a few events further, and one that nobody holds any more gives way with the next step.

    Args:
        occupancy: uses of the model; each step is one.
        steps: the answer, which begins when its first event is read.
        is_cancelled: asked before each step, on whichever thread computes it.
        wake: set once the answer can go on after it has waited for a thread; None for an event of
            its own.
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
        """Tokens of the prompt and the answer, as far as the answer wanted them to be computed."""
        return self._sequence.tokens

    @property
    def is_over(self) -> bool:
        """Whether all events were read, and an error that has ended the answer."""
        sequence = self._sequence
        return self._is_closed or (
            sequence.is_over and not sequence.events and sequence.error is None
        )

    @property
    def is_waiting(self) -> bool:
        """Whether there is no event, and none comes before a thread has prepared the answer."""
        return self._sequence.background is not None and not self._sequence.events

    def __next__(self) -> GenerationEvent:
        """Return the next event; compute, or wait for others that do, until there is one.

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
        """Return the events that are there already; for who computes steps, see `Model.step`.

        Raises:
            EngineError: see `__next__`; not before all events were returned.
        """
        if not self._has_begun:
            with self._occupancy.use("it computes an answer"):
                self._begin()
        found = []
        while (event := self._taken()) is not None:
            found.append(event)
        error = self._sequence.error
        if error is not None and not found:
            self._sequence.error = None
            raise error
        return found

    def _begin(self) -> None:
        """Have the answer computed from the next step on."""
        self._has_begun = True
        self._scheduler.submit(self._sequence)

    def _taken(self) -> GenerationEvent | None:
        """Take the first event, if there is one and no other thread takes it."""
        try:
            return self._sequence.events.popleft()
        except IndexError:
            return None

    def _step(self) -> None:
        """Compute a step, unless another thread has done so meanwhile.

        Raises:
            Cancelled: the answer was cancelled while it waited to begin.
        """
        use, sequence = Use("it computes an answer"), self._sequence
        try:
            self._occupancy.enter(use, never if self._has_begun else self._is_cancelled)
            if not self._has_begun:
                self._begin()
            if not sequence.events and not sequence.is_over:
                self._compute()
        finally:
            self._occupancy.leave(use)

    def _compute(self) -> None:
        """Compute a step; what interrupts it, such as a person, ends this answer and no other."""
        try:
            self._scheduler.step()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        """Wait a moment for the thread that prepares the answer, while others may compute."""
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
        """End the answer where it is; its pages are free with the next step."""
        self._is_closed = True
        self._sequence.drop()

    def __del__(self) -> None:
        """Give way; a finalizer may run in the middle of anything, so it takes no lock."""
        self._sequence.drop()
