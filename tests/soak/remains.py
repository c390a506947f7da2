"""What is left of a window: processes, and files of dead processes."""

import time
from contextlib import suppress
from pathlib import Path

import psutil

from engine.util.files import PREFIX, TEMPORARY, has_ended
from tests.soak.window import MARK

GONE_S = 3.0
"""Seconds after which nothing that a dead process has started may run any more."""


def marked(mark: str) -> dict[int, str]:
    """Return the command lines of all living processes of a window, by their numbers."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found[process.pid] = " ".join(process.cmdline())[:200]
        except (psutil.Error, OSError):  # another user's, or gone by now
            continue
    return found


def orphans(mark: str, seconds: float = GONE_S) -> dict[int, str]:
    """Return what still runs of a window that has ended, after `seconds` at the latest."""
    deadline = time.monotonic() + seconds
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def still_alive(pids: set[int], seconds: float = GONE_S) -> set[int]:
    """Return which of some processes still run after `seconds`; zombies do."""
    deadline = time.monotonic() + seconds
    while (found := {p for p in pids if psutil.pid_exists(p)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started, and those that these have."""
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def left_files(home: Path, seconds: float = GONE_S) -> list[str]:
    """Return what is left of dead processes in a home after `seconds` at the latest.

    These are temporaries without a living owner, sockets, pipes, locks, and all other files in the
    home's own folder of temporaries.
    """
    deadline = time.monotonic() + seconds
    while (found := _left_now(home)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _left_now(home: Path) -> list[str]:
    found = []
    own = _of_open_window(home)
    for path in home.rglob("*"):
        if path in own:
            continue
        is_temporary = path.name.startswith(PREFIX) or path.name.endswith((".tmp", ".lock"))
        is_odd = path.is_socket() or path.is_fifo() or path.parent in (home / "tmp", home / "run")
        owner = _owner(path)
        if (is_temporary or is_odd or owner) and (not owner or has_ended(owner)):
            found.append(str(path.relative_to(home)))
    return sorted(found)


def _of_open_window(home: Path) -> set[Path]:
    """Return lock and socket of the window that takes later starts, if it lives."""
    lock = home / ".config" / "Tandem" / "window.lock"
    with suppress(FileNotFoundError, ValueError):
        if psutil.pid_exists(int(lock.read_text().split("\n")[0])):
            return {lock, *(home / "run").glob("tandem-*")}
    return set()


def _owner(path: Path) -> str:
    """Return the mark of the process that a temporary belongs to; "" for none."""
    named = TEMPORARY.fullmatch(path.name)
    return named[1] if named else ""
