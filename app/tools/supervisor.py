"""Parent process of a tool server's program on Linux; at the end, it kills all descendants.

`python -I -S supervisor.py PROGRAM ARGUMENTS` imports nothing from the app, so it starts fast.
Signals to a process group miss processes in other sessions (setsid). As the reaper of orphans
(PR_SET_CHILD_SUBREAPER), this process stays the ancestor of all descendants. It kills them once the
program has exited, or a while after stdin has been closed.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Final

PR_SET_CHILD_SUBREAPER: Final = 36

END_S: Final = 3.0
"""Seconds a program has to exit after its stdin is closed, e.g. because the window died; the `mcp`
package allows two seconds before SIGTERM."""

TERMINATE_S: Final = 0.5  # seconds a program has to exit after SIGTERM
KILL_S: Final = 2.0  # seconds after which unkillable processes are left alone


def main(command: list[str]) -> int:
    """Run a program, then kill all its descendants; return the program's exit status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 127
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # so that the reader sees the program's EOF
    status = _watch(process, reading)
    _kill_all()
    return status


def _watch(process: subprocess.Popen[bytes], reading: int) -> int:
    wakes = select.poll()
    wakes.register(reading, select.POLLIN)
    wakes.register(0, 0)  # reports when the writer closes stdin
    until = float("inf")
    while (left := until - time.monotonic()) > 0:
        timeout = None if left == float("inf") else left * 1000
        for handle, _ in wakes.poll(timeout):
            if handle == 0:
                wakes.unregister(0)
                until = min(until, time.monotonic() + END_S)
            elif set(os.read(reading, 4096)) - {signal.SIGCHLD}:
                until = min(until, time.monotonic() + TERMINATE_S)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == process.pid:
                    process.returncode = os.waitstatus_to_exitcode(ended[1])
                    return process.returncode
    return 1


def _kill_all() -> None:
    until = time.monotonic() + KILL_S
    while time.monotonic() < until:
        for pid in _descendants():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # none is left
        time.sleep(0.002)


def _descendants() -> set[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, below = set[int](), [os.getpid()]
    while below:
        more = [pid for pid in children.get(below.pop(), ()) if pid not in found]
        found.update(more)
        below += more
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) % 256)
