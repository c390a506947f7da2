"""An engine on machine 0 whose models run on several machines."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from engine.errors import EngineError, MachineLost, Sentence
from engine.events import Command, Failed, HostEvent, ModelLoaded, new_command_id
from engine.hosts.machines.agent import AgentTask, logged_fault
from engine.hosts.machines.gathering import Gathering
from engine.hosts.machines.interfaces import free_port, interface_of
from engine.hosts.process.child import Death
from engine.hosts.process.process_host import CLOSING_EVENTS, ProcessHost
from engine.hosts.thread_host import EventSink

log = logging.getLogger(__name__)


class SessionHost(ProcessHost):
    """A `ProcessHost` that does not restart its process.

    Args:
        on_end: called on a thread with the error when the process has exited unexpectedly.
    """

    def __init__(
        self, on_event: EventSink, task: AgentTask, on_end: Callable[[EngineError], None]
    ) -> None:
        self._on_end, self._name = on_end, task.name
        super().__init__(on_event, task.command)

    def _error_of(self, death: Death, doing: str) -> EngineError:
        problem: str = logged_fault(death.log)
        if not problem:
            problem = Sentence("its agent {manner}", manner=death.manner)
        return MachineLost("{machine}: {problem}.", machine=self._name, problem=problem)

    def _fail(self, error: EngineError) -> None:
        self._on_end(error)  # first, as it fails the commands
        super()._fail(error)


class MachinesHost:
    """Engine whose processes on all machines start and end together.

    Commands fail while machines are missing. A fault on any machine stops the processes on all
    machines and fails unfinished commands; the next command restarts them once all machines are
    connected, which is reported to `Gathering.on_change`.

    Args:
        on_event: called with events on threads of this process; must return quickly.
        gathering: the other machines.
        port: port on this machine at which torchrun's agents meet, if it is free.
    """

    def __init__(self, on_event: EventSink, gathering: Gathering, port: int) -> None:
        self._on_event, self._gathering, self._port = on_event, gathering, port
        self._lock = threading.RLock()
        self._session: SessionHost | None = None
        self._unanswered: set[int] = set()
        self._has_model = False
        gathering.on_fault = lambda number, why: self._end(why)

    def begin(self) -> None:
        """Start the processes on all machines, which measure the links, before any command.

        Raises:
            EngineError: a machine is missing, or the others use different addresses for this one.
        """
        with self._lock:
            if self._session is None:
                self._start()

    def submit(self, command: Command, command_id: int | None = None) -> int:
        number = new_command_id() if command_id is None else command_id
        with self._lock:
            self._unanswered.add(number)
            try:
                if self._session is None:
                    self._start()
            except EngineError as error:
                self._send(HostEvent(number, Failed(error)))
            else:
                assert self._session is not None, "it has only just started"
                self._session.submit(command, number)
        return number

    def cancel(self, command_id: int | None = None) -> None:
        with self._lock:
            if self._session is not None:
                self._session.cancel(command_id)

    def close(self, timeout_s: float = 5.0) -> bool:
        with self._lock:
            session, self._session = self._session, None
        is_ended = session is None or session.close(timeout_s)
        self._gathering.close()
        return is_ended

    def _start(self) -> None:
        gathering = self._gathering
        if not gathering.is_complete:
            raise MachineLost(gathering.missing, "Run tandem join there.")
        address = gathering.interface_address()
        port = free_port(address, self._port)
        n = 1 + len(gathering.machines)
        task = AgentTask(n, 0, gathering.name, address, port, interface_of(address))
        gathering.send_all("start", port=port)
        session: list[SessionHost] = []  # filled before this object's lock is released
        host = SessionHost(
            lambda event: self._pass_on(session, event), task,
            lambda error: self._ended(session, error),
        )  # fmt: skip
        session.append(host)
        self._session = host

    # everything below may run on any thread

    def _pass_on(self, session: list[SessionHost], event: HostEvent) -> None:
        with self._lock:
            if session[0] is not self._session:
                return
            self._send(event)

    def _send(self, event: HostEvent) -> None:
        if isinstance(event.event, CLOSING_EVENTS):
            self._unanswered.discard(event.command_id)
        if isinstance(event.event, Failed) and event.event.is_model_lost:
            self._has_model = False
        elif isinstance(event.event, ModelLoaded):
            self._has_model = True
        self._on_event(event)

    def _ended(self, session: list[SessionHost], error: EngineError) -> None:
        with self._lock:
            if session[0] is self._session:
                self._end(error.message)

    def _end(self, why: str) -> None:
        with self._lock:
            session, self._session = self._session, None
            had_model = self._has_model
            if session is None:
                return
            log.error("%s", why)
            self._gathering.send_all("end", why=why)
            threading.Thread(target=partial(session.close, 0), daemon=True).start()
            error = MachineLost(why, "The model will be reloaded once all machines have joined.")
            numbers = sorted(self._unanswered) or [0]
            for number in numbers:
                is_lost = self._has_model and number == numbers[0]
                self._send(HostEvent(number, Failed(error, is_lost)))
            if had_model and self._gathering.is_complete:
                self._gathering.on_change(
                    Sentence("All machines have joined: reloading the model.")
                )
