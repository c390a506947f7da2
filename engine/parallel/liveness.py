"""Signs of life of a rank, seen from outside: the CPU time of its threads.

A thread that computes, or that fetches weights from a slow disk page by page, uses CPU time all
the while. One that is stuck in a lock, or in a driver that never answers, uses none. So nobody has
to guess how long a computation may last.
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
"""Linux states of a thread that counts as alive: running or waiting for a core; on a disk."""

TASKS = Path("/proc/self/task")
"""Folder in which Linux lists all threads of this process, those of torch included."""

BUSY = 0.3
"""Share of one core: a process that uses more shows life of all its ranks.

For systems on which the threads of ranks cannot be told apart. A window in which nothing happens
uses less.
"""

THREAD_QUERY_LIMITED_INFORMATION = 0x0800  # winnt.h
THREAD_BASIC_INFO, N_BASIC_INFO = (
    3,
    10,
)  # mach/thread_info.h: flavor, size in 32-bit words

_serial = count()


class _ThisThread(threading.local):
    """Life of the rank for which the calling thread works; None if it is not watched."""

    life: Life | None = None


_this_thread = _ThisThread()


class Life:
    """Activity of one rank's threads, first of all of the one that creates this.

    On Linux a thread inherits the name of the thread that starts it, so threads that a library has
    started for the rank are known by their name.
    """

    def __init__(self) -> None:
        self._name = f"rank.{next(_serial) % 10**9}"
        self._clocks: list[Callable[[], int]] = []
        self._seen: list[int] = []
        self._started: dict[str, str] = {}
        self._process_s = self._asked_at = 0.0
        self.include_this_thread()

    @staticmethod
    def of_this_thread() -> Life | None:
        """Return the `Life` of the calling thread's rank; None if it is not watched."""
        return _this_thread.life

    def include_this_thread(self) -> None:
        """Count the calling thread as one of this rank's, from now on."""
        _this_thread.life = self
        with suppress(OSError):
            (TASKS / str(threading.get_native_id()) / "comm").write_text(self._name)
        running = [clock for clock in self._clocks if _read(clock)]
        self._clocks = [*running, _clock_of_this_thread()]

    def has_moved(self) -> bool:
        """Return whether any thread has used CPU time since the last call, or waits to run."""
        seen = [_read(clock) for clock in self._clocks]
        before, self._seen = self._seen, seen
        is_busy = self._is_process_busy()
        if seen != before:
            return True
        if TASKS.exists():
            return self._have_named_threads_moved()
        return is_busy or bool(psutil.Process().children())

    def _have_named_threads_moved(self) -> bool:
        """Return whether any thread with this rank's name has run, by times in steps of 10 ms.

        Also true for a thread that waits to run, or for a process it started, such as a compiler.
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
        """Return whether the process has used more than `BUSY` of a core since the last call."""
        used, now = time.process_time(), time.perf_counter()
        before, self._process_s, self._asked_at = (self._process_s, self._asked_at), used, now
        return used - before[0] > BUSY * (now - before[1])


def _read(clock: Callable[[], int]) -> int:
    """Return what a clock shows; 0 for a thread that has ended."""
    try:
        return clock()
    except OSError:
        return 0


def _clock_of_this_thread() -> Callable[[], int]:
    """Return a clock of the calling thread's CPU time in the system's unit, for any thread."""
    if sys.platform == "win32":
        return _windows_clock()
    if sys.platform == "darwin":
        return _mac_clock()
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time_ns
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime_ns(clock)


def _windows_clock() -> Callable[[], int]:
    """Return a clock of the calling thread's CPU cycles; its times come in steps of 16 ms."""
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
    """Return a clock of the calling thread's CPU time in microseconds, user and system."""
    system = ctypes.CDLL(None)
    port = system.mach_thread_self()

    def microseconds() -> int:
        words, n = (ctypes.c_int * N_BASIC_INFO)(), ctypes.c_uint(N_BASIC_INFO)
        if system.thread_info(port, THREAD_BASIC_INFO, words, ctypes.byref(n)):
            return 0
        user_s, user_us, system_s, system_us = words[:4]
        return (user_s + system_s) * 1_000_000 + user_us + system_us

    return microseconds
