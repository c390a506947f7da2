"""The engine behind a queue: commands in, events out.

`EngineHost` is what a front end holds. `ThreadHost` runs the engine on a background thread of this
process; because commands and events are picklable, the same loop can live in another process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from engine.errors import Cancelled, EngineCrashed, EngineError
from engine.events import (
    Command,
    EngineReady,
    Event,
    Failed,
    Generate,
    HostEvent,
    Load,
    LoadProgress,
    ModelLoaded,
    ModelUnloaded,
)

if TYPE_CHECKING:
    from engine.api import Model

log = logging.getLogger(__name__)

EventSink = Callable[[HostEvent], None]


class EngineHost(Protocol):
    """What a front end needs of an engine, wherever that lives."""

    def submit(self, command: Command) -> int:
        """Queue a command and return the generation number that its events will carry."""
        ...

    def cancel(self) -> None:
        """End the command that is running and those that wait; returns at once."""
        ...

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel, free the model and end the engine; False if it did not end in time."""
        ...


class ThreadHost:
    """Runs the engine on a thread of this process.

    Args:
        on_event: called on the engine thread for every event; it must return quickly.
    """

    def __init__(self, on_event: EventSink) -> None:
        self._on_event = on_event
        self._commands: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        self._generation = 0
        self._cancelled_up_to = 0
        self._is_closing = False
        self._import_error: EngineError | None = None
        self._lock = threading.Lock()
        self._model: Model | None = None
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> int:
        with self._lock:
            self._generation += 1
            generation = self._generation
            self._commands.put((generation, command))
        return generation

    def cancel(self) -> None:
        with self._lock:
            self._cancelled_up_to = self._generation

    def close(self, timeout_s: float = 5.0) -> bool:
        with self._lock:
            self._cancelled_up_to = self._generation
            self._is_closing = True
            self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # everything below runs on the engine thread

    def _run(self) -> None:
        try:
            self._send(0, _import_engine())
        except Exception as error:  # a broken installation has many ways to say so
            log.exception("the engine cannot be imported")
            self._import_error = EngineError(
                f"PyTorch cannot be used ({type(error).__name__}: {error}).",
                "Install it again.",
            )
            self._send(0, Failed(self._import_error))
        while (item := self._commands.get()) is not None:
            self._answer(*item)
        self._free()

    def _answer(self, generation: int, command: Command) -> None:
        had_model = self._model is not None
        try:
            self._dispatch(generation, command)
            return
        except EngineError as error:
            failure = error
        except Exception as error:  # a bug must not end the thread that owns the model
            log.exception("command %s failed", type(command).__name__)
            failure = _as_crash(error)
        # whoever keeps the error must not keep the frames, and with them the tensors, it came from
        failure.__traceback__ = failure.__context__ = failure.__cause__ = None
        is_lost = had_model and self._model is None
        self._send(generation, Failed(failure, is_lost))

    def _dispatch(self, generation: int, command: Command) -> None:
        if isinstance(command, Load):
            self._load(generation, command)
        elif isinstance(command, Generate):
            self._generate(generation, command)
        else:
            self._free()
            self._send(generation, ModelUnloaded())

    def _load(self, generation: int, command: Load) -> None:
        if self._import_error is not None:
            raise self._import_error
        from engine.api import replace_model

        def on_progress(progress: LoadProgress) -> None:
            self._send(generation, progress)

        if self._is_cancelled(generation):
            raise Cancelled("Loading")
        start = time.perf_counter()
        replace_model(
            self._model,
            command.params,
            on_progress,
            lambda: self._is_cancelled(generation),
            self._hold,
            lambda: self._is_closing,
        )
        model = self._model
        assert model is not None
        self._send(
            generation,
            ModelLoaded(
                info=model.info,
                params=command.params,
                n_ctx=model.n_ctx,
                memory=tuple(model.memory()),
                seconds=time.perf_counter() - start,
                warnings=model.warnings,
            ),
        )

    def _hold(self, model: Model | None) -> None:
        """Keep track of what is loaded at every moment of a replacement."""
        self._model = model

    def _generate(self, generation: int, command: Generate) -> None:
        if self._model is None:
            raise EngineError("No model is loaded.", "Open a GGUF file first.")
        for event in self._model.answer(command, lambda: self._is_cancelled(generation)):
            self._send(generation, event)

    def _free(self) -> None:
        if self._model is not None:
            model, self._model = self._model, None
            model.close()

    def _is_cancelled(self, generation: int) -> bool:
        return generation <= self._cancelled_up_to

    def _send(self, generation: int, event: Event) -> None:
        self._on_event(HostEvent(generation, event))


def _import_engine() -> EngineReady:
    start = time.perf_counter()
    import_module("engine.api")  # first: it sets what torch reads
    import torch

    return EngineReady(torch.__version__, time.perf_counter() - start)


def _as_crash(error: Exception) -> EngineCrashed:
    return EngineCrashed(
        f"The engine stopped on an unexpected error ({type(error).__name__}: {error}).",
        "This is a bug in Tandem; the log has the details. Load the model again to go on.",
    )
