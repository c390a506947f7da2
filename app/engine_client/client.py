"""The bridge between the engine's thread and the window: the only one there is.

The engine calls `_receive` on its own thread, often hundreds of times a second. It only appends to
a queue; the first event after a pause wakes a timer of the GUI thread, which then empties the
queue some twenty-five times a second, drops events of commands that were replaced, and joins
the text of many tokens into one signal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.engine_client.state import AsideAnswer, EngineState
from app.engine_client.token_rate import AnswerMeter, TokenRate
from engine import (
    Cancelled,
    ChatMessage,
    ContextShifted,
    CountTokens,
    EngineReady,
    Event,
    Failed,
    FallbacksChanged,
    Finished,
    Generate,
    HostEvent,
    Load,
    LoadParams,
    LoadProgress,
    LoadState,
    ModelLoaded,
    ModelResplit,
    ModelUnloaded,
    PrefillProgress,
    Resplit,
    SamplingParams,
    SaveState,
    StateLoaded,
    StateProgress,
    StateSaved,
    TokensCounted,
    TokenText,
    TokenTimes,
    Tune,
    Tuned,
    TuneProgress,
    TuneStarted,
    Unload,
)

if TYPE_CHECKING:
    from engine import EngineHost

log = logging.getLogger(__name__)

DRAIN_MS = 40
CLOSE_S = 5.0
POLL_S = 0.02


class EngineClient(QObject):
    """The engine as the window sees it: commands are methods, events are Qt signals.

    Args:
        make_host: starts an engine that sends its events to the given callable; called by `start`
            or by the first command, so that the window shows before torch takes the processor.

    Attributes:
        answer_meter: figures of the last answer as far as it has come.
    """

    ready = Signal(object)  # EngineReady
    state_changed = Signal(object)  # EngineState
    load_progress = Signal(float)  # 0 to 1
    load_doing = Signal(str)  # present step of the load, "" while it only reads the file
    loaded = Signal(object)  # ModelLoaded
    load_failed = Signal(object)  # EngineError; Cancelled when a person stopped it
    resplit_done = Signal(object)  # ModelResplit; `load_progress` is emitted before
    resplit_failed = Signal(object)  # EngineError; the old split is kept unless `model` is None
    state_progress = Signal(float)  # 0 to 1, of the state that is being saved or loaded
    state_saved = Signal(object)  # StateSaved
    state_loaded = Signal(object)  # StateLoaded
    state_failed = Signal(object)  # EngineError that ended saving or loading a state
    tune_started = Signal(object)  # TuneEstimate
    tune_progress = Signal(object)  # TuneProgress
    tuned = Signal(object)  # TuneResult; the model from before the search is loaded again
    tune_failed = Signal(object)  # EngineError; the model is loaded again unless `model` is None
    unloaded = Signal()
    prefill = Signal(int, int)  # prompt tokens done, all prompt tokens
    shifted = Signal(int)  # number of tokens dropped from a full context
    text = Signal(str)
    rate = Signal(float)  # tokens per second over the last second, 0 at the end
    token_times = Signal(object)  # TokenTimes of one token in every few
    finished = Signal(object)  # Finished
    failed = Signal(object)  # EngineError that ended a generation
    counted = Signal(object)  # TokensCounted; None where they could not be counted
    lost = Signal(object, object)  # EngineError that has ended the loaded model, its ModelLoaded
    fallbacks_changed = Signal(object)  # tuple of Fallback: what makes the GPUs slower from now on

    _woken = Signal()

    def __init__(
        self, make_host: Callable[[Callable[[HostEvent], None]], EngineHost], parent: QObject
    ) -> None:
        super().__init__(parent)
        self._queue: deque[HostEvent] = deque()
        self._lock = threading.Lock()
        self._is_awake = False
        self._load_number = self._answer_number = self._unload_number = -1
        self._resplit_number = self._tune_number = -1
        self._state_numbers: set[int] = set()
        self._count_numbers: set[int] = set()
        self._aside: AsideAnswer | None = None
        self._answer_ids: list[int] = []
        self._model: ModelLoaded | None = None
        self._state = EngineState.EMPTY
        self._rate = TokenRate()
        self.answer_meter = AnswerMeter()
        self._timer = QTimer(self, interval=DRAIN_MS)
        self._timer.timeout.connect(self._drain)
        self._woken.connect(self._wake)
        self._make_host = make_host
        self._host: EngineHost | None = None
        self._host_number = 0  # events of hosts before it are dropped

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def model(self) -> ModelLoaded | None:
        """The loaded model, if any; it stays while another model is being loaded."""
        return self._model

    @property
    def is_unloading(self) -> bool:
        """Whether the loaded model is about to leave, so that it answers no more."""
        return self._unload_number >= 0

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The tokens of the last answer so far, with those that it began with."""
        return tuple(self._answer_ids)

    @Slot()
    def start(self) -> None:
        """Start the engine if it does not run yet."""
        if self._state is not EngineState.CLOSED:
            self._running()

    def _running(self) -> EngineHost:
        if self._host is None:
            number = self._host_number
            self._host = self._make_host(lambda event: self._receive(event, number))
        return self._host

    def _free_host(self) -> EngineHost:
        """Return the engine for a command of the person's, before which what is aside ends."""
        host = self._running()
        if self._aside is not None and not self._aside.is_ending:
            self._aside.is_ending = True
            host.cancel()
        return host

    @property
    def is_idle(self) -> bool:
        """Whether a model is loaded and the engine does nothing at all, and nothing waits."""
        is_free = self._aside is None and not self._state_numbers
        return is_free and self._state is EngineState.READY

    def ask_aside(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        then: Callable[[AsideAnswer], None],
        *,
        continue_last: bool = False,
    ) -> bool:
        """Have something short written beside the chats, with no signal; other commands end it.

        Args:
            then: called with the answer, also if it has failed or was ended.

        Returns:
            whether it was asked; not while the engine does anything.
        """
        if not self.is_idle:
            return False
        command = Generate(
            tuple(messages),
            sampling=sampling,
            continue_last=continue_last,
            timed_every=0,
            thinks=False,
            effort="low",
        )
        self._aside = AsideAnswer(self._running().submit(command), then)
        return True

    def load(self, params: LoadParams) -> None:
        """Load a model in place of the present one; a running answer ends first."""
        host = self._free_host()
        self._end_what_runs(host)
        self._load_number = host.submit(Load(params))
        self._settle()

    def resplit(self, params: LoadParams) -> None:
        """Change the split of the model; a running answer goes on with the new split."""
        self._resplit_number = self._free_host().submit(Resplit(params))
        self._settle()

    def tune(self, params: LoadParams, goal: str = "chat", budget_s: float | None = None) -> None:
        """Search for the best split; a running answer ends first, and `cancel` ends the search."""
        host = self._free_host()
        self._end_what_runs(host)
        self._tune_number = host.submit(Tune(params, goal, budget_s))
        self._settle()

    def save_state(self, path: str) -> None:
        """Save the KV cache to a file, once nothing else runs."""
        self._state_numbers.add(self._free_host().submit(SaveState(path)))

    def load_state(self, path: str) -> None:
        """Load the KV cache from a file of `save_state`, once nothing else runs."""
        self._state_numbers.add(self._free_host().submit(LoadState(path)))

    def generate(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        *,
        continue_last: bool = False,
        begun: Sequence[int] = (),
        thinks: bool | None = None,
        effort: str = "",
    ) -> None:
        """Answer `messages`; remaining events of an earlier answer are dropped.

        Args:
            continue_last: whether the last message is the assistant's and is continued.
            begun: the tokens of that message, if they are known.
            thinks: whether the model shall think first; None as its template has it.
            effort: how much it shall think; "" as its template has it.
        """
        host = self._free_host()
        if self._answer_number >= 0:
            host.cancel()
        self._answer_ids = list(begun)
        command = Generate(
            tuple(messages),
            sampling=sampling,
            continue_last=continue_last,
            begun=tuple(begun),
            thinks=thinks,
            effort=effort,
        )
        self._answer_number = host.submit(command)
        self._rate, self.answer_meter = TokenRate(), AnswerMeter()
        self._settle()

    def count(self, messages: Sequence[ChatMessage] | None, draft: str) -> None:
        """Count the tokens of a prompt; see `CountTokens`. An answer goes on meanwhile."""
        command = CountTokens(None if messages is None else tuple(messages), draft)
        self._count_numbers.add(self._running().submit(command))

    def cancel(self) -> None:
        """Cancel all running and waiting commands; their closing signals follow."""
        self._running().cancel()

    def finish_states(self, seconds: float) -> None:
        """Wait until all states are saved, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self._state_numbers and time.monotonic() < deadline:
            self._drain()
            time.sleep(POLL_S)

    def _end_what_runs(self, host: EngineHost) -> None:
        """Cancel a load, search or answer, but never the saving of the old model's state."""
        if self._state in (EngineState.LOADING, EngineState.GENERATING):
            host.cancel()

    def unload(self) -> None:
        host = self._free_host()
        self._end_what_runs(host)
        self._unload_number = host.submit(Unload())

    def release(self) -> EngineHost | None:
        """Give up the engine, which does nothing; the next command starts another.

        Returns:
            The engine, if one runs: closing it takes so long that another thread should do it.
        """
        host, self._host = self._host, None
        with self._lock:
            self._host_number += 1
            self._queue.clear()
        for _ in range(len(self._count_numbers)):
            self.counted.emit(None)
        self._count_numbers.clear()
        if self._aside is not None:
            answer, self._aside = self._aside, None
            answer.reason = "failed"
            answer.then(answer)
        return host

    def shutdown(self) -> bool:
        """End the engine, and return whether it ended within five seconds."""
        if self._state is EngineState.CLOSED:
            return True
        ended = self._host is None or self._host.close(CLOSE_S)
        if not ended:
            log.warning("the engine did not end within %.0f s", CLOSE_S)
        self._drain()  # the last words of an answer
        self._timer.stop()
        self._set_state(EngineState.CLOSED)
        return ended

    # on the engine's thread

    def _receive(self, event: HostEvent, host_number: int) -> None:
        with self._lock:
            if host_number != self._host_number:
                return
            self._queue.append(event)
            wake, self._is_awake = not self._is_awake, True
        if wake:
            self._woken.emit()

    # on the GUI thread

    @Slot()
    def _wake(self) -> None:
        if self._state is not EngineState.CLOSED:
            self._timer.start()
        self._drain()

    @Slot()
    def _drain(self) -> None:
        if self._state is EngineState.CLOSED:
            return
        events = self._take()
        texts: list[str] = []
        for event in events:
            if isinstance(event.event, TokenText) and event.generation == self._answer_number:
                texts.append(event.event.text)
                self._rate.count(len(event.event.ids))
                self.answer_meter.count(len(event.event.ids))
                self._answer_ids += event.event.ids
            elif isinstance(event.event, TokenTimes):  # says nothing about the text around it
                self._dispatch(event.generation, event.event)
            else:
                self._send_text(texts)
                self._dispatch(event.generation, event.event)
        self._send_text(texts)
        if (rate := self._rate.due()) is not None:
            self.rate.emit(rate)
        if not events:
            self._doze()

    def _take(self) -> list[HostEvent]:
        with self._lock:
            events = list(self._queue)
            self._queue.clear()
        return events

    def _doze(self) -> None:
        """Stop the timer unless an event came in between."""
        with self._lock:
            if self._queue:
                return
            self._is_awake = False
        self._timer.stop()

    def _send_text(self, texts: list[str]) -> None:
        if texts:
            self.text.emit("".join(texts))
            texts.clear()

    def _dispatch(self, number: int, event: Event) -> None:
        """Emit the signals of an event; the last one, if it has ended a model, is `lost`."""
        before = self._model
        self._emit(number, event)
        if isinstance(event, Failed) and event.is_model_lost and before is not None:
            self._settle()
            self.lost.emit(event.error, before)

    def _emit(self, number: int, event: Event) -> None:
        if isinstance(event, EngineReady):
            self.ready.emit(event)
        elif isinstance(event, FallbacksChanged):
            self._on_fallbacks(event)
        elif number == self._load_number or (number == 0 and self._load_number < 0):
            self._on_load_event(event)
        elif number == self._answer_number:
            self._on_answer_event(event)
        elif self._aside is not None and number == self._aside.number:
            self._on_aside(self._aside, event)
        elif number == self._resplit_number:
            self._on_resplit_event(event)
        elif number == self._tune_number:
            self._on_tune_event(event)
        elif number in self._state_numbers:
            self._on_state_event(number, event)
        elif number in self._count_numbers:
            self._count_numbers.discard(number)
            self._note_model(event)
            self.counted.emit(event if isinstance(event, TokensCounted) else None)
        elif number == self._unload_number:
            self._unload_number = -1
            self._note_model(event)
            self._settle()
            if isinstance(event, ModelUnloaded):
                self.unloaded.emit()
        else:
            self._note_model(event)

    def _note_model(self, event: Event) -> None:
        """Update the loaded model after a command that was replaced, without a signal."""
        if isinstance(event, ModelLoaded):
            self._model = event
        elif isinstance(event, ModelResplit | Tuned):
            self._model = event.model
        elif isinstance(event, ModelUnloaded) or (
            isinstance(event, Failed) and event.is_model_lost
        ):
            self._model = None

    def _on_fallbacks(self, event: FallbacksChanged) -> None:
        """Note what makes the loaded model's GPUs slower, whichever command has led to it."""
        if self._model is not None:
            self._model = replace(self._model, fallbacks=event.fallbacks)
            self.fallbacks_changed.emit(event.fallbacks)

    def _tell_progress(self, event: LoadProgress) -> None:
        self.load_progress.emit(event.done_bytes / max(event.total_bytes, 1))
        self.load_doing.emit(event.doing)

    def _on_load_event(self, event: Event) -> None:
        if isinstance(event, LoadProgress):
            self._tell_progress(event)
            return
        self._load_number = -1
        if isinstance(event, ModelLoaded):
            self._model = event
            self._settle()
            self.loaded.emit(event)
        elif isinstance(event, Failed):
            if event.is_model_lost:
                self._model = None
            self._settle()
            self.load_failed.emit(event.error)

    def _on_resplit_event(self, event: Event) -> None:
        if isinstance(event, LoadProgress):
            self._tell_progress(event)
            return
        self._resplit_number = -1
        self._note_model(event)
        self._settle()
        if isinstance(event, ModelResplit):
            self.resplit_done.emit(event)
        elif isinstance(event, Failed):
            self.resplit_failed.emit(event.error)

    def _on_tune_event(self, event: Event) -> None:
        if isinstance(event, TuneStarted):
            self.tune_started.emit(event.estimate)
        elif isinstance(event, TuneProgress):
            self.tune_progress.emit(event)
        else:
            self._tune_number = -1
            self._note_model(event)
            self._settle()
            if isinstance(event, Tuned):
                self.tuned.emit(event.result)
            elif isinstance(event, Failed):
                self.tune_failed.emit(event.error)

    def _on_state_event(self, number: int, event: Event) -> None:
        if isinstance(event, StateProgress):
            self.state_progress.emit(event.done_bytes / max(event.total_bytes, 1))
            return
        self._state_numbers.discard(number)
        if isinstance(event, StateSaved):
            self.state_saved.emit(event)
        elif isinstance(event, StateLoaded):
            self.state_loaded.emit(event)
        elif isinstance(event, Failed):
            self._note_model(event)
            self._settle()
            self.state_failed.emit(event.error)

    def _on_answer_event(self, event: Event) -> None:
        if isinstance(event, PrefillProgress):
            self.prefill.emit(event.done, event.total)
        elif isinstance(event, ContextShifted):
            self.shifted.emit(event.n_dropped)
        elif isinstance(event, TokenTimes):
            self.token_times.emit(event)
        elif isinstance(event, Finished | Failed):
            self._answer_number = -1
            self._rate = TokenRate()
            self._note_model(event)
            self._settle()
            self.rate.emit(0.0)
            if isinstance(event, Finished):
                self.finished.emit(event)
            else:
                self.failed.emit(event.error)

    def _on_aside(self, answer: AsideAnswer, event: Event) -> None:
        if isinstance(event, TokenText):
            answer.text += event.text
        elif isinstance(event, Finished | Failed):
            self._aside = None
            self._note_model(event)
            answer.reason = event.reason if isinstance(event, Finished) else "failed"
            answer.then(answer)

    def _settle(self) -> None:
        """Derive the state from the running commands and the loaded model."""
        if self._state is EngineState.CLOSED:
            return
        if max(self._load_number, self._resplit_number, self._tune_number) >= 0:
            self._set_state(EngineState.LOADING)
        elif self._answer_number >= 0:
            self._set_state(EngineState.GENERATING)
        else:
            self._set_state(EngineState.READY if self._model else EngineState.EMPTY)

    def _set_state(self, state: EngineState) -> None:
        if state is not self._state:
            self._state = state
            self.state_changed.emit(state)


def is_cancelled(error: object) -> bool:
    """Return whether a person cancelled a command, which needs no banner."""
    return isinstance(error, Cancelled)
