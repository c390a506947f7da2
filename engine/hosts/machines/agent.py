"""Program that runs torchrun's agent: `python -m engine.hosts.machines.agent TASK`.

TASK is an `AgentTask` as JSON. Optional further arguments are the handle of a connection to this
program's parent, for the worker, and the parent's process id. The agent starts one worker
(`engine.hosts.machines.worker`), watches it, and exits with it. It reports a fault to its parent as
a line of JSON on its output.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection, Listener

import psutil

from engine.hosts.machines.interfaces import listen_for_machines
from engine.util.programs import program_command, tie_to_parent

VARIABLE = "TANDEM_MACHINE"
"""The worker's environment variable with the task."""

PLACE_VARIABLE, KEY_VARIABLE = "TANDEM_AGENT", "TANDEM_AGENT_KEY"
"""The worker's environment variables with the agent's address and the authentication key."""

LOOK_S = 0.25
"""Seconds between two checks of the worker."""

MAX_STOPPED = 6
"""Number of consecutive checks that must find the worker stopped before it counts as lost."""

MAX_SILENT = 120
"""The same for checks without a heartbeat, as some libraries hold Python's lock."""

CONNECT_S = 60
"""Seconds within which all machines must start their workers."""

FAULT_STATUS = 70
"""Exit status after a reported fault."""

FAULTS = "engine.hosts.machines.fault"
"""Name of the logger for faults."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """Task of an agent.

    Attributes:
        master: address of machine 0, where the agents meet.
        path: path of this machine's copy of the model's file; "" for the same path as on machine 0.
        cpu_threads: number of threads for this machine's CPU ranks; None for one per core.
    """

    n_machines: int
    number: int
    name: str
    master: str
    port: int
    interface: str
    path: str = ""
    cpu_threads: int | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """Command line of the agent."""
        return (*program_command("engine.hosts.machines.agent"), json.dumps(asdict(self)))

    def network(self) -> dict[str, str]:
        """Return the environment variables for gloo and NCCL.

        They select the interface; NCCL may use InfiniBand only on such an interface or if the user
        allows it. They disable PyTorch's NCCL watchdog: this program stops the worker once it is
        known which machine has failed, whereas the watchdog would kill healthy workers before that.
        """
        is_infiniband = self.interface.startswith("ib")
        return {
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": f"={self.interface}",  # without "=" it would be a prefix
            "NCCL_IB_DISABLE": os.environ.get("NCCL_IB_DISABLE", "0" if is_infiniband else "1"),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "TP_SOCKET_IFNAME": self.interface,
        }


def task_of_environment() -> AgentTask:
    """Return the task from the environment."""
    return AgentTask(**json.loads(os.environ[VARIABLE]))


def main() -> int:
    """Run a worker under torchrun's agent; return the exit status."""
    tie_to_parent()
    text, *inherited = sys.argv[1:]
    if inherited and sys.platform == "linux" and os.getppid() != int(inherited[1]):
        return 1  # the parent is already gone
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    task, key = AgentTask(**json.loads(text)), secrets.token_bytes(16)
    os.environ.update(task.network(), **{VARIABLE: text})
    handle = int(inherited[0]) if inherited else None
    with Listener(authkey=key) as listener:
        threading.Thread(target=_watch, args=(listener, handle), daemon=True).start()
        os.environ[PLACE_VARIABLE], os.environ[KEY_VARIABLE] = str(listener.address), key.hex()
        return _launch(task)


def _launch(task: AgentTask) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    config = LaunchConfig(
        min_nodes=task.n_machines, max_nodes=task.n_machines, nproc_per_node=1,
        run_id="tandem", rdzv_backend="static", rdzv_endpoint=f"{task.master}:{task.port}",
        rdzv_configs={"rank": task.number, "timeout": CONNECT_S}, max_restarts=0,
        monitor_interval=0.1, start_method="spawn",
    )  # fmt: skip
    store = _own_store(task) if task.number == 0 else None
    try:
        launch_agent(config, sys.executable, ["-P", "-m", "engine.hosts.machines.worker"])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        _report_fault(_end_of(failure.exitcode))
        return FAULT_STATUS
    finally:
        del store
    return 0


def _own_store(task: AgentTask) -> object:
    """Open the agents' store at one address, as torchrun would listen on all; not on Windows."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if sys.platform == "win32":
        return None  # untested there
    listening = listen_for_machines(task.master, task.port)
    return TCPStore(
        task.master, task.port, task.n_machines, is_master=True, multi_tenant=True,
        timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )  # fmt: skip


def _end_of(code: int) -> str:
    if code < 0:
        return f"its process was killed by signal {-code}"
    return f"its process exited unexpectedly (exit status {code})"


def _report_fault(why: str) -> None:
    """Report to the parent, only once, why this machine cannot continue."""
    if _reported.acquire(blocking=False):
        with suppress(OSError):
            os.write(1, json.dumps({"fault": why}).encode() + b"\n")
        logging.getLogger(FAULTS).error("%s", why)


def logged_fault(log: Sequence[str]) -> str:
    """Return the fault that an agent has logged; "" if there is none."""
    mark = f"ERROR {FAULTS}: "
    found = [line.removeprefix(mark) for line in log if line.startswith(mark)]
    return found[-1] if found else ""


_reported = threading.Lock()


def _watch(listener: Listener, handle: int | None) -> None:
    connection = listener.accept()
    pid = int(connection.recv_bytes().decode())
    if handle is not None:
        reduction.send_handle(connection, handle, pid)
        _close_handle(handle)
    why = _fault(connection, pid)
    if why:
        _report_fault(why)
        os._exit(FAULT_STATUS)  # the worker exits with this process


def _close_handle(handle: int) -> None:
    """Close this process's copy of the handle, so that closing the worker's copy is noticed."""
    if sys.platform == "win32":
        import _winapi

        _winapi.CloseHandle(handle)
    else:
        os.close(handle)


def _fault(connection: Connection, pid: int) -> str:
    n_stopped = n_silent = 0
    while True:
        try:
            if connection.poll(LOOK_S):
                n_silent = 0
                found = json.loads(connection.recv_bytes())
                if "fault" in found:
                    time.sleep(LOOK_S)  # let it send its last events
                    return str(found["fault"])
                continue
            n_silent += 1
            is_stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
        except (OSError, EOFError, psutil.Error):
            return ""
        n_stopped = n_stopped + 1 if is_stopped else 0
        if n_stopped >= MAX_STOPPED:
            return "its process was stopped"
        if n_silent >= MAX_SILENT:
            return f"its process has shown no sign of life for {MAX_SILENT * LOOK_S:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
