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
from pathlib import Path

HELD_UP = ("R", "D")
"""What Linux calls threads that wait for a core, and for a disk or the like: no fault of theirs."""

THREAD_QUERY_LIMITED_INFORMATION = 0x0800  # winnt.h
THREAD_BASIC_INFO, N_BASIC_INFO = 3, 10  # mach/thread_info.h: the kind, and how many 32-bit words


class _Present(threading.local):
    life: Life | None = None


_present = _Present()


class Life:
    """Of one rank: the clocks of all threads that work for it, first the one that makes this."""

    def __init__(self) -> None:
        self._clocks: list[Callable[[], int]] = []
        self._tasks: list[Path] = []
        self._seen: list[int] = []
        self.include_this_thread()

    @staticmethod
    def present() -> Life | None:
        """That of the rank for which this thread works, if it is watched."""
        return _present.life

    def include_this_thread(self) -> None:
        """Count what the calling thread does for this rank, from now on."""
        _present.life = self
        self._tasks.append(Path(f"/proc/self/task/{threading.get_native_id()}/stat"))
        self._clocks.append(_clock_of_this_thread())

    def has_moved(self) -> bool:
        """Whether any of the threads has done something since the last question, or wants to."""
        seen = [_read(clock) for clock in self._clocks]
        before, self._seen = self._seen, seen
        return seen != before or any(_is_held_up(task) for task in self._tasks)


def _read(clock: Callable[[], int]) -> int:
    """What a clock shows; that of a thread which has ended shows the same for ever."""
    try:
        return clock()
    except OSError:
        return 0


def _is_held_up(task: Path) -> bool:
    """Whether a thread waits for the system; where that cannot be known, it does not."""
    with suppress(OSError, IndexError):
        return task.read_text().rpartition(")")[2].split()[0] in HELD_UP
    return False


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
