"""The engine for the window: commands as methods, events as Qt signals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Slot

from app.core.engine_client.answers import (
    EngineSignals,
    RunningAnswer,
    RunningAnswers,
    marker_behind,
)
from app.core.engine_client.inbox import EngineSharing, EventInbox
from app.core.translation import translated
from engine import (
    AnswerRequest,
    Cancelled,
    ChatMessage,
    Command,
    CountTokens,
    EngineReady,
    Event,
    Failed,
    FallbacksChanged,
    Finished,
    HostEvent,
    Load,
    LoadParams,
    LoadProgress,
    LoadState,
    ModelLoaded,
    ModelResplit,
    ModelUnloaded,
    Resplit,
    SaveState,
    StateLoaded,
    StateProgress,
    StateSaved,
    TokensCounted,
    TokenText,
    Tool,
    Tune,
    Tuned,
    TuneProgress,
    TuneStarted,
    Unload,
    model_after,
    new_command_id,
    thought_apart,
)

if TYPE_CHECKING:
    from engine import EngineHost

NONE = -1  # command id for "no command"


class ModelWork:
    """Loads, resplits, tuning runs and unloads; only the latest of each kind emits signals.

    Args:
        settle: updates the engine's state; called before a signal reports a change.

    Attributes:
        model: the loaded model, if any; kept while another model is loading.
        load, tune, unload: ids of the running commands, or `NONE`.
    """

    def __init__(self, signals: EngineSignals, settle: Callable[[], None]) -> None:
        self._signals, self._settle = signals, settle
        self.model: ModelLoaded | None = None
        self.load = self.tune = self.unload = NONE
        self._resplits: list[int] = []  # all running resplits; a new one cancels none of them

    def add_resplit(self, number: int) -> None:
        """Track a resplit."""
        self._resplits.append(number)

    @property
    def stoppable(self) -> list[int]:
        """Ids of the running commands that can be cancelled."""
        return [n for n in (self.load, self.tune) if n != NONE] + self._resplits

    def on_event(self, number: int, event: Event) -> None:
        """Emit the signals for an event, unless its command was replaced."""
        if number == self.load or (number == 0 and self.load == NONE):
            self._on_load(event)
        elif number in self._resplits:
            self._on_resplit(number, event)
        elif number == self.tune:
            self._on_tune(event)
        elif number == self.unload:
            self.unload = NONE
            self.note(event)
            self._settle()
            if isinstance(event, ModelUnloaded):
                self._signals.unloaded.emit()
        else:
            self.note(event)

    def note(self, event: Event) -> None:
        """Update the loaded model without emitting a signal."""
        self.model = model_after(event, self.model)

    def on_fallbacks(self, event: FallbacksChanged) -> None:
        """Update the loaded model's fallbacks."""
        if self.model is not None:
            self.model = replace(self.model, fallbacks=event.fallbacks)
            self._signals.fallbacks_changed.emit(event.fallbacks)

    def _on_load(self, event: Event) -> None:
        if isinstance(event, LoadProgress):
            self._emit_progress(event)
            return
        self.load = NONE
        self.note(event)
        self._settle()
        if isinstance(event, ModelLoaded):
            self._signals.loaded.emit(event)
        elif isinstance(event, Failed):
            self._signals.load_failed.emit(event.error)

    def _on_resplit(self, number: int, event: Event) -> None:
        is_last = number == self._resplits[-1]
        if isinstance(event, LoadProgress):
            if is_last:
                self._emit_progress(event)
            return
        self._resplits.remove(number)
        self.note(event)
        self._settle()
        if is_last and isinstance(event, ModelResplit):
            self._signals.resplit_done.emit(event)
        elif is_last and isinstance(event, Failed):
            self._signals.resplit_failed.emit(event.error)

    def _on_tune(self, event: Event) -> None:
        if isinstance(event, TuneStarted):
            self._signals.tune_started.emit(event.estimate)
        elif isinstance(event, TuneProgress):
            self._signals.tune_progress.emit(event)
        else:
            self.tune = NONE
            self.note(event)
            self._settle()
            if isinstance(event, Tuned):
                self._signals.tuned.emit(event.result)
            elif isinstance(event, Failed):
                self._signals.tune_failed.emit(event.error)

    def _emit_progress(self, event: LoadProgress) -> None:
        self._signals.load_progress.emit(event.done_bytes / max(event.total_bytes, 1))
        self._signals.load_doing.emit(translated(event.doing))


class EngineState(Enum):
    """State of the engine.

    LOADING includes tuning and resplits, even during an answer.
    """

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    GENERATING = "generating"
    CLOSED = "closed"


@dataclass(slots=True)
class AsideAnswer:
    """Text generated in the background.

    Attributes:
        number: id of its command.
        then: called when it has finished.
        reason: its finish reason (see `Finished`), or "failed".
        is_ending: whether it has been cancelled.
    """

    number: int
    then: Callable[[AsideAnswer], None]
    text: str = ""
    reason: str = ""
    is_ending: bool = False


log = logging.getLogger(__name__)

CLOSE_S = 5.0
POLL_S = 0.02


class EngineClient(EngineSignals):
    """The engine for the window: commands are methods, events are Qt signals.

    Events from replaced commands are dropped. Answers run concurrently, each as a `RunningAnswer`.

    Args:
        make_host: starts an engine that sends its events to the given callable; called by `start`
            or the first command, so that the window appears before torch uses the CPU.

    Attributes:
        answers: the running answers.
        sharing: lets the server use the same engine.
    """

    def __init__(
        self, make_host: Callable[[Callable[[HostEvent], None]], EngineHost], parent: QObject
    ) -> None:
        super().__init__(parent)
        self._work = ModelWork(self, self._settle)
        self._states: dict[int, SaveState | LoadState] = {}  # by command id
        self._count_numbers: set[int] = set()
        self._aside: AsideAnswer | None = None
        self.answers = RunningAnswers(self)
        self._state = EngineState.EMPTY
        self.sharing = EngineSharing()
        self._inbox = EventInbox(self._take, self.sharing.take, self)
        self._make_host = make_host
        self._host: EngineHost | None = None

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def model(self) -> ModelLoaded | None:
        """The loaded model, if any; kept while another model is loading."""
        return self._work.model

    @property
    def is_loading(self) -> bool:
        """Whether `load` is running."""
        return self._work.load != NONE

    @property
    def is_unloading(self) -> bool:
        """Whether `unload` is running."""
        return self._work.unload != NONE

    @property
    def is_idle(self) -> bool:
        """Whether a model is loaded and nothing is running or waiting."""
        is_free = self._aside is None and not self._states and not self.sharing.n_running
        return is_free and self._state is EngineState.READY

    @Slot()
    def start(self) -> None:
        """Start the engine if it is not running."""
        if self._state is not EngineState.CLOSED:
            self._running()

    def _running(self) -> EngineHost:
        if self._host is None:
            self._host = self._make_host(self._inbox.receiver())
            self.sharing.use(self._host)
        return self._host

    def _free_host(self) -> EngineHost:
        """Cancel the background text and return the engine for a user's command."""
        host = self._running()
        if self._aside is not None and not self._aside.is_ending:
            self._aside.is_ending = True
            host.cancel(self._aside.number)
        return host

    def _submit(self, command: Command, host: EngineHost | None = None) -> int:
        number = new_command_id()
        (host or self._free_host()).submit(command, number)
        return number

    # commands

    def load(self, params: LoadParams) -> None:
        """Replace the model; cancels running answers."""
        self._end_what_runs()
        self._work.load = self._submit(Load(params))
        self._settle()

    def resplit(self, params: LoadParams) -> None:
        """Change the model's split; running answers continue."""
        self._work.add_resplit(self._submit(Resplit(params)))
        self._settle()

    def tune(self, params: LoadParams, goal: str = "chat", budget_s: float | None = None) -> None:
        """Search for the fastest split; cancels running answers."""
        self._end_what_runs()
        self._work.tune = self._submit(
            Tune(params, goal, budget_s, with_drafts=params.draft != "off")
        )
        self._settle()

    def unload(self) -> None:
        """Unload the model; cancels running answers."""
        self._end_what_runs()
        self._work.unload = self._submit(Unload())

    def cancel(self) -> None:
        """Cancel loading, tuning and resplits, but no answers."""
        for number in self._work.stoppable:
            self._running().cancel(number)

    def _end_what_runs(self) -> None:
        self.cancel()
        self.sharing.cancel_all()
        for answer in self.answers:
            self.stop(answer)

    def generate(self, request: AnswerRequest) -> RunningAnswer:
        """Start answering a request, concurrently with other answers."""
        marker = None
        if request.in_parts and request.continue_last:  # pass its reasoning as a part, too
            *before, last = request.messages
            marker = marker_behind(last.content)
            request = replace(request, messages=(*before, thought_apart(last)))
        answer = RunningAnswer(self._submit(request), request.begun, marker)
        self.answers.add(answer)
        self._settle()
        return answer

    def stop(self, answer: RunningAnswer) -> None:
        """Cancel an answer; its closing signal is still emitted."""
        if answer.number in self.answers:
            self._running().cancel(answer.number)

    def ask_aside(self, request: AnswerRequest, then: Callable[[AsideAnswer], None]) -> bool:
        """If the engine is idle, generate a short text in the background, without signals.

        The next user command cancels it.

        Args:
            then: called with the answer, even if it failed or was cancelled.

        Returns:
            Whether the engine was idle.
        """
        if not self.is_idle:
            return False
        self._aside = AsideAnswer(self._submit(request, self._running()), then)
        return True

    def count(
        self, messages: Sequence[ChatMessage] | None, draft: str, tools: Sequence[Tool] = ()
    ) -> None:
        """Count a prompt's tokens while answers continue; see `CountTokens`."""
        command = CountTokens(None if messages is None else tuple(messages), draft, tuple(tools))
        self._count_numbers.add(self._submit(command, self._running()))

    def save_state(self, path: str, of: RunningAnswer | None = None) -> None:
        """Save the KV cache of an answer's sequence, by default the last answer's."""
        number = 0 if of is None else of.number
        self._move_state(SaveState(path, number))

    def load_state(self, path: str) -> None:
        """Load a KV cache written by `save_state`."""
        self._move_state(LoadState(path))

    def _move_state(self, command: SaveState | LoadState) -> None:
        self._states[self._submit(command)] = command

    def finish_states(self, seconds: float) -> None:
        """Wait up to `seconds` for all states to be saved or loaded."""
        deadline = time.monotonic() + seconds
        while self._states and time.monotonic() < deadline:
            self._inbox.drain()
            time.sleep(POLL_S)

    def release(self) -> EngineHost | None:
        """Detach the idle engine; the next command starts a new one.

        Returns:
            The engine, if one is running; close it on another thread, since closing is slow.
        """
        host, self._host = self._host, None
        self.sharing.use(None)
        self._inbox.forget()
        for _ in range(len(self._count_numbers)):
            self.counted.emit(None)
        self._count_numbers.clear()
        if self._aside is not None:
            answer, self._aside = self._aside, None
            answer.reason = "failed"
            answer.then(answer)
        return host

    def shutdown(self) -> bool:
        """Close the engine; return whether it stopped within `CLOSE_S`."""
        if self._state is EngineState.CLOSED:
            return True
        ended = self._host is None or self._host.close(CLOSE_S)
        if not ended:
            log.warning("the engine did not stop within %.0f s", CLOSE_S)
        self._inbox.close()  # delivers the answers' last events
        self._set_state(EngineState.CLOSED)
        return ended

    # events, on the GUI thread

    def _take(self, events: list[HostEvent]) -> None:
        for event in events:
            if isinstance(event.event, TokenText) and event.command_id in self.answers:
                self.answers.take_text(event.command_id, event.event)
            else:
                self._dispatch(event.command_id, event.event)
        self.answers.emit_text()
        self.answers.emit_rates()

    def _dispatch(self, number: int, event: Event) -> None:
        """Emit the signals for an event, then `lost` if the event reports the model's loss."""
        before = self.model
        self._emit(number, event)
        if isinstance(event, Failed) and event.is_model_lost and before is not None:
            self._settle()
            self.lost.emit(event.error, before)

    def _emit(self, number: int, event: Event) -> None:
        if isinstance(event, EngineReady):
            self.ready.emit(event)
        elif isinstance(event, FallbacksChanged):
            self._work.on_fallbacks(event)
        elif number in self.answers:
            self._on_answer(number, event)
        elif self._aside is not None and number == self._aside.number:
            self._on_aside(self._aside, event)
        elif number in self._states:
            self._on_state(number, event)
        elif number in self._count_numbers:
            self._count_numbers.discard(number)
            self._work.note(event)
            self.counted.emit(event if isinstance(event, TokensCounted) else None)
        else:
            self.answers.emit_text()  # before the event, which may end answers
            self._work.on_event(number, event)

    def _on_answer(self, number: int, event: Event) -> None:
        self.answers.on_event(number, event)
        if isinstance(event, Finished | Failed):
            answer = self.answers.end(number)
            self._work.note(event)
            self._settle()
            self.answers.emit_end(answer, event)

    def _on_aside(self, answer: AsideAnswer, event: Event) -> None:
        if isinstance(event, TokenText):
            answer.text += event.text if event.part == "content" else ""
        elif isinstance(event, Finished | Failed):
            self._aside = None
            self._work.note(event)
            answer.reason = event.reason if isinstance(event, Finished) else "failed"
            answer.then(answer)

    def _on_state(self, number: int, event: Event) -> None:
        if isinstance(event, StateProgress):
            self.state_progress.emit(event.done_bytes / max(event.total_bytes, 1))
            return
        command = self._states.pop(number)
        if isinstance(event, StateSaved):
            self.state_saved.emit(event)
        elif isinstance(event, StateLoaded):
            self.state_loaded.emit(event)
        elif isinstance(event, Failed):
            self._work.note(event)
            self._settle()
            self.state_failed.emit(event.error, command)

    def _settle(self) -> None:
        if self._state is EngineState.CLOSED:
            return
        if self._work.stoppable:
            self._set_state(EngineState.LOADING)
        elif len(self.answers):
            self._set_state(EngineState.GENERATING)
        else:
            self._set_state(EngineState.READY if self.model else EngineState.EMPTY)

    def _set_state(self, state: EngineState) -> None:
        if state is not self._state:
            self._state = state
            self.state_changed.emit(state)


def is_cancelled(error: object) -> bool:
    """Return whether an error is a cancellation, which needs no banner."""
    return isinstance(error, Cancelled)
