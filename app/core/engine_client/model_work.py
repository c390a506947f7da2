"""The loaded model, and the commands under way that change which one that is, or its split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from app.core.engine_client.signals import EngineSignals
from engine import (
    Event,
    Failed,
    FallbacksChanged,
    LoadProgress,
    ModelLoaded,
    ModelResplit,
    ModelUnloaded,
    Tuned,
    TuneProgress,
    TuneStarted,
    model_after,
)

NONE = -1
"""Number of a command where there is none."""


class ModelWork:
    """Loads, changes of the split, searches and unloads; of each kind the last one is told.

    Args:
        settle: derives the engine's state anew, before a signal says what has changed.

    Attributes:
        model: the loaded model, if any; it stays while another model is being loaded.
        load, tune, unload: numbers of the commands; `NONE` for none.
    """

    def __init__(self, signals: EngineSignals, settle: Callable[[], None]) -> None:
        self._signals, self._settle = signals, settle
        self.model: ModelLoaded | None = None
        self.load = self.tune = self.unload = NONE
        self._resplits: list[int] = []  # all that have not ended, as one does not end another

    def add_resplit(self, number: int) -> None:
        """Follow a change of the split."""
        self._resplits.append(number)

    @property
    def stoppable(self) -> list[int]:
        """Numbers of the commands that a person may stop."""
        return [n for n in (self.load, self.tune) if n != NONE] + self._resplits

    def on_event(self, number: int, event: Event) -> None:
        """Emit the signals of an event, unless its command was replaced."""
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
        """Update the loaded model after any command, without a signal."""
        self.model = model_after(event, self.model)

    def on_fallbacks(self, event: FallbacksChanged) -> None:
        """Note what makes the loaded model's GPUs slower, whichever command has led to it."""
        if self.model is not None:
            self.model = replace(self.model, fallbacks=event.fallbacks)
            self._signals.fallbacks_changed.emit(event.fallbacks)

    def _on_load(self, event: Event) -> None:
        if isinstance(event, LoadProgress):
            self._tell_progress(event)
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
                self._tell_progress(event)
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

    def _tell_progress(self, event: LoadProgress) -> None:
        self._signals.load_progress.emit(event.done_bytes / max(event.total_bytes, 1))
        self._signals.load_doing.emit(event.doing)
