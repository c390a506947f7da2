"""The joining machine's side: it joins machine 0, and rejoins after a lost connection."""

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

from engine.errors import EngineError, Sentence
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
"""Limits in reports: devices per machine, characters per text, loads and temperatures, memory."""

FACTS = ("id", "kind", "name", "total_bytes", "free_bytes", "n_cores", "compute_capability")
"""Facts reported about each device."""


def device_report() -> list[dict[str, Any]]:
    """Return facts about this machine's usable devices, as a JSON document."""
    usable = [device for device in list_devices() if device.usable]
    return [{name: getattr(device, name) for name in FACTS} for device in usable]


def devices_from(document: object) -> tuple[DeviceInfo, ...]:
    """Return the devices in a machine's report, skipping invalid entries."""
    types = {spec.name: spec.type for spec in fields(DeviceInfo)}
    found = []
    for entry in _dicts(document):
        given = {name: entry.get(name) for name in FACTS}
        expected = {name: int if types[name] == "int" else str for name in FACTS}
        is_whole = all(type(value) is expected[name] for name, value in given.items())
        if is_whole and given["kind"] in ("cpu", "cuda"):
            cut: dict[str, Any] = {
                k: v[:MAX_LETTERS] if isinstance(v, str) else v for k, v in given.items()
            }
            found.append(DeviceInfo(**cut))
    return tuple(found)


def state_report(snapshots: Sequence[DeviceSnapshot]) -> list[dict[str, Any]]:
    """Return the states of this machine's devices, as a JSON document."""
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
    """Return the states in a machine's report, dated now, skipping invalid entries."""
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
    """Return this machine's name, and the versions that must match."""
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
            return Sentence(
                "It has {name} {other}, but this machine has {own}.",
                name=what,
                other=other or "?",
                own=own or "?",
            )
    return ""


def file_facts(path: str) -> dict[str, Any]:
    """Return facts that identify a model's file, independent of its name.

    Raises:
        EngineError: the file cannot be read.
    """
    with GGUFFile.open(Path(path)) as file:
        n_bytes = sum(tensor.n_bytes for tensor in file.tensors.values())
        return {"bytes": n_bytes, "hash": model_hash(file)}


def file_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return how a machine's file differs from machine 0's, as a sentence; "" if it does not."""
    if theirs.get("bytes") != ours["bytes"]:
        return Sentence(
            "It has a different file: {n} bytes of weights instead of {expected}.",
            n=str(theirs.get("bytes")),
            expected=ours["bytes"],
        )
    if theirs.get("hash") != ours["hash"]:
        return Sentence(
            "It has a different file of the same size: the header or sampled weights differ."
        )
    return ""


def checked_path(path: str) -> str:
    """Return the absolute path of a file.

    Raises:
        EngineError: there is no such file.
    """
    if not Path(path).is_file():
        raise EngineError(
            "There is no file {path}.", "Specify this machine's copy with --model.", path=path
        )
    return str(Path(path).resolve())


log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Seconds between two attempts to rejoin."""

FREED_S = 10.0
"""Seconds after a lost connection during which a refusal is not final, as machine 0 may take a
while to notice that this machine's place is free."""

BUSY_S = 15.0
"""Seconds during which to retry while machine 0 is silent, as others may keep it busy."""

KILLED_S = 5.0
"""Seconds to wait for a killed agent and its worker."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Settings with which a machine joins.

    Attributes:
        devices: devices of this machine's ranks.
        path: path of this machine's copy of the model's file; "" for the same path as on machine 0.
        interface: name or address of the interface to use; "" for the one that routes to machine 0.
        cpu_threads: number of threads for this machine's CPU ranks; None for one per core.
    """

    host: str
    port: int
    token: str
    devices: Sequence[str]
    path: str = ""
    interface: str = ""
    cpu_threads: int | None = None


def join_machines(request: JoinRequest, note: Callable[[str], None]) -> None:
    """Join machine 0 and compute with it, rejoining if necessary, until it ends.

    Args:
        note: called with sentences about progress.

    Raises:
        EngineError: machine 0 cannot be reached initially, or refuses this machine.
    """
    server: str = Sentence("The server")
    lost_at = None
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
                template = "{server} has not responded for {n:g} s. Joining again."
                why = Sentence(template, server=server, n=MAX_SILENT * BEAT_S)
            except LineError as error:
                is_busy = isinstance(error, SilentError) and time.monotonic() < busy_until
                if not is_busy and (lost_at is None or time.monotonic() > lost_at + FREED_S):
                    raise
                time.sleep(AGAIN_S)  # machine 0 may not have noticed yet that the place is free
                continue
            except OSError:
                template = "{server} has closed the connection or is gone. Joining again."
                why = Sentence(template, server=server)
        note(why)
        lost_at = time.monotonic()
        busy_until = lost_at + BUSY_S


class Stay:
    """One connection from this machine to machine 0.

    Args:
        request: settings for joining.
        lines: connection to machine 0.
        note: called with sentences about progress.

    Attributes:
        server: name of machine 0, for messages.
    """

    def __init__(self, request: JoinRequest, lines: Lines, note: Callable[[str], None]) -> None:
        self._request, self._lines, self._note = request, lines, note
        self._agent: Agent | None = None
        self._faults: queue.SimpleQueue[tuple[Agent | None, str]] = queue.SimpleQueue()
        self._path, self._name = "", ""
        self._number, self._n = 0, 0
        self.server: str = Sentence("The server")

    def run(self) -> bool:
        """Follow machine 0; return whether it has stopped, rather than only the connection.

        Raises:
            EngineError: this machine is refused.
            OSError: machine 0 is gone.
        """
        facts = machine_facts()
        self._name = facts["name"]
        self._lines.send(
            "hello", devices=list(self._request.devices), infos=device_report(), **facts
        )
        watch = threading.Thread(target=self._pass_on, name="tandem-faults", daemon=True)
        watch.start()
        try:
            with DeviceMonitor() as monitor:
                for line in self._lines.alive():
                    if line["kind"] == "bye":
                        self._note(Sentence("The server has stopped."))
                        return True
                    if line["kind"] == "welcome":
                        monitor.start(self._send_states, REPORT_S)
                    self._take(line)
        finally:
            self._faults.put((None, ""))
            watch.join(BEAT_S)
        return False

    def _take(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind == "refused":
            why = one_line(str(line.get("why")), 300)
            raise LineError("The server refuses this machine: {problem}", problem=why)
        if kind == "file":
            self._send_file_facts(str(line.get("path")))
        elif kind == "welcome":
            self._number, self._n = int(line["number"]), int(line["n"])
            self.server = f"{one_line(str(line.get('name')), 60)} ({self._lines.peer_address})"
            joined = "Joined as machine {n} of {total}."
            self._note(Sentence(joined, n=self._number + 1, total=self._n))
        elif kind == "start":
            self._start(int(line["port"]))
        elif kind == "end":
            self.end()
            self._note(one_line(str(line.get("why")), 300))

    def _send_states(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        with suppress(OSError):
            self._lines.send("states", states=state_report(snapshots))

    def _send_file_facts(self, path: str) -> None:
        self._path = checked_path(self._request.path or path)
        self._lines.send("has", **file_facts(self._path))

    def _start(self, port: int) -> None:
        self.end()
        task = AgentTask(
            self._n, self._number, self._name, self._lines.peer_address, port,
            interface_of(self._lines.own_address), self._path, self._request.cpu_threads,
        )  # fmt: skip
        self._agent = Agent(task, lambda agent, why: self._faults.put((agent, why)))
        self._note(Sentence("Computing."))

    def _pass_on(self) -> None:
        while True:
            agent, why = self._faults.get()
            if not why:
                return
            if agent is self._agent:
                self._note(Sentence("This machine: {problem}.", problem=why))
                with suppress(OSError):
                    self._lines.send("fault", why=why)

    def end(self) -> None:
        """Kill the processes on this machine."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.kill()


class Agent:
    """torchrun's agent on this machine, as a child process.

    Args:
        task: the agent's task.
        on_fault: called on a thread with this object and the reason if the agent ends unexpectedly.
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

    def _follow(self) -> None:
        assert self._process.stdout is not None
        why = ""
        for line in self._process.stdout:
            with suppress(ValueError, KeyError, TypeError):
                why = str(json.loads(line)["fault"])
                self._on_fault(self, why)
        status = self._process.wait()
        if status and not why:
            template = "torchrun's agent has exited (exit status {code})"
            self._on_fault(self, Sentence(template, code=status))

    def kill(self) -> None:
        """Kill the agent and its worker."""
        with suppress(OSError):
            self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_S)
