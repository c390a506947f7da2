"""The engine on a background thread, which takes commands from a queue and sends events.

Front ends use an `EngineHost`. `ThreadHost` runs the engine on a thread of this process; the host
in `engine.hosts.process` runs a `ThreadHost` in a child process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import (
    Cancelled,
    DeviceStopped,
    EngineCrashed,
    EngineError,
    OutOfDeviceMemory,
    Sentence,
    StateFileError,
    paragraph,
)
from engine.events import (
    Command,
    EngineReady,
    Event,
    Failed,
    FallbacksChanged,
    HostEvent,
    Load,
    LoadState,
    ModelLoaded,
    ModelResplit,
    ModelUnloaded,
    Resplit,
    SaveState,
    Tune,
    Tuned,
    Unload,
    new_command_id,
)
from engine.generation.queries import TEXT_QUESTIONS, reply_to
from engine.generation.requests import AnswerRequest, Question, has_images
from engine.text.messages import text_size
from engine.util.progress import IsCancelled, ProgressSink

if TYPE_CHECKING:
    from engine.api import Model
    from engine.generation.stream import AnswerStream
    from engine.hardware.fallbacks import Fallback
    from engine.load_params import LoadParams

log = logging.getLogger(__name__)

EXCLUSIVE = (Load, Tune, Unload)
"""Commands that wait until all answers have finished; others run or start between two tokens."""

MAX_ENDED = 64
"""Number of finished answers whose tokens are kept, so that their states can be saved."""

MAX_SHORT = 1 << 14
"""Maximum number of characters in a question that need not wait for longer ones."""

EventSink = Callable[[HostEvent], None]


class EngineHost(Protocol):
    """A front end's interface to an engine, wherever the engine runs."""

    def submit(self, command: Command, command_id: int | None = None) -> int:
        """Queue a command and return the id that its events will carry.

        Args:
            command_id: id of the command, from `new_command_id`; None for a new one.
        """
        ...

    def cancel(self, command_id: int | None = None) -> None:
        """Request the end of a command, or of all commands if None; do not wait for it."""
        ...

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel everything, free the model, stop the engine; return whether that was in time."""
        ...


class ThreadHost:
    """Engine on a thread of this process.

    Args:
        on_event: called with events on threads of the host; must return quickly.
    """

    def __init__(self, on_event: EventSink) -> None:
        self._on_event = on_event
        self._short = ThreadPoolExecutor(1, "tandem-question")
        self._long = ThreadPoolExecutor(2, "tandem-long-question")
        for pool in (self._short, self._long):
            pool.submit(int)  # starts its thread now, like the engine's
        self._questions: dict[int, Future[None]] = {}  # running or queued on the pools' threads
        self._commands: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        self._next: list[tuple[int, Command] | None] = []  # taken from the queue, not yet done
        self._streams: dict[int, AnswerStream] = {}  # unfinished answers
        self._ended: dict[int, Sequence[int]] = {}  # tokens of answers, newest last
        self._open: set[int] = set()  # unfinished commands
        self._cancelled: set[int] = set()  # cancelled ones among them
        self._is_closing = False
        self._import_error: EngineError | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()  # set by commands, cancellations and background work
        self._model: Model | None = None
        self._fallbacks: tuple[Fallback, ...] = ()  # as last sent
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)
        self._thread.start()

    def submit(self, command: Command, command_id: int | None = None) -> int:
        command_id = new_command_id() if command_id is None else command_id
        with self._lock:
            self._open.add(command_id)
            self._commands.put((command_id, command))
            self._wake.set()
        return command_id

    def cancel(self, command_id: int | None = None) -> None:
        with self._lock:
            self._cancelled |= self._open if command_id is None else self._open & {command_id}
            self._wake.set()

    def close(self, timeout_s: float = 5.0) -> bool:
        with self._lock:
            self._cancelled |= self._open
            self._is_closing = True
            self._commands.put(None)
            self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # everything below runs on the engine thread

    def _run(self) -> None:
        try:
            self._send(0, _import_engine())
        except Exception as error:  # a broken installation can raise anything
            log.exception("the engine cannot be imported")
            problem = f"{type(error).__name__}: {error}"
            self._import_error = EngineError(
                "PyTorch cannot be used ({problem}).", "Reinstall it.", problem=problem
            )
            self._send(0, Failed(self._import_error))
        while True:
            if not self._streams:
                item = self._next.pop() if self._next else self._commands.get()
                if item is None:
                    break
                self._do(*item)
            self._wake.clear()
            self._do_between()
            if self._streams:
                self._step()
        self._settle()
        self._short.shutdown()
        self._long.shutdown()
        self._free()

    def _settle(self) -> None:
        while self._questions:
            wait(list(self._questions.values()))

    def _do(self, command_id: int, command: Command) -> None:
        if isinstance(command, TEXT_QUESTIONS):
            self._ask_beside(command_id, command)
            return
        if isinstance(command, EXCLUSIVE):
            self._settle()
        self._attempt(command_id, command, partial(self._dispatch, command_id, command))
        if command_id not in self._streams:
            self._close(command_id)
            self._send_fallbacks(command_id)

    def _do_between(self) -> None:
        while True:
            if not self._next:
                try:
                    self._next.append(self._commands.get_nowait())
                except queue.Empty:
                    return
            item = self._next[0]
            if item is None or isinstance(item[1], EXCLUSIVE):
                return
            self._next.pop()
            self._do(*item)

    def _step(self) -> None:
        for command_id, stream in list(self._streams.items()):
            self._attempt(command_id, stream, partial(self._send_ready, command_id, stream))
        if not self._streams:
            return
        oldest = next(iter(self._streams))
        self._attempt(oldest, self._streams[oldest], self._loaded().step)
        if self._streams and all(stream.is_waiting for stream in self._streams.values()):
            self._wake.wait()

    def _send_ready(self, command_id: int, stream: AnswerStream) -> None:
        while events := stream.ready():  # until none are left or an error follows
            for event in events:
                self._send_fallbacks(command_id)
                self._send(command_id, event)
        if stream.is_over:
            self._forget(command_id)
            self._send_fallbacks(command_id)

    def _forget(self, command_id: int) -> None:
        """Forget a finished answer, except its tokens."""
        stream = self._streams.pop(command_id, None)
        self._close(command_id)
        if stream is not None:
            self._ended[command_id] = array("q", stream.ids)
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    def _attempt(self, command_id: int, what: object, act: Callable[[], None]) -> None:
        had_model = self._model is not None
        try:
            act()
            return
        except EngineError as error:
            failure = error
        except Exception as error:  # a bug must not end the thread that owns the model
            log.exception("command %s failed", type(what).__name__)
            failure = _as_crash(error)
        self._forget(command_id)
        _without_frames(failure)
        if self._model is not None and self._model.has_stopped:
            self._model.close()  # it can neither answer nor be saved
        if self._model is not None and not self._model.is_loaded:
            self._model = None  # closed by the failure, for example when a device hangs
        is_lost = had_model and self._model is None
        self._send(command_id, Failed(failure, is_lost))

    def _ask_beside(self, command_id: int, command: Question) -> None:
        """Answer a question on another thread while answers continue."""
        model, future = self._model, Future[None]()
        self._questions[command_id] = future

        def ask() -> None:
            try:
                if self._is_cancelled(command_id):
                    raise Cancelled(Sentence("The question"))
                is_cancelled = partial(self._is_cancelled, command_id)
                event: Event = reply_to(_checked(model), command, is_cancelled)
            except EngineError as error:
                event = Failed(_without_frames(error))
            except Exception as error:  # as in `_attempt`
                log.exception("command %s failed", type(command).__name__)
                event = Failed(_without_frames(_as_crash(error)))
            self._close(command_id)
            self._send(command_id, event)
            del self._questions[command_id]
            future.set_result(None)

        is_long = has_images(command) or text_size(command) > MAX_SHORT
        (self._long if is_long else self._short).submit(ask)

    def _dispatch(self, command_id: int, command: Command) -> None:
        if isinstance(command, Load):
            self._load(command_id, command)
        elif isinstance(command, AnswerRequest):
            self._generate(command_id, command)
        elif isinstance(command, Resplit):
            self._resplit(command_id, command)
        elif isinstance(command, SaveState | LoadState):
            self._move_state(command_id, command)
        elif isinstance(command, Tune):
            self._tune(command_id, command)
        elif isinstance(command, Unload):
            self._free()
            self._send(command_id, ModelUnloaded())
        else:
            is_cancelled = partial(self._is_cancelled, command_id)
            self._send(command_id, reply_to(self._loaded(), command, is_cancelled))

    def _load(self, command_id: int, command: Load) -> None:
        if self._import_error is not None:
            raise self._import_error

        if self._is_cancelled(command_id):
            raise Cancelled(Sentence("Loading"))
        start = time.perf_counter()
        self._replace(
            command.params,
            lambda progress: self._send(command_id, progress),
            lambda: self._is_cancelled(command_id),
        )
        self._send(command_id, self._described(start))

    def _replace(
        self, params: LoadParams, on_progress: ProgressSink, is_cancelled: IsCancelled
    ) -> None:
        """Load a model in place of the current one, which is kept if the new one fails.

        If both fit in memory, the old model is freed after the new one is loaded. If not, it is
        freed first and reloaded after a failure. A model whose GPU has stopped working is not kept.
        """
        from engine.api import Model

        old = self._model
        try:
            new = Model(params, on_progress, is_cancelled)
        except OutOfDeviceMemory:
            if old is None:
                raise
        except DeviceStopped:
            if old is not None and old.has_stopped:  # it can neither answer nor be saved
                self._model = None
                old.close()
            raise
        else:
            self._model = new
            if old is not None:
                old.close()
            return
        self._model = None
        old.close()
        try:
            self._model = Model(params, on_progress, is_cancelled)
        except EngineError as error:
            try:
                self._model = Model(old.params, on_progress, lambda: self._is_closing)
            except EngineError:
                lost = "{model} was unloaded to make room and could not be loaded again."
                error.hint = paragraph(error.hint, Sentence(lost, model=old.info.name))
            raise

    def _described(self, start: float) -> ModelLoaded:
        model = self._loaded()
        self._fallbacks = model.fallbacks
        return ModelLoaded(
            info=model.info,
            params=model.params,
            n_ctx=model.n_ctx,
            memory=tuple(model.memory()),
            seconds=time.perf_counter() - start,
            warnings=model.other_warnings,
            model_hash=model.model_hash,
            fallbacks=self._fallbacks,
            n_batch=model.plan.n_batch,
            vision=model.vision,
        )

    def _loaded(self) -> Model:
        return _checked(self._model)

    def _resplit(self, command_id: int, command: Resplit) -> None:
        model, start = self._loaded(), time.perf_counter()
        model.split_as(
            command.params,
            lambda progress: self._send(command_id, progress),
            lambda: self._is_cancelled(command_id),
        )
        self._send(command_id, ModelResplit(self._described(start), model.n_cached))

    def _move_state(self, command_id: int, command: SaveState | LoadState) -> None:
        model = self._loaded()
        options: dict[str, Any] = {
            "on_progress": lambda progress: self._send(command_id, progress),
            "is_cancelled": lambda: self._is_cancelled(command_id),
        }
        done: Event
        if isinstance(command, SaveState):
            done = model.save_state(command.path, ids=self._ids_of(command), **options)
        else:
            done = model.load_state(command.path, **options)
        self._send(command_id, done)

    def _ids_of(self, command: SaveState) -> Sequence[int] | None:
        """Return the tokens of the sequence to save; None for the sequence computed last."""
        if not command.of:
            return None
        if command.of in self._streams:
            return list(self._streams[command.of].ids)
        if command.of not in self._ended:
            raise StateFileError(
                command.path,
                "That answer is too old: its tokens are no longer stored, so its state cannot be"
                " saved.",
                "Ask the model something in that chat first.",
            )
        return list(self._ended[command.of])

    def _tune(self, command_id: int, command: Tune) -> None:
        if self._import_error is not None:
            raise self._import_error
        from engine.hosts.tuning import Interlude

        if self._is_cancelled(command_id):
            raise Cancelled(Sentence("The search"))
        start = time.perf_counter()
        result = Interlude(self._model, self._hold, lambda: self._is_closing).run(
            command,
            lambda progress: self._send(command_id, progress),
            lambda: self._is_cancelled(command_id),
        )
        model = None if self._model is None else self._described(start)
        self._send(command_id, Tuned(result, model))

    def _hold(self, model: Model | None) -> None:
        self._model = model

    def _generate(self, command_id: int, command: AnswerRequest) -> None:
        stream = self._loaded().answer(command, lambda: self._is_cancelled(command_id), self._wake)
        self._streams[command_id] = stream

    def _send_fallbacks(self, command_id: int) -> None:
        if self._model is not None and (found := self._model.fallbacks) != self._fallbacks:
            self._fallbacks = found
            self._send(command_id, FallbacksChanged(found))

    def _free(self) -> None:
        self._ended.clear()
        if self._model is not None:
            model, self._model = self._model, None
            model.close()

    def _is_cancelled(self, command_id: int) -> bool:
        return command_id in self._cancelled

    def _close(self, command_id: int) -> None:
        with self._lock:
            self._open.discard(command_id)
            self._cancelled.discard(command_id)

    def _send(self, command_id: int, event: Event) -> None:
        self._on_event(HostEvent(command_id, event))


def _import_engine() -> EngineReady:
    start = time.perf_counter()
    import_module("engine.api")  # first, as it sets variables that torch reads
    import torch

    return EngineReady(torch.__version__, time.perf_counter() - start)


def _checked(model: Model | None) -> Model:
    if model is None:
        raise EngineError("No model is loaded.", "Open a GGUF file first.")
    return model


def _without_frames(error: EngineError) -> EngineError:
    """Clear an error's references to frames, which would keep tensors alive; return it."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def _as_crash(error: Exception) -> EngineCrashed:
    return EngineCrashed(
        "The engine stopped because of an unexpected error ({problem}).",
        "This is a bug in Tandem; the log has the details. Load the model again to continue.",
        problem=f"{type(error).__name__}: {error}",
    )
