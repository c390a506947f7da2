"""The events of one answer, computed while they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine.errors import Cancelled
from engine.generation.occupancy import POLL_S, Occupancy, Use
from engine.generation.results import Finished, GenerationEvent, Timings, Usage
from engine.generation.scheduling.requests import Request
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from engine.generation.scheduling.scheduler import Scheduler
    from engine.generation.work import Steps


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
        self._request = Request(steps, occupancy.called_back(is_cancelled), self._wake.set)
        self._has_begun = self._is_closed = False

    @property
    def ids(self) -> Sequence[int]:
        """Tokens of the prompt and the answer, as far as the answer wanted them to be computed."""
        return self._request.wanted

    @property
    def is_over(self) -> bool:
        """Whether all events were read, and an error that has ended the answer."""
        request = self._request
        return self._is_closed or (request.is_over and not request.events and request.error is None)

    @property
    def is_waiting(self) -> bool:
        """Whether there is no event, and none comes before a thread has prepared the answer."""
        return self._request.background is not None and not self._request.events

    def __next__(self) -> GenerationEvent:
        """Return the next event; compute, or wait for others that do, until there is one.

        Raises:
            EngineError: the prompt cannot be used, the model was closed, or a device failed.
        """
        request = self._request
        while not self._is_closed:
            event = self._taken()
            if event is not None:
                return event
            if request.is_over:
                break
            try:
                self._step()
            except Cancelled:
                return self._cancelled()
            if request.background is not None and self._scheduler.is_idle:
                self._wait()
        error, request.error = request.error, None
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
        error = self._request.error
        if error is not None and not found:
            self._request.error = None
            raise error
        return found

    def _begin(self) -> None:
        """Have the answer computed from the next step on."""
        self._has_begun = True
        self._scheduler.submit(self._request)

    def _taken(self) -> GenerationEvent | None:
        """Take the first event, if there is one and no other thread takes it."""
        try:
            return self._request.events.popleft()
        except IndexError:
            return None

    def _step(self) -> None:
        """Compute a step, unless another thread has done so meanwhile.

        Raises:
            Cancelled: the answer was cancelled while it waited to begin.
        """
        use, request = Use("it computes an answer"), self._request
        try:
            self._occupancy.enter(use, never if self._has_begun else self._is_cancelled)
            if not self._has_begun:
                self._begin()
            if not request.events and not request.is_over:
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
        self._request.drop()

    def __del__(self) -> None:
        """Give way; a finalizer may run in the middle of anything, so it takes no lock."""
        self._request.drop()
