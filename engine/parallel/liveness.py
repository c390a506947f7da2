"""Whether a rank still does something, seen from outside: the processor time of its threads.

A thread that computes, or that fetches weights from a slow disk page by page, takes some of the
processor's time every moment. One that is stuck in a lock, or in a driver that never answers, takes
none. So nobody has to guess how long a computation may last.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil

HELD_UP = ("R", "D")
"""What Linux calls threads that wait for a core, and for a disk or the like: no fault of theirs."""

TASKS = Path("/proc/self/task")
"""Where Linux tells of all threads of this process, also of those that torch has made."""

BUSY = 0.3
"""Of a core: so much for this process is a sign of all ranks, where threads cannot be told apart.

A window takes less as long as nothing happens in it.
"""

THREAD_QUERY_LIMITED_INFORMATION = 0x0800  # winnt.h
THREAD_BASIC_INFO, N_BASIC_INFO = 3, 10  # mach/thread_info.h: the kind, and how many 32-bit words

_serial = count()


class _Present(threading.local):
    life: Life | None = None


_present = _Present()


class Life:
    """Of one rank: what its threads do, first of all the one that makes this.

    On Linux threads inherit the name of the one that starts them, so those that a library has
    started for the rank are known by it.
    """

    def __init__(self) -> None:
        self._name = f"rank.{next(_serial) % 10**9}"
        self._clocks: list[Callable[[], int]] = []
        self._seen: list[int] = []
        self._started: dict[str, str] = {}
        self._process_s = self._asked_at = 0.0
        self.include_this_thread()

    @staticmethod
    def present() -> Life | None:
        """That of the rank for which this thread works, if it is watched."""
        return _present.life

    def include_this_thread(self) -> None:
        """Count what the calling thread does for this rank, from now on."""
        _present.life = self
        with suppress(OSError):
            (TASKS / str(threading.get_native_id()) / "comm").write_text(self._name)
        running = [clock for clock in self._clocks if _read(clock)]
        self._clocks = [*running, _clock_of_this_thread()]

    def has_moved(self) -> bool:
        """Whether any of the threads has done something since the last question, or wants to."""
        seen = [_read(clock) for clock in self._clocks]
        before, self._seen = self._seen, seen
        is_busy = self._is_process_busy()
        if seen != before:
            return True
        if TASKS.exists():
            return self._have_started_moved()
        return is_busy or bool(psutil.Process().children())

    def _have_started_moved(self) -> bool:
        """The same for all threads with this name, by times in steps of 10 ms.

        One that has started a process, such as a compiler, waits for it.
        """
        before, self._started, is_held_up = self._started, {}, False
        for task in TASKS.iterdir():
            with suppress(OSError, IndexError):  # it may have ended
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
    """What a clock shows; 0 for a thread that has ended."""
    try:
        return clock()
    except OSError:
        return 0


def _clock_of_this_thread() -> Callable[[], int]:
    """The processor time of the calling thread, in a unit of the system's, read by any thread."""
    if sys.platform == "win32":
        return _windows_clock()
    if sys.platform == "darwin":
        return _mac_clock()
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time_ns
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime_ns(clock)


def _windows_clock() -> Callable[[], int]:
    """Cycles: times of threads are counted there in steps of 16 ms."""
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32")
    else:  # as a type checker elsewhere sees it
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
    """Microseconds, with what the system has done for the thread."""
    system = ctypes.CDLL(None)
    port = system.mach_thread_self()

    def microseconds() -> int:
        words, n = (ctypes.c_int * N_BASIC_INFO)(), ctypes.c_uint(N_BASIC_INFO)
        if system.thread_info(port, THREAD_BASIC_INFO, words, ctypes.byref(n)):
            return 0
        user_s, user_us, system_s, system_us = words[:4]
        return (user_s + system_s) * 1_000_000 + user_us + system_us

    return microseconds
