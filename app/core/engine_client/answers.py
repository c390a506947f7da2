"""The answers that are being generated, and their statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from enum import Enum

from PySide6.QtCore import QObject, Signal

from engine import (
    THINK_CLOSE,
    THINK_OPEN,
    ContextShifted,
    Event,
    Failed,
    Finished,
    PrefillProgress,
    ThoughtMarker,
    TokenText,
    TokenTimes,
    ToolCallBegun,
    ToolCallText,
)


class EngineSignals(QObject):
    """The signals of `EngineClient`; the last argument of an answer's signals is the answer."""

    ready = Signal(object)  # EngineReady
    state_changed = Signal(object)  # EngineState
    load_progress = Signal(float)  # 0 to 1
    load_doing = Signal(str)  # current step of the load; "" while it only reads the file
    loaded = Signal(object)  # ModelLoaded
    load_failed = Signal(object)  # EngineError; Cancelled if it was stopped
    resplit_done = Signal(object)  # ModelResplit; preceded by `load_progress`
    resplit_failed = Signal(object)  # EngineError; the old split is kept unless `model` is None
    state_progress = Signal(float)  # 0 to 1, for the state that is being saved or loaded
    state_saved = Signal(object)  # StateSaved
    state_loaded = Signal(object)  # StateLoaded
    state_failed = Signal(object, object)  # EngineError, the SaveState or LoadState that failed
    tune_started = Signal(object)  # TuneEstimate
    tune_progress = Signal(object)  # TuneProgress
    tuned = Signal(object)  # TuneResult; the previous model is loaded again
    tune_failed = Signal(object)  # EngineError; the model is loaded again unless `model` is None
    unloaded = Signal()
    prefill = Signal(int, int, object)  # computed prompt tokens, all prompt tokens, RunningAnswer
    shifted = Signal(int, object)  # number of tokens dropped from a full context, RunningAnswer
    text = Signal(str, object)  # text, RunningAnswer
    called = Signal(object, object)  # ToolCallBegun or ToolCallText, RunningAnswer
    paced = Signal(object)  # RunningAnswer whose tokens per second were updated
    rate = Signal(float, int)  # combined tokens per second, number of answers; zeros at the end
    token_times = Signal(object)  # TokenTimes, only for some tokens
    finished = Signal(object, object)  # Finished, RunningAnswer
    failed = Signal(object, object)  # EngineError that ended an answer, RunningAnswer
    counted = Signal(object)  # TokensCounted, or None if counting failed
    lost = Signal(object, object)  # EngineError that unloaded the model, its ModelLoaded
    fallbacks_changed = Signal(object)  # tuple of Fallback: everything that now slows down the GPUs


RATE_WINDOW_S = 1.0


class TokenRate:
    """Meter for tokens per second over a short window."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._n_tokens = 0

    def count(self, n_tokens: int) -> None:
        if self._since is None:  # the first token says nothing about decoding
            self._since = time.perf_counter()
        else:
            self._n_tokens += n_tokens

    def due(self) -> float | None:
        """Return the rate once per window, otherwise None."""
        if self._since is None:
            return None
        seconds = time.perf_counter() - self._since
        if seconds < RATE_WINDOW_S:
            return None
        rate = self._n_tokens / seconds
        self._since, self._n_tokens = time.perf_counter(), 0
        return rate


class AnswerMeter:
    """Statistics of one answer, used if it is cut off.

    Attributes:
        asked_at: time of the request, by `time.perf_counter`.
        first_token_s: time to first token in seconds; 0 until then.
    """

    def __init__(self) -> None:
        self.asked_at = self._first = self._last = time.perf_counter()
        self.n_tokens = self._n_later = 0
        self.first_token_s = 0.0

    def count(self, n_tokens: int) -> None:
        """Count tokens that arrived together."""
        self._last = time.perf_counter()
        if self.n_tokens:
            self._n_later += n_tokens
        elif n_tokens:
            self._first, self.first_token_s = self._last, self._last - self.asked_at
        self.n_tokens += n_tokens

    @property
    def tokens_per_s(self) -> float:
        """Decode speed so far; 0 while unknown."""
        seconds = self._last - self._first
        return self._n_later / seconds if seconds > 0 else 0.0


class AnswerStage(Enum):
    WAITING = "waiting"
    READING = "reading"
    WRITING = "writing"


class RunningAnswer:
    """A requested answer; it keeps its final state after it has finished.

    Args:
        begun: token ids of the answer to continue.
        marker: adds marks around reasoning that arrives as separate parts.

    Attributes:
        number: id of its command.
        ids: its token ids so far, including `begun`.
        n_read, n_prompt: computed prompt tokens, and all prompt tokens; 0 while it waits.
        tokens_per_s: speed over the last second; 0 while unknown.
        was_alone: whether no other answer has run concurrently; if so, its speed is the model's.
    """

    def __init__(
        self, number: int, begun: Sequence[int] = (), marker: ThoughtMarker | None = None
    ) -> None:
        self.number = number
        self.marker = marker or ThoughtMarker()
        self.ids = list(begun)
        self.meter, self.rate = AnswerMeter(), TokenRate()
        self.n_read = self.n_prompt = 0
        self.tokens_per_s = 0.0
        self.stage = AnswerStage.WAITING
        self.was_alone = True


def marker_behind(text: str) -> ThoughtMarker:
    """Return the marker for an answer that continues a text, which may contain marks."""
    is_open = text.lstrip().startswith(THINK_OPEN) and THINK_CLOSE not in text
    return ThoughtMarker(is_open=is_open, has_said=bool(text) and not is_open)


class RunningAnswers:
    """All unfinished answers, in request order; combines their texts into fewer signals."""

    def __init__(self, signals: EngineSignals) -> None:
        self._signals = signals
        self._running: dict[int, RunningAnswer] = {}
        self._texts: dict[int, list[str]] = {}  # not yet emitted, by answer number
        self._rate = TokenRate()  # of all answers

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningAnswer]:
        return iter(list(self._running.values()))

    def __contains__(self, number: int) -> bool:
        return number in self._running

    def add(self, answer: RunningAnswer) -> None:
        """Track a new answer."""
        self._running[answer.number] = answer
        if len(self._running) > 1:
            for one in self._running.values():
                one.was_alone = False

    def take_text(self, number: int, event: TokenText) -> None:
        """Buffer an answer's text until `emit_text`."""
        answer, n_tokens = self._running[number], len(event.ids)
        text = answer.marker.written(event.text, is_thought=event.part == "reasoning")
        self._texts.setdefault(number, []).append(text)
        self._rate.count(n_tokens)
        answer.rate.count(n_tokens)
        answer.meter.count(n_tokens)
        answer.ids += [token for token in event.ids if token >= 0]  # servers send no ids
        answer.stage = AnswerStage.WRITING

    def emit_text(self, number: int | None = None) -> None:
        """Emit the buffered text of one answer, or of all answers."""
        for one in [number] if number is not None else list(self._texts):
            if text := "".join(self._texts.pop(one, ())):
                self._signals.text.emit(text, self._running[one])

    def emit_rates(self) -> None:
        """Emit the tokens per second for each answer and for all together, once a second."""
        for answer in self:
            if (own := answer.rate.due()) is not None:
                answer.tokens_per_s = own
                self._signals.paced.emit(answer)
        if (rate := self._rate.due()) is not None:
            self._signals.rate.emit(rate, sum(one.stage is AnswerStage.WRITING for one in self))

    def end(self, number: int) -> RunningAnswer:
        """Remove a finished answer and return it."""
        answer = self._running.pop(number)
        if not self._running:
            self._rate = TokenRate()
        return answer

    def on_event(self, number: int, event: Event) -> None:
        """Emit the signals for an event other than text or the closing event."""
        signals = self._signals
        if isinstance(event, TokenTimes):  # unrelated to the buffered text
            signals.token_times.emit(event)
            return
        answer = self._running[number]
        if isinstance(event, ToolCallBegun):  # it ends the reasoning
            self._texts.setdefault(number, []).append(answer.marker.closed())
        self.emit_text(number)
        if isinstance(event, ToolCallBegun | ToolCallText):
            signals.called.emit(event, answer)
        elif isinstance(event, PrefillProgress):
            answer.n_read, answer.n_prompt = event.done, event.total
            answer.stage = AnswerStage.READING
            signals.prefill.emit(event.done, event.total, answer)
        elif isinstance(event, ContextShifted):
            signals.shifted.emit(event.n_dropped, answer)

    def emit_end(self, answer: RunningAnswer, event: Finished | Failed) -> None:
        """Emit the closing signal of an answer that `end` has removed."""
        if not self._running:
            self._signals.rate.emit(0.0, 0)
        if isinstance(event, Finished):
            self._signals.finished.emit(event, answer)
        else:
            self._signals.failed.emit(event.error, answer)
