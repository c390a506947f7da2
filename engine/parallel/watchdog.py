"""Watchdog for a model's ranks: it finds hung ranks within seconds but spares busy ones.

A rank may compute for minutes while others wait for it, so elapsed time is no criterion. A rank
counts as hung if it has shown no sign of life for a few seconds (`RankActivity`), and neither has
any other rank with work left, which may be holding it up.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from engine.errors import CommError, Sentence, listed

if TYPE_CHECKING:
    import torch

HELD_UP = ("R", "D")
"""Linux states in which a thread counts as alive: running or ready to run; waiting for a disk."""

TASKS = Path("/proc/self/task")
"""Linux's list of all threads in this process, including torch's."""

BUSY = 0.3
"""Number of cores in use above which a process shows a sign of life for all its ranks.

Used on systems that cannot tell the ranks' threads apart. An idle window uses less.
"""

THREAD_QUERY_LIMITED_INFORMATION = 0x0800  # winnt.h
THREAD_BASIC_INFO, N_BASIC_INFO = (3, 10)  # mach/thread_info.h: flavor, size in 32-bit words

_serial = count()


class _ThisThread(threading.local):
    # the rank for which the thread works; None if it is not monitored

    activity: RankActivity | None = None


_this_thread = _ThisThread()


class RankActivity:
    """Activity of one rank's threads, initially only the thread that creates this object.

    On Linux, a thread inherits its parent's name, which identifies threads that a library has
    started for the rank.
    """

    def __init__(self) -> None:
        self._name = f"rank.{next(_serial) % 10**9}"
        self._clocks: list[Callable[[], int]] = []
        self._seen: list[int] = []
        self._started: dict[str, str] = {}
        self._process_s = self._asked_at = 0.0
        self.include_this_thread()

    @staticmethod
    def of_this_thread() -> RankActivity | None:
        """Return the `RankActivity` of the calling thread's rank; None if not monitored."""
        return _this_thread.activity

    def include_this_thread(self) -> None:
        """Count the calling thread as one of this rank's from now on."""
        _this_thread.activity = self
        with suppress(OSError):
            (TASKS / str(threading.get_native_id()) / "comm").write_text(self._name)
        running = [clock for clock in self._clocks if _read(clock)]
        self._clocks = [*running, _clock_of_this_thread()]

    def has_moved(self) -> bool:
        """Return whether any thread has used CPU time since the last call, or is waiting to run."""
        seen = [_read(clock) for clock in self._clocks]
        before, self._seen = self._seen, seen
        is_busy = self._is_process_busy()
        if seen != before:
            return True
        if TASKS.exists():
            return self._have_named_threads_moved()
        return is_busy or bool(psutil.Process().children())

    def _have_named_threads_moved(self) -> bool:
        # CPU times have steps of 10 ms; threads that wait to run or that have a child process, for
        # example a compiler, count too
        before, self._started, is_held_up = self._started, {}, False
        for task in TASKS.iterdir():
            with suppress(OSError, IndexError):  # it may have finished
                if (task / "comm").read_text().strip() == self._name:
                    state, *numbers = (task / "stat").read_text().rpartition(")")[2].split()
                    self._started[task.name] = " ".join(numbers[10:12])  # utime and stime
                    is_held_up = is_held_up or state in HELD_UP
                    is_held_up = is_held_up or bool((task / "children").read_text().strip())
        return is_held_up or (bool(before) and before != self._started)

    def _is_process_busy(self) -> bool:
        used, now = time.process_time(), time.perf_counter()
        before, self._process_s, self._asked_at = (self._process_s, self._asked_at), used, now
        return used - before[0] > BUSY * (now - before[1])


def _read(clock: Callable[[], int]) -> int:
    # 0 if the thread has finished
    try:
        return clock()
    except OSError:
        return 0


def _clock_of_this_thread() -> Callable[[], int]:
    # its CPU time in the system's unit; any thread can read it
    if sys.platform == "win32":
        return _windows_clock()
    if sys.platform == "darwin":
        return _mac_clock()
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time_ns
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime_ns(clock)


def _windows_clock() -> Callable[[], int]:
    # CPU cycles, since Windows' times have steps of 16 ms
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32")
    else:  # for type checkers on other systems
        kernel = ctypes.CDLL("kernel32")
    kernel.OpenThread.restype = ctypes.c_void_p
    thread = kernel.OpenThread(THREAD_QUERY_LIMITED_INFORMATION, False, threading.get_native_id())
    if not thread:
        return time.process_time_ns

    def cycles() -> int:
        found = ctypes.c_ulonglong()
        kernel.QueryThreadCycleTime(ctypes.c_void_p(thread), ctypes.byref(found))
        return found.value

    weakref.finalize(cycles, kernel.CloseHandle, ctypes.c_void_p(thread))
    return cycles


def _mac_clock() -> Callable[[], int]:
    # user plus system time
    system = ctypes.CDLL(None)
    port = system.mach_thread_self()

    def microseconds() -> int:
        words, n = (ctypes.c_int * N_BASIC_INFO)(), ctypes.c_uint(N_BASIC_INFO)
        if system.thread_info(port, THREAD_BASIC_INFO, words, ctypes.byref(n)):
            return 0
        user_s, user_us, system_s, system_us = words[:4]
        return (user_s + system_s) * 1_000_000 + user_us + system_us

    return microseconds


SILENT_S = 3.5
"""A rank that others wait for counts as hung after this many seconds without a sign of life."""

LOOK_S = 0.2
"""Seconds between looks. A longer gap counts as two looks, since the process itself was stopped."""

MAX_S = 300.0
"""A rank counts as hung, despite signs of life, after this many seconds without any collective.

Every block in a model has collectives and takes far less; only an endless loop takes longer.
"""


class CollectiveCounter:
    """Counter of all ranks' collectives, without a lock: lost increments are harmless."""

    def __init__(self) -> None:
        self.count = 0


class RankGroup(ABC):
    """One model's ranks, as seen by the watchdog; `ThreadGroup` adds the collectives.

    Attributes:
        collectives: counter of all ranks' collectives; misses some replayed ones.
        abroad: ranks that are waiting for another machine, which has its own watchdog.
    """

    def __init__(self) -> None:
        self._devices: dict[int, torch.device] = {}
        self.collectives = CollectiveCounter()
        self.abroad: set[int] = set()

    def join(self, rank: int, device: torch.device) -> None:
        """Set a rank's device."""
        self._devices[rank] = device

    def device(self, rank: int) -> str:
        """Return the name of a rank's device; "" if unknown."""
        return str(self._devices.get(rank, ""))

    def is_alive(self, rank: int) -> bool | None:
        """Return whether a rank's device is working; None if its threads' CPU time decides.

        A thread that waits for its GPU shows no sign of life, so ranks on GPUs count as alive.
        """
        if rank in self.abroad:
            return True
        device = self._devices.get(rank)
        return None if device is None or device.type == "cpu" else True

    @abstractmethod
    def waiting(self) -> Mapping[int, Collection[int]]:
        """Map each waiting rank to the ranks that it waits for."""

    @abstractmethod
    def abort_for_good(self) -> None:
        """Wake all ranks with an error, now and whenever one comes back later."""


class Watchdog:
    """Watchdog for one job of the ranks, called every `LOOK_S`."""

    def __init__(self, group: RankGroup, activities: Mapping[int, RankActivity]) -> None:
        self._group = group
        self._activities = activities
        self._looked = self._collective_at = time.perf_counter()
        self._n_collectives = -1
        self._silent_s: dict[int, float] = {}
        self._stuck_s = 0.0

    def look(self, busy: Collection[int]) -> CommError | None:
        """Return an error if ranks hang, else None; `busy` are those still working on the job."""
        waiting = self._group.waiting()
        working = [rank for rank in busy if rank not in waiting]
        step = self._step(working)
        if not working:
            self._stuck_s += step
            return self._unreached(busy, waiting) if self._stuck_s >= SILENT_S else None
        self._stuck_s = 0.0
        if all(self._silent_s[rank] >= SILENT_S for rank in working):
            problem = Sentence("shown no sign of life for {n:g} seconds", n=SILENT_S)
            return self.error(working, problem)
        if waiting and self._since_collective_s() >= MAX_S:
            problem = Sentence(
                "not exchanged values with any other rank for {n:.0f} seconds", n=MAX_S
            )
            return self.error(working, problem)
        return None

    def is_silent(self, rank: int) -> bool:
        """Return whether, at the last look, a rank had shown no sign of life for `SILENT_S`."""
        return self._silent_s.get(rank, 0.0) >= SILENT_S

    def error(self, ranks: Collection[int], what: str) -> CommError:
        """Return an error that blames the first of the ranks; `what` follows "has" or "have"."""
        first, *others = ranks
        named = [f"{self._group.device(rank)} (rank {rank})".lstrip() for rank in others]
        problem = Sentence(
            "and {others} have {what}" if named else "has {what}",
            others=listed(named) if named else "",
            what=what,
        )
        return CommError(first, problem, self._group.device(first))

    def look_at(self, ranks: Collection[int]) -> None:
        """Look for the ranks' signs of life without judging them."""
        self._step(ranks)

    def _step(self, ranks: Collection[int]) -> float:
        # returns the seconds since the last look
        now = time.perf_counter()
        step, self._looked = min(now - self._looked, 2 * LOOK_S), now
        self._silent_s = {
            rank: 0.0 if self._shows_life(rank) else self._silent_s.get(rank, 0.0) + step
            for rank in ranks
        }
        return step

    def _shows_life(self, rank: int) -> bool:
        has_moved = rank in self._activities and self._activities[rank].has_moved()
        is_alive = self._group.is_alive(rank)
        return has_moved if is_alive is None else is_alive

    def _since_collective_s(self) -> float:
        now, n_collectives = time.perf_counter(), self._group.collectives.count
        if n_collectives != self._n_collectives:
            self._n_collectives, self._collective_at = n_collectives, now
        return now - self._collective_at

    def _unreached(
        self, busy: Collection[int], waiting: Mapping[int, Collection[int]]
    ) -> CommError:
        # all ranks wait: for one that has finished, or for each other
        awaited = sorted({rank for missing in waiting.values() for rank in missing})
        gone = [rank for rank in awaited if rank not in busy] or awaited or sorted(busy)
        return self.error(gone, Sentence("not reached the point where other ranks are waiting"))
