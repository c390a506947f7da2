"""Process with one machine's ranks: `python -m engine.hosts.machines.worker`.

torchrun's agent starts it (`machines.agent`). On machine 0 it is an engine like
`engine.hosts.process.program`, with models on all machines; on other machines it follows machine 0.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Client, Connection

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
from engine.distributed.machine_runtime import follow, open_on_machines
from engine.distributed.machines import END, Machines
from engine.distributed.straight import backend_of_environment
from engine.distributed.straight_proof import measure_wires
from engine.distributed.wire import Wire
from engine.errors import EngineError
from engine.events import WiresMeasured
from engine.hosts.machines.agent import (
    FAULT_STATUS,
    KEY_VARIABLE,
    PLACE_VARIABLE,
    task_of_environment,
)
from engine.hosts.process.channel import FROM_ENGINE, TO_ENGINE, Channel, inherited_connection
from engine.hosts.process.program import serve
from engine.runtime.thread_runtime import open_on_machines_by
from engine.util.programs import tie_to_parent

BEAT_S = 1.0
"""Seconds between two heartbeats."""


def main() -> int:
    """Compute with the other machines until machine 0's parent ends the work."""
    tie_to_parent()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for name in ("SIGINT", "SIGHUP"):  # a terminal sends these to all its processes
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: None)
    task = task_of_environment()
    agent = AgentLink()
    channel = None
    if task.number == 0:
        channel = Channel(inherited_connection(agent.handle()), FROM_ENGINE, TO_ENGINE)
    agent.begin()
    try:
        wire = Wire(task.name)
        machines = Machines(wire, agent.report, backend_of_environment())
        found = WiresMeasured(tuple(machines.names), measure_wires(wire))
        if channel is None:
            follow(machines, task.path, task.cpu_threads)
        else:
            open_on_machines_by(partial(open_on_machines, machines))
            serve(channel, found)
            machines.orders.send(END)
        machines.close()
    except EngineError as error:
        agent.report(error)
        threading.Event().wait(10)  # until the agent kills this process
        return FAULT_STATUS
    return 0


class AgentLink:
    """The worker's connection to the agent, with heartbeats."""

    def __init__(self) -> None:
        key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
        self._connection: Connection = Client(os.environ[PLACE_VARIABLE], authkey=key)
        self._connection.send_bytes(str(os.getpid()).encode())
        self._lock = threading.Lock()

    def handle(self) -> int:
        """Receive the handle of the connection to the engine's parent."""
        return reduction.recv_handle(self._connection)

    def begin(self) -> None:
        """Start sending heartbeats."""
        threading.Thread(target=self._beat, name="tandem-beat", daemon=True).start()

    def _beat(self) -> None:
        stop = threading.Event()
        while not stop.wait(BEAT_S):
            self._send({})

    def report(self, error: EngineError) -> None:
        """Report why this machine cannot continue; the agent then kills this process."""
        self._send({"fault": error.message.rstrip(".")})

    def _send(self, value: dict[str, str]) -> None:
        with self._lock:
            try:
                self._connection.send_bytes(json.dumps(value).encode())
            except OSError:  # the agent is gone, so exit as well
                os._exit(FAULT_STATUS)


if __name__ == "__main__":
    sys.exit(main())
