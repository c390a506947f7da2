"""The engine in a child process, which may crash in any way without affecting its parent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import get_args

from engine.errors import CommError, DeviceStopped, EngineError
from engine.events import (
    Command,
    EngineReady,
    Event,
    Failed,
    HostEvent,
    ModelLoaded,
    ModelResplit,
    ModelUnloaded,
    Tuned,
    new_command_id,
)
from engine.generation.requests import CountCache, CountTokens, Reply
from engine.generation.results import Finished, StateLoaded, StateSaved
from engine.hosts.process.channel import (
    CancelMessage,
    CloseMessage,
    EventsMessage,
    SubmitMessage,
    ToEngine,
)
from engine.hosts.process.child import (
    Death,
    EngineProcess,
    crash_of,
    doing_of,
    start_failure,
    stopped_hint,
)
from engine.hosts.process.codec import MessageError
from engine.hosts.thread_host import EventSink
from engine.util.programs import program_command

log = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between two checks of a silent process. They are counted, not timed, because this process
may also have been suspended."""

BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds between a process's end and the start of the next, after the first crash, the second and
so on, so that crashes at every load do not keep the machine busy."""

HEALTHY_S = 15.0
"""Seconds that a process must survive to reset the crash count."""

KILLED_S = 2.0
"""Seconds to wait for a killed process."""

CLOSING_EVENTS = (
    ModelLoaded, ModelResplit, ModelUnloaded, Finished, StateSaved, StateLoaded, Tuned,
    Failed, *get_args(Reply),
)  # fmt: skip
"""Events that end a command; see `engine.events`."""

PROGRAM = program_command("engine.hosts.process.program")
"""Command line for the engine's process."""


class ProcessHost:
    """Engine in a child process; after the process ends, the next command starts another one.

    Commands that were pending when it ended fail with `EngineCrashed`, which says how it ended and
    what it was doing; if there were none, the event has command id 0.

    A device that has stopped working or hangs is unusable only for that process. So the process is
    killed as soon as it has no working model.

    Args:
        on_event: called with events on a thread of this process; must return quickly.
        command: command line of the process, without its connection's handle.
    """

    def __init__(self, on_event: EventSink, command: Sequence[str] = PROGRAM) -> None:
        self._on_event, self._command = on_event, command
        self._changed = threading.Condition()
        self._unanswered: dict[int, Command] = {}
        self._unsent: list[ToEngine] = []  # messages for the next process
        self._process: EngineProcess | None = None
        self._model: ModelLoaded | None = None
        self._is_ready = self._was_ready = self._is_closing = False
        self._is_spoilt = False  # a device no longer works in this process
        self._n_deaths = 0  # consecutive crashes with no healthy process in between
        self._due = 0.0  # earliest start of the next process
        self._thread = threading.Thread(target=self._run, name="tandem-process", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Id of the engine's process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def submit(self, command: Command, command_id: int | None = None) -> int:
        command_id = new_command_id() if command_id is None else command_id
        with self._changed:
            self._unanswered[command_id] = command
            self._send(SubmitMessage(command_id, command))
            self._changed.notify_all()
        return command_id

    def cancel(self, command_id: int | None = None) -> None:
        with self._changed:
            if command_id in self._unanswered or (command_id is None and self._unanswered):
                self._send(CancelMessage(command_id))

    def close(self, timeout_s: float = 5.0) -> bool:
        with self._changed:
            self._is_closing = True
            self._send(CloseMessage())
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if is_ended := not self._thread.is_alive():
            return is_ended
        with self._changed:
            if self._process is not None:
                self._process.kill()
        self._thread.join(KILLED_S)
        return False

    def _send(self, message: ToEngine) -> None:
        if self._process is not None:
            self._process.send(message)
        else:
            self._unsent.append(message)

    # everything below runs on the host's own threads

    def _run(self) -> None:
        is_first = True
        while self._wait(is_first):
            is_first = False
            started = time.monotonic()
            try:
                # Linux kills it when the thread that started it ends, so this one must live as long
                process = EngineProcess(self._command, self._refuse)
            except (OSError, MemoryError) as error:
                log.exception("the engine's process cannot be started")
                self._note_death()
                self._fail(start_failure(error))
                continue
            self._enter(process)
            self._follow(process)
            self._leave(process, time.monotonic() - started)

    def _wait(self, is_first: bool) -> bool:
        """Wait until a process is needed and may be started; return False when closing."""
        with self._changed:
            self._changed.wait_for(lambda: is_first or self._is_closing or self._unanswered)
            pause_s = max(0.0, self._due - time.monotonic())
            self._changed.wait_for(lambda: self._is_closing, pause_s)
            return not self._is_closing

    def _note_death(self, lived_s: float = 0.0) -> None:
        if lived_s >= HEALTHY_S:
            self._n_deaths = 0
        pause_s = BACK_OFF_S[min(self._n_deaths, len(BACK_OFF_S) - 1)]
        self._n_deaths += 1
        self._due = time.monotonic() + pause_s

    def _enter(self, process: EngineProcess) -> None:
        with self._changed:
            self._process, self._is_ready, self._is_spoilt = process, False, False
            for message in self._unsent:
                process.send(message)
            self._unsent.clear()

    def _follow(self, process: EngineProcess) -> None:
        n_silent = 0
        while True:
            try:
                message = process.receive(TICK_S)
            except (EOFError, OSError):
                return
            n_silent = n_silent + 1 if message is None else 0
            process.check(n_silent * TICK_S)
            if isinstance(message, EventsMessage):
                for event in message.events:
                    self._pass_on(event)
                if self._retire():
                    process.kill()
                    return

    def _retire(self) -> bool:
        """Give up the process and return True if it has a broken device and no model."""
        with self._changed:
            is_over = self._is_spoilt and self._model is None and not self._unanswered
            if is_over:
                self._process = None  # later messages wait for the next process
            return is_over

    def _pass_on(self, event: HostEvent) -> None:
        with self._changed:
            is_repeated = isinstance(event.event, EngineReady) and self._was_ready
            self._note(event)
            if isinstance(event.event, Failed) and isinstance(event.event.error, DeviceStopped):
                event.event.error.hint = stopped_hint(event.event.error.device, self._model)
        if not is_repeated:
            self._on_event(event)

    def _note(self, event: HostEvent) -> None:
        found: Event = event.event
        if isinstance(found, CLOSING_EVENTS):
            self._unanswered.pop(event.command_id, None)
        if isinstance(found, Failed) and isinstance(found.error, DeviceStopped | CommError):
            self._is_spoilt = True
        if isinstance(found, EngineReady):
            self._is_ready = self._was_ready = True
        elif isinstance(found, ModelLoaded):
            self._model = found
        elif isinstance(found, ModelResplit | Tuned):
            self._model = found.model
        elif isinstance(found, ModelUnloaded) or (
            isinstance(found, Failed) and found.is_model_lost
        ):
            self._model = None

    def _leave(self, process: EngineProcess, lived_s: float) -> None:
        death = process.bury()
        with self._changed:
            was_asked = self._process is None or self._is_closing
            self._process = None
            if was_asked:
                return
            background = CountTokens, CountCache  # the window sends these for its gauges
            commands = self._unanswered.values()
            running = next((one for one in commands if not isinstance(one, background)), None)
            doing = doing_of(running, self._model, self._is_ready)
        log.error("the engine's process %s %s\n%s", death.manner, doing, "\n".join(death.log))
        self._note_death(lived_s)
        self._fail(self._error_of(death, doing))

    def _error_of(self, death: Death, doing: str) -> EngineError:
        return crash_of(death, doing)

    def _fail(self, error: EngineError) -> None:
        with self._changed:
            numbers = list(self._unanswered) or [0]
            self._unanswered.clear()
            self._unsent.clear()
            had_model, self._model = self._model is not None, None
        for number in numbers:
            self._on_event(HostEvent(number, Failed(error, had_model and number == numbers[0])))

    def _refuse(self, message: ToEngine, error: MessageError) -> None:
        if isinstance(message, SubmitMessage):
            self._pass_on(HostEvent(message.command_id, Failed(error)))
