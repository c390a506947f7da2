"""Machine 0's side of the machines that join: who is there, and who is lost."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import EngineError
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
"""Most connections at a time that have not proven yet to know the token; beyond it the oldest is
closed."""

JOIN_S = 1.0
"""Most seconds that the end waits for threads, some of which may be with strangers."""

AGAIN_S = 0.1
"""Seconds until the next attempt to take a connection after one that failed."""


@dataclass(frozen=True, slots=True)
class JoinedMachine:
    """A machine that has joined.

    Attributes:
        number: its number, from 1.
        name: its name.
        address: the address that it has joined from.
        devices: devices of its ranks.
        infos: facts of all its devices.
        states: states of its devices, as it has told them last.
    """

    number: int
    name: str
    address: str
    devices: tuple[str, ...]
    infos: tuple[DeviceInfo, ...] = ()
    states: tuple[DeviceSnapshot, ...] = ()

    @property
    def far_infos(self) -> tuple[DeviceInfo, ...]:
        """Facts of all its devices, with ids such as "1/cuda:0"."""
        return tuple(replace(info, id=far_id(self.number, info.id)) for info in self.infos)


class Gathering:
    """The machines that join machine 0 and compute with it.

    Args:
        sock: socket that listens for them; this object closes it.
        n_machines: number of machines, with this one.
        token: what they must know.
        path: path of the model's file, of which they must have a copy.

    Attributes:
        on_change: called on a thread with a sentence whenever a machine has joined or is lost, and
            when processes on machines that are all there have ended.
        on_fault: called on a thread with the number of a machine that cannot go on, and why.
    """

    def __init__(self, sock: socket.socket, n_machines: int, token: str, path: str) -> None:
        self.on_change: Callable[[str], None] = lambda sentence: None
        self.on_fault: Callable[[int, str], None] = lambda number, why: None
        self._sock, self._n, self._token, self._path = sock, n_machines, token, path
        self._facts, self._file = machine_facts(), file_facts(path)
        self._changed = threading.Condition()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._there: dict[int, tuple[JoinedMachine, Lines]] = {}
        self._wanted: dict[int, JoinedMachine] = {}
        self._is_closed = False
        self._threads = [threading.Thread(target=self._accept, name="tandem-machines", daemon=True)]
        self._threads[0].start()

    @property
    def name(self) -> str:
        """Name of this machine."""
        return self._facts["name"]

    @property
    def machines(self) -> Sequence[JoinedMachine]:
        """The machines that are there, by number."""
        with self._changed:
            return [self._there[number][0] for number in sorted(self._there)]

    @property
    def is_complete(self) -> bool:
        """Whether all machines are there."""
        return len(self._there) == self._n - 1

    @property
    def missing(self) -> str:
        """Sentence that says which machines are missing."""
        names = [one.name for number, one in self._wanted.items() if number not in self._there]
        who = f" ({', '.join(names)})" if names else ""
        n = self._n - 1 - len(self._there)
        return f"The model waits for {n} more machine{'s' * (n > 1)}{who} to join."

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all machines are there; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_complete or self._is_closed, timeout_s)

    def keep_places(self) -> None:
        """Give the places of these machines only to machines with the same devices from now on."""
        with self._changed:
            self._wanted = {number: one for number, (one, _) in self._there.items()}

    def interface_address(self) -> str:
        """Return the address of this machine at which the others have reached it.

        Raises:
            EngineError: they have used several.
        """
        with self._changed:
            found = {lines.own_address for _, lines in self._there.values()}
        if len(found) > 1:
            raise EngineError(
                f"The machines have reached this one at {' and '.join(sorted(found))}.",
                "Name one of these addresses with --rendezvous HOST:PORT.",
            )
        return found.pop() if found else "127.0.0.1"

    def tell(self, kind: str, **values: Any) -> None:
        """Send a line to all machines; those that are gone are found elsewhere."""
        with self._changed:
            there = list(self._there.values())
        for _, lines in there:
            with suppress(OSError):
                lines.send(kind, **values)

    def close(self) -> None:
        """Tell all machines that this is the end, and let no more join; safe to call twice."""
        self.tell("bye")
        with self._changed:
            self._is_closed = True
            there = list(self._there.values())
            self._changed.notify_all()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for _, lines in there:
            lines.close()
        until = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    # everything below runs on threads of this object

    def _accept(self) -> None:
        """Take connections until the end."""
        while not self._is_closed:
            try:
                sock, address = self._sock.accept()
            except OSError:
                if not self._is_closed:  # such as for want of handles, which may be free soon
                    time.sleep(AGAIN_S)
                continue
            with self._changed:
                self._strangers[sock] = None
                if len(self._strangers) > MAX_STRANGERS:  # a machine proves itself at once
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
        """Let a machine join, and watch it until it is lost."""
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
        why = "has closed its connection"
        try:
            machine = self._admitted(lines, address)
            if machine is not None:
                why = self._followed(machine, lines)
        except EngineError as error:
            why = f"has sent something wrong ({error.message})"
        except OSError:
            pass
        if machine is not None:
            self._lose(machine, lines, why)
        lines.close()

    def _admitted(self, lines: Lines, address: str) -> JoinedMachine | None:
        """Return a machine that may join; None if it was refused, with a sentence."""
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
        self.on_change(f"{_named(machine)} has joined.")
        return machine

    def _line(self, lines: Lines, kind: str) -> dict[str, Any]:
        """Return the next line, of a kind; others are signs of life.

        Raises:
            LineError: it does not come.
        """
        for _ in range(int(HANDSHAKE_S / BEAT_S) * 12):  # hashing a file may take a while
            found = lines.receive(BEAT_S)
            if found is not None and found["kind"] == kind:
                return found
        raise LineError("It does not answer.")

    def _placed(
        self, hello: dict[str, Any], address: str, lines: Lines
    ) -> tuple[JoinedMachine | None, str]:
        """Return a machine with a free place, or why there is none."""
        told = hello.get("devices")
        devices = tuple(parse_devices(list(map(str, told[:64])) if isinstance(told, list) else ()))
        with self._changed:
            free = [number for number in range(1, self._n) if number not in self._there]
            if not free or self._is_closed:
                return None, f"All {self._n} machines are there already."
            fit = [n for n in free if n not in self._wanted or self._wanted[n].devices == devices]
            if not fit:
                had = ", ".join(self._wanted[free[0]].devices)
                return None, f"The place that is free is for a machine with the devices {had}."
            name, infos = one_line(str(hello.get("name", "")), 60), devices_from(hello.get("infos"))
            machine = JoinedMachine(fit[0], name, address, devices, infos)
            lines.send("welcome", number=machine.number, n=self._n, name=self.name)
            self._there[machine.number] = machine, lines
            self._changed.notify_all()
        return machine, ""

    def _followed(self, machine: JoinedMachine, lines: Lines) -> str:
        """Exchange signs of life with a machine until it is lost; return why it is."""
        for found in lines.alive():
            if found["kind"] == "fault":
                why = one_line(str(found.get("why")), 300)
                self.on_fault(machine.number, f"{_named(machine)}: {why}.")
            elif found["kind"] == "states":
                self._note_states(machine.number, lines, states_from(found.get("states")))
            elif found["kind"] == "leave":
                return "was told to leave"
        return f"has not answered for {MAX_SILENT * BEAT_S:g} s"

    def _note_states(self, number: int, lines: Lines, states: tuple[DeviceSnapshot, ...]) -> None:
        """Note what a machine tells of its devices."""
        with self._changed:
            machine, current = self._there.get(number, (None, None))
            if machine is not None and current is lines:
                self._there[number] = replace(machine, states=states), lines

    def _lose(self, machine: JoinedMachine, lines: Lines, why: str) -> None:
        """Note that a machine is gone."""
        with self._changed:
            if self._there.get(machine.number, (None, None))[1] is lines:
                del self._there[machine.number]
            is_over = self._is_closed
        if not is_over:
            self.on_fault(machine.number, f"{_named(machine)} {why}.")
            self.on_change(f"{_named(machine)} {why}.")


def _named(machine: JoinedMachine) -> str:
    return f"{machine.name} ({machine.address})"
