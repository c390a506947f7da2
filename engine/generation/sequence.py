"""One sequence: its tokens, its status, the next step to compute, and its unread events.

Its answer is a generator (`Steps`): it yields events, `Background` work to run on a thread, and
steps to compute (`Prefill`, `Decode`), and receives the results of the steps.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from engine.decoding.sampling.sampler import SamplingRequest
from engine.errors import ContextOverflow, EngineError, PromptError
from engine.generation.results import Finished, GenerationEvent, PrefillProgress, Timings, Usage
from engine.util.progress import IsCancelled, never
from engine.vision.images.placed import NO_IMAGES, PlacedImages, text_ids

if TYPE_CHECKING:
    from engine.decoding.grammar.matcher import Mask
    from engine.decoding.sampling.sampler import Logits, Sampler
    from engine.generation.cache_manager import SequenceCache

EXIT_S = 4.0
"""Seconds that the program waits for threads at exit."""

T = TypeVar("T")

_threads: dict[threading.Thread, Background] = {}
"""Background work in progress, by thread."""


class Background:
    """A function run on a thread for one answer or question, which waits for its result.

    Args:
        act: the function; its argument returns True when the result is no longer needed.
    """

    def __init__(self, act: Callable[[IsCancelled], Any]) -> None:
        self._act = act
        self._is_cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.is_done = False

    def start(self, on_done: Callable[[], object]) -> None:
        """Start the thread, which calls `on_done` when there is a result or an error."""

        def run() -> None:
            self.run(on_done)
            del _threads[thread]

        thread = threading.Thread(target=run, name="tandem-background", daemon=True)
        _threads[thread] = self
        try:
            thread.start()
        except RuntimeError as error:  # "can't start new thread"
            del _threads[thread]
            self._error = EngineError(
                "No thread can be started: {problem}.", "Try again later.", problem=str(error)
            )
            self.is_done = True
            on_done()

    def cancel(self) -> None:
        """Ask the function to stop, without waiting for it."""
        self._is_cancelled = True

    def result(self) -> Any:
        """Return the function's result, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._result

    def run(self, on_done: Callable[[], object] = never) -> None:
        """Run the function on the calling thread; see `start`."""
        try:
            self._result = self._act(lambda: self._is_cancelled)
        except BaseException as error:  # noqa: BLE001 re-raised by `result`
            self._error = error
        self.is_done = True
        on_done()


Preparing: TypeAlias = Generator[Background, object, T]
"""Part of an answer that waits for a thread and returns its result."""


def in_background(act: Callable[[IsCancelled], T]) -> Preparing[T]:
    """Have the scheduler run a function on a thread, and return its result."""
    work = Background(act)
    try:
        yield work
        result: T = work.result()
        return result
    finally:
        work.cancel()


@atexit.register
def end_threads() -> None:
    """Cancel running work, as a thread that compiles a grammar at exit would crash the program."""
    end = time.monotonic() + EXIT_S
    running = dict(_threads)
    for background in running.values():
        background.cancel()
    for thread in running:
        thread.join(max(0.0, end - time.monotonic()))


@dataclass(slots=True)
class Prefill:
    """Step that brings `ids` into the cache, computing the missing ones.

    Attributes:
        ids: all tokens of the sequence.
        marks: lengths after which a later prompt may diverge, so that a checkpoint of recurrent
            states is useful there.
        reports_progress: whether to send progress events.
        n_cached: number of these tokens that were cached; set by the scheduler.
        images: images among the tokens.
    """

    ids: Sequence[int]
    marks: Sequence[int] = ()
    reports_progress: bool = True
    n_cached: int = 0
    images: PlacedImages = NO_IMAGES


@dataclass(slots=True)
class Decode:
    """Step that computes the next token.

    Attributes:
        token: id of the token.
        sampler, never: how a device may sample the token after it; see `TokenSource`.
        n_left: number of tokens that may still be sampled.
        is_timed: whether to send the token's times as an event.
        wants_logits: whether the result must be logits, so that no device may sample.
        allowed: returns the mask of allowed tokens, (at most n_vocab,); None if all are allowed. A
            device that samples ahead cannot use it.
    """

    token: int
    sampler: Sampler
    never: Sequence[int]
    n_left: int
    is_timed: bool = False
    wants_logits: bool = False
    allowed: Callable[[], Mask] | None = None

    @property
    def sampling_request(self) -> SamplingRequest | None:
        """Settings with which a device may sample the next token; None if the host must."""
        if self.wants_logits:
            return None
        return SamplingRequest(self.sampler, self.never, self.allowed)


Step: TypeAlias = Prefill | Decode

NotDone = Literal["cancelled", "context"]
"""Reason why a step was not computed: the answer was cancelled, or the cache has no room for it."""

StepResult: TypeAlias = "Logits | int | NotDone"
"""Result of a step: the last token's logits (n_vocab,), the next token, or why there is neither."""

Steps: TypeAlias = "Generator[GenerationEvent | Step | Background, StepResult | None, None]"
"""Generator for an unfinished answer; it receives each step's result, and None for other items."""


def check_prompt(
    ids: Sequence[int], n_vocab: int, n_ctx: int, images: PlacedImages = NO_IMAGES
) -> None:
    """Check that tokens can be computed.

    Raises:
        PromptError: there are no tokens, or some that the model does not have.
        ContextOverflow: there are more than fit in the context.
    """
    if not ids:
        raise PromptError("The prompt is empty.", "Write something first.")
    texts = text_ids(ids) if images else ids
    if texts and not 0 <= min(texts) <= max(texts) < n_vocab:
        raise PromptError("The prompt has token ids outside the range 0 to {n}.", n=n_vocab - 1)
    if len(ids) > n_ctx:
        raise ContextOverflow(len(ids), n_ctx)


MAX_UNREAD = 8
"""Number of unread events at which an answer pauses."""


class Status(Enum):
    """State of a sequence."""

    NEW = auto()
    """Not started."""

    PREPARING = auto()
    """Being prepared on a thread (`Background`)."""

    WAITING = auto()
    """Ready for its next step, but not in the cache: not admitted, or preempted."""

    RUNNING = auto()
    """In the cache and ready for its next step."""

    FINISHED = auto()
    """Complete, except for unread events."""


class TokenSequence:
    """The tokens of one answer and its prompt.

    Args:
        steps: the answer; it starts with the first `advance`.
        is_cancelled: called before each pass; returning True ends the answer.
        wake: called, on any thread, when the answer can continue after a `Background`.

    Attributes:
        tokens: all tokens that must be in the cache for the next step.
        images: images among these tokens.
        step: next step; None until the answer has started.
        cache: its part of the cache; None unless it is running.
        background: work on a thread that it is waiting for, if any.
        events: unread events.
        error: error that ended the answer, until it is read.
        is_over: whether there will be no further events.
        is_dropped: whether it will no longer be read; see `drop`.
        is_ahead: whether `cache` does not match the answer's tokens.
        saved_s: seconds that drafts have saved so far, net of verifying them.
        saved_by_one_s: seconds saved by each accepted draft in the current pass.
    """

    def __init__(
        self, steps: Steps, is_cancelled: IsCancelled = never, wake: Callable[[], object] = never
    ) -> None:
        self._steps = steps
        self.is_cancelled = is_cancelled
        self._wake = wake
        self.events: deque[GenerationEvent] = deque()
        self.error: BaseException | None = None
        self.is_over = self.is_dropped = self.is_ahead = False
        self.step: Step | None = None
        self.background: Background | None = None
        self.tokens: list[int] = []
        self.images = NO_IMAGES
        self.cache: SequenceCache | None = None
        self.n_drafted = self.n_accepted = 0
        self.saved_s = self.saved_by_one_s = 0.0
        self._n_cached: int | None = None
        self._n_reported = 0

    @property
    def status(self) -> Status:
        """State of the sequence."""
        if self.is_over:
            return Status.FINISHED
        if self.background is not None:
            return Status.PREPARING
        if self.step is None:
            return Status.NEW
        return Status.RUNNING if self.cache else Status.WAITING

    @property
    def has_unread(self) -> bool:
        """Whether there are so many unread events that the answer pauses."""
        return len(self.events) >= MAX_UNREAD

    @property
    def n_missing(self) -> int:
        """Number of tokens still to compute for its step."""
        return len(self.tokens) - (self.cache.n if self.cache else 0)

    def marks(self, n_past: int) -> list[int]:
        """Return the lengths beyond `n_past` at which to checkpoint recurrent states.

        They include the length without the last token, which is computed again for its logits.
        """
        if not isinstance(self.step, Prefill):
            return []
        marks = (*self.step.marks, len(self.step.ids) - 1)
        return [mark for mark in marks if mark > n_past]

    def advance(self, result: StepResult | None) -> None:
        """Send the result of its step to the answer, which yields the next step or ends.

        Raises:
            BaseException: any exception that the answer raised, which has ended it.
        """
        self.background = None
        try:
            while True:
                item = self._steps.send(result)
                result = None
                if isinstance(item, Prefill | Decode):
                    self._take(item)
                    return
                if isinstance(item, Background):
                    self.background = item
                    item.start(self._wake)
                    return
                if isinstance(item, Finished):
                    self.is_over = True
                    drafts = {"n_drafted": self.n_drafted, "n_accepted": self.n_accepted}
                    timings = replace(item.timings, saved_s=self.saved_s)
                    item = replace(item, usage=replace(item.usage, **drafts), timings=timings)
                self.events.append(item)
        except StopIteration:
            self.is_over = True
        except BaseException:
            self.is_over = True
            raise

    def refuse(self) -> None:
        """Resume the answer, telling it that its step does not fit in the cache."""
        if isinstance(self.step, Decode):
            self.tokens.pop()
        self.advance("context")

    def cancel(self) -> None:
        """End the answer as cancelled."""
        if self.step is None and self.background is None:
            self.advance(None)
        if self.background is not None:
            self.close()
            self.events.append(Finished("cancelled", Usage(), Timings()))
        elif not self.is_over:
            self.advance("cancelled")

    def cancel_if_asked(self) -> None:
        """End the answer if `is_cancelled` returns True."""
        if self.is_cancelled():
            self.cancel()

    def drop(self) -> None:
        """Mark the answer as no longer read; thread-safe."""
        self.is_dropped = True
        if (background := self.background) is not None:
            background.cancel()

    def fail(self, error: BaseException) -> None:
        """End the answer with an error."""
        self.background = None
        self._steps.close()
        self.error, self.is_over = error, True

    def close(self) -> None:
        """End the answer without further events."""
        self.background = None
        self._steps.close()
        self.is_over = True

    def note_cached(self) -> None:
        """Note how many of its prompt's tokens were cached when it was first admitted."""
        if isinstance(self.step, Prefill) and self._n_cached is None and self.cache:
            self.step.n_cached = self._n_cached = self.cache.n

    def report_progress(self, n_running: int) -> None:
        """Add a progress event if the prompt has progressed.

        Args:
            n_running: number of tokens that devices have not computed yet.
        """
        if not isinstance(self.step, Prefill) or not self.step.reports_progress:
            return
        assert self.cache is not None
        assert self._n_cached is not None
        n_done = self.cache.n - self._n_cached
        if n_done > self._n_reported:
            self._n_reported = n_done
            total = len(self.tokens) - self._n_cached
            self.events.append(PrefillProgress(max(0, n_done - n_running), total))

    def note_ahead(self, ids: Sequence[int]) -> None:
        """Add tokens that a device has computed past the end of the answer."""
        if self.cache is not None:
            self.cache.sequence.append(ids)
            self.is_ahead = True

    def _take(self, step: Step) -> None:
        self.step = step
        if isinstance(step, Decode):
            self.tokens.append(step.token)
        else:
            self.tokens, self.images = list(step.ids), step.images
            self._n_cached, self._n_reported = None, 0
