"""The side of a machine that joins machine 0: it waits to be started, and starts again."""

from __future__ import annotations

import json
import logging
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.formats.gguf.reader import GGUFFile, model_hash
from engine.hardware.devices.catalog import list_devices
from engine.hardware.devices.monitor import DeviceMonitor
from engine.hardware.devices.types import DeviceInfo, DeviceSnapshot
from engine.hosts.machines.agent import AgentTask
from engine.hosts.machines.interfaces import connect, interface_of
from engine.hosts.machines.lines import BEAT_S, MAX_SILENT, LineError, Lines, SilentError, join
from engine.util.programs import NO_WINDOW, child_environment, tie_child
from engine.util.sanitize import one_line, package_version

REPORT_S = 2.0
"""Seconds between two reports."""

MAX_DEVICES, MAX_LETTERS, MAX_NUMBER, MAX_BYTES = 64, 200, 1e6, 1 << 60
"""Most devices of a machine, letters of a text about one, and what a load, a temperature and a
memory are below."""

TOLD = ("id", "kind", "name", "total_bytes", "free_bytes", "n_cores", "compute_capability")
"""Facts of a device that are told."""


def told_devices() -> list[dict[str, Any]]:
    """Return facts of this machine's usable devices, as JSON."""
    usable = [device for device in list_devices() if device.usable]
    return [{name: getattr(device, name) for name in TOLD} for device in usable]


def devices_from(document: object) -> tuple[DeviceInfo, ...]:
    """Return the devices that a machine tells of; what makes no sense is left out."""
    types = {spec.name: spec.type for spec in fields(DeviceInfo)}
    found = []
    for entry in _dicts(document):
        given = {name: entry.get(name) for name in TOLD}
        wanted = {name: int if types[name] == "int" else str for name in TOLD}
        is_whole = all(type(value) is wanted[name] for name, value in given.items())
        if is_whole and given["kind"] in ("cpu", "cuda"):
            cut: dict[str, Any] = {
                k: v[:MAX_LETTERS] if isinstance(v, str) else v for k, v in given.items()
            }
            found.append(DeviceInfo(**cut))
    return tuple(found)


def told_states(snapshots: Sequence[DeviceSnapshot]) -> list[dict[str, Any]]:
    """Return the states of this machine's devices, as JSON."""
    return [
        {
            "device": one.device, "used_bytes": one.used_bytes, "total_bytes": one.total_bytes,
            "free_bytes": one.free_bytes, "load_percent": one.load_percent,
            "temperature_c": one.temperature_c,
        }
        for one in snapshots
        if not one.problem
    ]  # fmt: skip


def states_from(document: object) -> tuple[DeviceSnapshot, ...]:
    """Return the states that a machine tells of, as of now; what makes no sense is left out."""
    found = []
    for entry in _dicts(document):
        sizes = [_size(entry.get(f"{name}_bytes")) for name in ("used", "total", "free")]
        device = entry.get("device")
        if isinstance(device, str) and None not in sizes:
            used, total, free = (size or 0 for size in sizes)
            found.append(
                DeviceSnapshot(
                    device[:MAX_LETTERS], time.monotonic(), used, total, free,
                    load_percent=_number(entry.get("load_percent")),
                    temperature_c=_number(entry.get("temperature_c")),
                )
            )  # fmt: skip
    return tuple(found)


def _dicts(document: object) -> list[dict[str, Any]]:
    entries = document if isinstance(document, list) else []
    return [entry for entry in entries[:MAX_DEVICES] if isinstance(entry, dict)]


def _size(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < MAX_BYTES else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -MAX_NUMBER < value < MAX_NUMBER else None


def machine_facts() -> dict[str, str]:
    """Return the name of this machine, and versions that must be alike."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {
        "name": socket.gethostname(),
        "Tandem": package_version(),
        "PyTorch": torch.partition("+")[0],
        "byte order": sys.byteorder,
    }


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return why a machine cannot join, as a sentence; "" if it can."""
    for what in ("Tandem", "PyTorch", "byte order"):
        own, other = ours.get(what, ""), str(theirs.get(what, ""))[:40]
        if own != other:
            return f"It has {what} {other or '?'}, and this machine {own or '?'}."
    return ""


def file_facts(path: str) -> dict[str, Any]:
    """Return what tells a model's file from others, whatever it is called.

    Raises:
        EngineError: it cannot be read.
    """
    with GGUFFile.open(Path(path)) as file:
        n_bytes = sum(tensor.n_bytes for tensor in file.tensors.values())
        return {"bytes": n_bytes, "hash": model_hash(file)}


def file_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return how a machine's file differs from machine 0's, as a sentence; "" if it does not."""
    if theirs.get("bytes") != ours["bytes"]:
        sizes = f"{theirs.get('bytes')} bytes of weights instead of {ours['bytes']}"
        return f"It has another file: {sizes}."
    if theirs.get("hash") != ours["hash"]:
        return "It has another file of the same size: the header or samples of the weights differ."
    return ""


def checked_path(path: str) -> str:
    """Return a path as an absolute one.

    Raises:
        EngineError: there is no such file.
    """
    if not Path(path).is_file():
        raise EngineError(f"There is no file {path}.", "Name this machine's copy with --model.")
    return str(Path(path).resolve())


log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Seconds between two attempts to join again."""

FREED_S = 10.0
"""Seconds after a lost connection in which a refusal is not the last word: machine 0 may notice
later that this machine's place is free."""

BUSY_S = 15.0
"""Seconds for which a machine that says nothing is tried again: strangers may take its time."""

KILLED_S = 5.0
"""Seconds in which a killed agent and its worker end."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """How a machine joins.

    Attributes:
        host: address of machine 0.
        port: port there.
        token: what both must know.
        devices: devices of this machine's ranks.
        path: path of this machine's copy of the model's file; "" for the path on machine 0.
        interface: name or address of the interface to use; "" for the one that routes there.
        cpu_threads: number of threads of this machine's CPU ranks; None is one per core.
    """

    host: str
    port: int
    token: str
    devices: Sequence[str]
    path: str = ""
    interface: str = ""
    cpu_threads: int | None = None


def join_machines(request: JoinRequest, note: Callable[[str], None]) -> None:
    """Join machine 0 and compute with it, again and again, until it says that this is the end.

    Args:
        note: receiver of sentences about what happens.

    Raises:
        EngineError: machine 0 cannot be reached at first, or refuses this machine.
    """
    server, lost_at = "The server", None
    busy_until = time.monotonic() + BUSY_S
    while True:
        try:
            sock = connect(request.host, request.port, request.interface)
        except EngineError:
            if lost_at is None:
                raise
            time.sleep(AGAIN_S)
            continue
        with closing(sock):
            try:
                lines = join(sock, request.token)
                stay = Stay(request, lines, note)
                try:
                    if stay.run():
                        return
                finally:
                    stay.end()
                    lines.close()
                    server = stay.server
                why = f"{server} has not answered for {MAX_SILENT * BEAT_S:g} s."
            except LineError as error:
                is_busy = isinstance(error, SilentError) and time.monotonic() < busy_until
                if not is_busy and (lost_at is None or time.monotonic() > lost_at + FREED_S):
                    raise
                time.sleep(AGAIN_S)  # it may not have noticed yet that the place is free
                continue
            except OSError:
                why = f"{server} has closed the connection, or is gone."
        note(f"{why} Joining again.")
        lost_at = time.monotonic()
        busy_until = lost_at + BUSY_S


class Stay:
    """The time of this machine with machine 0 over one connection.

    Args:
        request: how it joins.
        lines: connection to machine 0.
        note: receiver of sentences.

    Attributes:
        server: what machine 0 is called in sentences.
    """

    def __init__(self, request: JoinRequest, lines: Lines, note: Callable[[str], None]) -> None:
        self._request, self._lines, self._note = request, lines, note
        self._agent: Agent | None = None
        self._faults: queue.SimpleQueue[tuple[Agent, str]] = queue.SimpleQueue()
        self._path, self._name = "", ""
        self._number, self._n = 0, 0
        self.server = "The server"

    def run(self) -> bool:
        """Do what machine 0 says; return whether it has said that this is the end.

        Raises:
            EngineError: this machine is refused.
            OSError: machine 0 is gone.
        """
        facts = machine_facts()
        self._name = facts["name"]
        self._lines.send(
            "hello", devices=list(self._request.devices), infos=told_devices(), **facts
        )
        watch = threading.Thread(target=self._pass_on, name="tandem-faults", daemon=True)
        watch.start()
        try:
            with DeviceMonitor() as monitor:
                for line in self._lines.alive():
                    if line["kind"] == "bye":
                        self._note("The server has ended.")
                        return True
                    if line["kind"] == "welcome":
                        monitor.start(self._tell_states, REPORT_S)
                    self._take(line)
        finally:
            self._faults.put((Agent.none(), ""))
            watch.join(BEAT_S)
        return False

    def _take(self, line: dict[str, Any]) -> None:
        """Do what a line says."""
        kind = line["kind"]
        if kind == "refused":
            why = one_line(str(line.get("why")), 300)
            raise LineError(f"The server refuses this machine: {why}")
        if kind == "file":
            self._tell_file(str(line.get("path")))
        elif kind == "welcome":
            self._number, self._n = int(line["number"]), int(line["n"])
            self.server = f"{one_line(str(line.get('name')), 60)} ({self._lines.peer_address})"
            self._note(f"Joined as machine {self._number + 1} of {self._n}.")
        elif kind == "start":
            self._start(int(line["port"]))
        elif kind == "end":
            self.end()
            self._note(one_line(str(line.get("why")), 300))

    def _tell_states(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        with suppress(OSError):
            self._lines.send("states", states=told_states(snapshots))

    def _tell_file(self, path: str) -> None:
        """Tell machine 0 what this machine's copy of the file is.

        Raises:
            EngineError: there is none.
        """
        self._path = checked_path(self._request.path or path)
        self._lines.send("has", **file_facts(self._path))

    def _start(self, port: int) -> None:
        self.end()
        task = AgentTask(
            self._n, self._number, self._name, self._lines.peer_address, port,
            interface_of(self._lines.own_address), self._path, self._request.cpu_threads,
        )  # fmt: skip
        self._agent = Agent(task, lambda agent, why: self._faults.put((agent, why)))
        self._note("Computing.")

    def _pass_on(self) -> None:
        """Tell machine 0 about faults of this machine until the end; runs on a thread."""
        while True:
            agent, why = self._faults.get()
            if not why:
                return
            if agent is self._agent:
                self._note(f"This machine: {why}.")
                with suppress(OSError):
                    self._lines.send("fault", why=why)

    def end(self) -> None:
        """End what computes here, at once."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.kill()


class Agent:
    """torchrun's agent on this machine, as a child process.

    Args:
        task: what it is to do.
        on_fault: called on a thread with this object, if it ends though nobody wants it to.
    """

    def __init__(self, task: AgentTask, on_fault: Callable[[Agent, str], None]) -> None:
        self._on_fault = on_fault
        self._process = subprocess.Popen(
            task.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=child_environment(),
            creationflags=NO_WINDOW,
        )  # fmt: skip
        tie_child(self._process.pid)
        self._thread = threading.Thread(target=self._follow, name="tandem-agent", daemon=True)
        self._thread.start()

    @staticmethod
    def none() -> Agent:
        """Return what stands for no agent."""
        return Agent.__new__(Agent)

    def _follow(self) -> None:
        """Read what the agent tells until it ends; runs on a thread."""
        assert self._process.stdout is not None
        why = ""
        for line in self._process.stdout:
            with suppress(ValueError, KeyError, TypeError):
                why = str(json.loads(line)["fault"])
                self._on_fault(self, why)
        status = self._process.wait()
        if status and not why:
            self._on_fault(self, f"torchrun's agent has ended (exit status {status})")

    def kill(self) -> None:
        """End the agent and its worker at once."""
        with suppress(OSError):
            self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_S)
