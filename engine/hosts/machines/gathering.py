"""Machine 0's side of joining: which machines are connected, and which were lost."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import EngineError, Sentence, listed
from engine.hardware.devices.catalog import parse_devices
from engine.hardware.devices.types import DeviceInfo, DeviceSnapshot, far_id
from engine.hosts.machines.joining import (
    devices_from,
    difference,
    file_difference,
    file_facts,
    machine_facts,
    states_from,
)
from engine.hosts.machines.lines import BEAT_S, HANDSHAKE_S, MAX_SILENT, LineError, Lines, lead
from engine.util.sanitize import one_line

log = logging.getLogger(__name__)

MAX_STRANGERS = 64
"""Maximum number of unproven connections; beyond it, the oldest one is closed."""

JOIN_S = 1.0
"""Seconds that `close` waits for threads, as some may be in a handshake."""

AGAIN_S = 0.1
"""Seconds to wait after a failure to accept a connection."""


@dataclass(frozen=True, slots=True)
class JoinedMachine:
    """A machine that has joined.

    Attributes:
        number: the machine's number, from 1.
        devices: devices of its ranks.
        infos: facts about all its devices.
        states: latest reported states of its devices.
    """

    number: int
    name: str
    address: str
    devices: tuple[str, ...]
    infos: tuple[DeviceInfo, ...] = ()
    states: tuple[DeviceSnapshot, ...] = ()

    @property
    def far_infos(self) -> tuple[DeviceInfo, ...]:
        """Facts about all its devices, with ids such as "1/cuda:0"."""
        return tuple(replace(info, id=far_id(self.number, info.id)) for info in self.infos)


class Gathering:
    """The machines that join machine 0 and compute with it.

    Args:
        sock: listening socket; this object closes it.
        n_machines: number of machines, including this one.
        token: shared secret.
        path: path of the model's file, of which each machine must have a copy.

    Attributes:
        on_change: called on a thread with a sentence when a machine has joined or was lost, and
            when the processes have stopped although all machines are connected.
        on_fault: called on a thread with the number of a machine that cannot continue, and the
            reason.
    """

    def __init__(self, sock: socket.socket, n_machines: int, token: str, path: str) -> None:
        self.on_change: Callable[[str], None] = lambda sentence: None
        self.on_fault: Callable[[int, str], None] = lambda number, why: None
        self._sock, self._n, self._token, self._path = sock, n_machines, token, path
        self._facts, self._file = machine_facts(), file_facts(path)
        self.name = self._facts["name"]
        self._changed = threading.Condition()
        self._strangers: dict[socket.socket, None] = {}  # unproven connections, oldest first
        self._joined: dict[int, tuple[JoinedMachine, Lines]] = {}
        self._expected: dict[int, JoinedMachine] = {}
        self._is_closed = False
        self._threads = [threading.Thread(target=self._accept, name="tandem-machines", daemon=True)]
        self._threads[0].start()

    @property
    def machines(self) -> Sequence[JoinedMachine]:
        """The connected machines, by number."""
        with self._changed:
            return [self._joined[number][0] for number in sorted(self._joined)]

    @property
    def is_complete(self) -> bool:
        """Whether all machines are connected."""
        return len(self._joined) == self._n - 1

    @property
    def missing(self) -> Sentence:
        """Sentence that says which machines are missing."""
        names = [one.name for number, one in self._expected.items() if number not in self._joined]
        n = self._n - 1 - len(self._joined)
        if names:
            template = "The model is waiting for {n} more machines to join ({names})."
            if n == 1:
                template = "The model is waiting for {n} more machine to join ({names})."
            return Sentence(template, n=n, names=", ".join(names))
        template = "The model is waiting for {n} more machines to join."
        if n == 1:
            template = "The model is waiting for {n} more machine to join."
        return Sentence(template, n=n)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all machines are connected; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_complete or self._is_closed, timeout_s)

    def keep_places(self) -> None:
        """Reserve the places of the connected machines for machines with the same devices."""
        with self._changed:
            self._expected = {number: one for number, (one, _) in self._joined.items()}

    def interface_address(self) -> str:
        """Return the address at which the other machines have reached this one.

        Raises:
            EngineError: they have used several addresses.
        """
        with self._changed:
            found = {lines.own_address for _, lines in self._joined.values()}
        if len(found) > 1:
            raise EngineError(
                "The machines reach this one at different addresses: {addresses}.",
                "Specify one of these addresses with --rendezvous HOST:PORT.",
                addresses=listed(sorted(found)),
            )
        return found.pop() if found else "127.0.0.1"

    def send_all(self, kind: str, **values: Any) -> None:
        """Send a line to all machines, ignoring lost ones."""
        with self._changed:
            joined = list(self._joined.values())
        for _, lines in joined:
            with suppress(OSError):
                lines.send(kind, **values)

    def close(self) -> None:
        """Announce that the server is stopping, and admit no more machines; safe to call twice."""
        self.send_all("bye")
        with self._changed:
            self._is_closed = True
            joined = list(self._joined.values())
            self._changed.notify_all()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for _, lines in joined:
            lines.close()
        until = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    # everything below runs on threads of this object

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, address = self._sock.accept()
            except OSError:
                if not self._is_closed:  # for example out of file handles, which may be freed soon
                    time.sleep(AGAIN_S)
                continue
            with self._changed:
                self._strangers[sock] = None
                if len(self._strangers) > MAX_STRANGERS:  # a real machine proves itself quickly
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            thread = threading.Thread(
                target=self._attend, args=(sock, str(address[0])), name="tandem-machine",
                daemon=True,
            )  # fmt: skip
            thread.start()
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _attend(self, sock: socket.socket, address: str) -> None:
        try:
            lines = lead(sock, self._token)
        except (EngineError, OSError) as error:
            log.warning("%s was refused: %s", address, error)
            sock.close()
            return
        finally:
            with self._changed:
                self._strangers.pop(sock, None)
        machine: JoinedMachine | None = None
        why: str = Sentence("has closed its connection")
        try:
            machine = self._admitted(lines, address)
            if machine is not None:
                why = self._followed(machine, lines)
        except EngineError as error:
            why = Sentence("has sent an invalid message ({problem})", problem=error.message)
        except OSError:
            pass
        if machine is not None:
            self._lose(machine, lines, why)
        lines.close()

    def _admitted(self, lines: Lines, address: str) -> JoinedMachine | None:
        hello = self._line(lines, "hello")
        why = difference(self._facts, hello)
        if not why:
            lines.send("file", path=self._path)
            why = file_difference(self._file, self._line(lines, "has"))
        machine = None
        if not why:
            machine, why = self._placed(hello, address, lines)
        if machine is None:
            log.warning("%s was refused: %s", address, why)
            lines.send("refused", why=why)
            return None
        self.on_change(Sentence("{machine} has joined.", machine=_named(machine)))
        return machine

    def _line(self, lines: Lines, kind: str) -> dict[str, Any]:
        for _ in range(int(HANDSHAKE_S / BEAT_S) * 12):  # hashing a file may take a while
            found = lines.receive(BEAT_S)
            if found is not None and found["kind"] == kind:
                return found
        raise LineError("It does not respond.")

    def _placed(
        self, hello: dict[str, Any], address: str, lines: Lines
    ) -> tuple[JoinedMachine | None, str]:
        sent = hello.get("devices")
        devices = tuple(parse_devices(list(map(str, sent[:64])) if isinstance(sent, list) else ()))
        with self._changed:
            free = [number for number in range(1, self._n) if number not in self._joined]
            if not free or self._is_closed:
                return None, Sentence("All {n} machines have already joined.", n=self._n)
            known = self._expected
            fit = [n for n in free if n not in known or known[n].devices == devices]
            if not fit:
                had = ", ".join(known[free[0]].devices)
                template = "The free place is reserved for a machine with the devices {devices}."
                return None, Sentence(template, devices=had)
            name, infos = one_line(str(hello.get("name", "")), 60), devices_from(hello.get("infos"))
            machine = JoinedMachine(fit[0], name, address, devices, infos)
            lines.send("welcome", number=machine.number, n=self._n, name=self.name)
            self._joined[machine.number] = machine, lines
            self._changed.notify_all()
        return machine, ""

    def _followed(self, machine: JoinedMachine, lines: Lines) -> str:
        for found in lines.alive():
            if found["kind"] == "fault":
                why = one_line(str(found.get("why")), 300)
                sentence = Sentence("{machine}: {problem}.", machine=_named(machine), problem=why)
                self.on_fault(machine.number, sentence)
            elif found["kind"] == "states":
                self._note_states(machine.number, lines, states_from(found.get("states")))
            elif found["kind"] == "leave":
                return Sentence("has left")
        return Sentence("has not responded for {n:g} s", n=MAX_SILENT * BEAT_S)

    def _note_states(self, number: int, lines: Lines, states: tuple[DeviceSnapshot, ...]) -> None:
        with self._changed:
            machine, current = self._joined.get(number, (None, None))
            if machine is not None and current is lines:
                self._joined[number] = replace(machine, states=states), lines

    def _lose(self, machine: JoinedMachine, lines: Lines, why: str) -> None:
        with self._changed:
            if self._joined.get(machine.number, (None, None))[1] is lines:
                del self._joined[machine.number]
            is_over = self._is_closed
        if not is_over:
            sentence = Sentence("{machine} {problem}.", machine=_named(machine), problem=why)
            self.on_fault(machine.number, sentence)
            self.on_change(sentence)


def _named(machine: JoinedMachine) -> str:
    return f"{machine.name} ({machine.address})"
