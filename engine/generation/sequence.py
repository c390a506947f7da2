"""Answers under way: what each wants computed, and its events that nobody has read yet."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from engine.decoding.sampling.sampler import SamplingWish
from engine.errors import ContextOverflow, EngineError, PromptError
from engine.generation.results import Finished, GenerationEvent, PrefillProgress, Timings, Usage
from engine.util.progress import IsCancelled, never
from engine.vision.images.placed import NO_PICTURES, PlacedPictures, text_ids

if TYPE_CHECKING:
    from engine.decoding.grammar.matcher import Mask
    from engine.decoding.sampling.sampler import Logits, Sampler
    from engine.generation.cache_manager import CachePlace

EXIT_S = 4.0
"""Longest time that the program's end waits for threads, in seconds."""

T = TypeVar("T")

_threads: dict[threading.Thread, Background] = {}
"""What runs now."""


class Background:
    """A function that a thread runs for one answer or question, which waits for its result.

    Args:
        act: the function; what it is given returns True once nobody wants the result.
    """

    def __init__(self, act: Callable[[IsCancelled], Any]) -> None:
        self._act = act
        self._is_cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.is_done = False

    def start(self, on_done: Callable[[], object]) -> None:
        """Start the thread.

        Args:
            on_done: called on it once there is a result or an error.
        """

        def run() -> None:
            self.run(on_done)
            del _threads[thread]

        thread = threading.Thread(target=run, name="tandem-background", daemon=True)
        _threads[thread] = self
        try:
            thread.start()
        except RuntimeError as error:  # "can't start new thread"
            del _threads[thread]
            self._error = EngineError(f"No thread can be started: {error}.", "Try again later.")
            self.is_done = True
            on_done()

    def cancel(self) -> None:
        """Ask the function to end; return at once."""
        self._is_cancelled = True

    def result(self) -> Any:
        """Return what the function has returned, or raise what it has raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def run(self, on_done: Callable[[], object] = never) -> None:
        """Run the function; see `start`, which has a thread do so."""
        try:
            self._result = self._act(lambda: self._is_cancelled)
        except BaseException as error:  # noqa: BLE001 raised again by `result`
            self._error = error
        self.is_done = True
        on_done()


Preparing: TypeAlias = Generator[Background, object, T]
"""A step of an answer that waits for a thread, and returns what it has prepared."""


def in_background(act: Callable[[IsCancelled], T]) -> Preparing[T]:
    """Have the scheduler run a function on a thread; return its result once it is there."""
    work = Background(act)
    try:
        yield work
        result: T = work.result()
        return result
    finally:
        work.cancel()


@atexit.register
def end_threads() -> None:
    """End what runs: a program whose thread compiles a grammar at its end would crash."""
    end = time.monotonic() + EXIT_S
    running = dict(_threads)
    for background in running.values():
        background.cancel()
    for thread in running:
        thread.join(max(0.0, end - time.monotonic()))


@dataclass(slots=True)
class Prefill:
    """Work that makes the cache hold `ids`, computing those that it does not hold yet.

    Attributes:
        ids: all tokens of the sequence.
        marks: numbers of tokens behind which a later prompt may go on otherwise, so that the states
            that cannot be cut are worth keeping there.
        is_told: whether its progress is an event.
        n_cached: number of the tokens that were cached, noted by who does it.
        pictures: pictures among the tokens.
    """

    ids: Sequence[int]
    marks: Sequence[int] = ()
    is_told: bool = True
    n_cached: int = 0
    pictures: PlacedPictures = NO_PICTURES


@dataclass(slots=True)
class Follow:
    """Work that computes one token behind those computed so far.

    Attributes:
        token: id of the token.
        sampler, never: how the next token is to be sampled, where a device can; see `TokenSource`.
        n_left: number of tokens that may still be sampled.
        is_timed: whether the token's times are an event.
        wants_logits: whether the result has to be logits, so that no device may sample.
        allowed: returns which tokens may come next, (at most n_vocab,); None for all. A device that
            samples ahead cannot know.
    """

    token: int
    sampler: Sampler
    never: Sequence[int]
    n_left: int
    is_timed: bool = False
    wants_logits: bool = False
    allowed: Callable[[], Mask] | None = None

    @property
    def wish(self) -> SamplingWish | None:
        """Settings by which a device may sample the next token; None if the host must."""
        if self.wants_logits:
            return None
        return SamplingWish(self.sampler, self.never, self.allowed)


Work: TypeAlias = Prefill | Follow

NotDone = Literal["cancelled", "context"]
"""Reason why work was not done: the answer was cancelled, or the cache has no room for it."""

Found: TypeAlias = "Logits | int | NotDone"
"""Result of work: logits (n_vocab,) of the last token, the next token, or why there is none."""

Steps: TypeAlias = "Generator[GenerationEvent | Work | Background, Found | None, None]"
"""An answer under way: the result of work is sent to it, and None behind anything else."""


def check_prompt(
    ids: Sequence[int], n_vocab: int, n_ctx: int, pictures: PlacedPictures = NO_PICTURES
) -> None:
    """Check that tokens can be computed.

    Args:
        pictures: pictures among them.

    Raises:
        PromptError: no tokens, or tokens that the model does not have.
        ContextOverflow: more than the context holds.
    """
    if not ids:
        raise PromptError("The prompt is empty.", "Write something first.")
    texts = text_ids(ids) if pictures else ids
    if texts and not 0 <= min(texts) <= max(texts) < n_vocab:
        raise PromptError(f"The prompt has token ids outside 0 to {n_vocab - 1}.")
    if len(ids) > n_ctx:
        raise ContextOverflow(len(ids), n_ctx)


MOST_UNREAD = 8
"""Number of unread events at which an answer is not computed further."""


class Request:
    """One answer under way.

    Args:
        steps: the answer; it begins when it is first advanced.
        is_cancelled: asked before each pass; returning True ends the answer.
        wake: called, on any thread, once the answer can go on after a `Background`.

    Attributes:
        events: events that nobody has read yet.
        error: error that ended the answer, until somebody has read it; None without one.
        is_over: whether nothing more comes behind `events`.
        is_dropped: whether nobody will read it any more; see `drop`.
        work: what the answer waits for; None before it has begun.
        background: what a thread does for it, which it waits for instead; None for nothing.
        wanted: tokens that the cache has to hold for it.
        pictures: pictures among them.
        place: its place in the cache; None while it has none.
        is_ahead: whether what is in `place` is not what the answer goes on from.
        n_drafted: number of its next tokens that were guessed and checked.
        n_accepted: number of these guesses that were right.
        saved_s: seconds that these guesses saved so far, less what checking them took.
        saved_by_one_s: seconds that a right guess of the present pass saves.
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
        self.work: Work | None = None
        self.background: Background | None = None
        self.wanted: list[int] = []
        self.pictures = NO_PICTURES
        self.place: CachePlace | None = None
        self.n_drafted = self.n_accepted = 0
        self.saved_s = self.saved_by_one_s = 0.0
        self._n_cached: int | None = None
        self._n_told = 0

    @property
    def has_unread(self) -> bool:
        """Whether so many events are unread that the answer need not be computed further."""
        return len(self.events) >= MOST_UNREAD

    @property
    def n_missing(self) -> int:
        """Number of tokens that have to be computed until its work is done."""
        return len(self.wanted) - (self.place.n if self.place else 0)

    def marks(self, n_past: int) -> list[int]:
        """Return where recurrent states are worth keeping behind the first n tokens.

        That includes the last token but one, as the logits of the last are wanted.
        """
        if not isinstance(self.work, Prefill):
            return []
        marks = (*self.work.marks, len(self.work.ids) - 1)
        return [mark for mark in marks if mark > n_past]

    def advance(self, found: Found | None) -> None:
        """Send the result of its work to the answer, which then wants something else or is over.

        Raises:
            BaseException: whatever the answer raises; it is over then.
        """
        self.background = None
        try:
            while True:
                item = self._steps.send(found)
                found = None
                if isinstance(item, Prefill | Follow):
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
        """Tell the answer that its work does not fit into the cache."""
        if isinstance(self.work, Follow):
            self.wanted.pop()
        self.advance("context")

    def cancel(self) -> None:
        """End the answer as cancelled."""
        if self.work is None and self.background is None:
            self.advance(None)
        if self.background is not None:
            self.close()
            self.events.append(Finished("cancelled", Usage(), Timings()))
        elif not self.is_over:
            self.advance("cancelled")

    def drop(self) -> None:
        """Note that nobody will read the answer any more; at any time, on any thread."""
        self.is_dropped = True
        if (background := self.background) is not None:
            background.cancel()

    def fail(self, error: BaseException) -> None:
        """End the answer with an error."""
        self.background = None
        self._steps.close()
        self.error, self.is_over = error, True

    def close(self) -> None:
        """End the answer where it is."""
        self.background = None
        self._steps.close()
        self.is_over = True

    def note_place(self) -> None:
        """Note how many of the tokens of its work were cached, the first time it has a place."""
        if isinstance(self.work, Prefill) and self._n_cached is None and self.place:
            self.work.n_cached = self._n_cached = self.place.n

    def tell_progress(self, n_running: int) -> None:
        """Make an event of the progress of a prompt, if there is any since the last one.

        Args:
            n_running: number of tokens that devices have not computed yet.
        """
        if not isinstance(self.work, Prefill) or not self.work.is_told:
            return
        assert self.place is not None
        assert self._n_cached is not None
        n_done = self.place.n - self._n_cached
        if n_done > self._n_told:
            self._n_told = n_done
            total = len(self.wanted) - self._n_cached
            self.events.append(PrefillProgress(max(0, n_done - n_running), total))

    def note_ahead(self, ids: Sequence[int]) -> None:
        """Note that a device has computed tokens behind those that the answer wanted."""
        if self.place is not None:
            self.place.sequence.append(ids)
            self.is_ahead = True

    def _take(self, work: Work) -> None:
        self.work = work
        if isinstance(work, Follow):
            self.wanted.append(work.token)
        else:
            self.wanted, self.pictures = list(work.ids), work.pictures
            self._n_cached, self._n_told = None, 0
