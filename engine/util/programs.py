"""Starts Tandem's child processes, which are modules of the engine.

Such a process exits with its parent, because its pipes then close. If it cannot notice that, for
example in a hanging driver, Windows (`tie_child`) or Linux (`tie_to_parent`) kills it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
"""Operation of Linux's `prctl` that requests a signal when the parent's thread exits."""

KILL_ON_JOB_CLOSE = 0x2000
"""Limit flag for a job that kills its processes when its last handle is closed."""

EXTENDED_LIMITS = 9
"""Information class of `ExtendedLimits`."""

MAY_JOIN = 0x0101
"""Access rights that a job needs on a process: terminate and set quota."""

NO_WINDOW: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)
"""Creation flag that keeps Windows from opening a console window."""


def program_command(module: str) -> tuple[str, ...]:
    """Return the command that runs a module without importing from the working directory."""
    return sys.executable, "-P", "-m", module


def child_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a child process: this process's, plus the engine's location.

    Args:
        variables: additional variables, which override those of this process.
    """
    paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
    python_path = os.pathsep.join(filter(None, paths))
    return {**os.environ, **(variables or {}), "PYTHONPATH": python_path}


def tie_child(pid: int) -> None:
    """Make Windows kill a child process with this one; call this right after starting the child."""
    if sys.platform == "win32":
        try:
            own_job().add(pid)
        except OSError as error:  # for example in a sandbox, which kills its processes itself
            log.info("process %d is not tied to this one: %s", pid, error)


def tie_to_parent() -> None:
    """Make Linux kill this (child) process when the thread that started it exits.

    A module that holds the GIL would keep the process from noticing that itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class BasicLimits(ctypes.Structure):
    """Windows' JOBOBJECT_BASIC_LIMIT_INFORMATION."""

    _fields_ = (
        ("process_time", ctypes.c_int64),
        ("job_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("least_working_set", ctypes.c_size_t),
        ("most_working_set", ctypes.c_size_t),
        ("n_processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority", ctypes.c_uint32),
        ("scheduling", ctypes.c_uint32),
    )


class ExtendedLimits(ctypes.Structure):
    """Windows' JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = (
        ("basic", BasicLimits),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("process_peak", ctypes.c_size_t),
        ("job_peak", ctypes.c_size_t),
    )


class JobObject:
    """A group of processes killed when their parent exits in any way; may raise OSError."""

    def __init__(self, kernel32: Any) -> None:
        self._kernel32 = kernel32
        self._handle = kernel32.CreateJobObjectW(None, None)  # no other process inherits it
        limits = ExtendedLimits()
        limits.basic.flags = KILL_ON_JOB_CLOSE
        size = ctypes.sizeof(limits)
        if not self._handle or not kernel32.SetInformationJobObject(
            self._handle, EXTENDED_LIMITS, ctypes.byref(limits), size
        ):
            raise OSError("there is no job object")

    def add(self, pid: int) -> None:
        """Add a process; its children join automatically. Raises OSError if it has exited."""
        process = self._kernel32.OpenProcess(MAY_JOIN, False, pid)
        if not process:
            raise OSError(f"process {pid} cannot be opened")
        try:
            if not self._kernel32.AssignProcessToJobObject(self._handle, process):
                raise OSError(f"process {pid} cannot join")
        finally:
            self._kernel32.CloseHandle(process)


@cache
def own_job() -> JobObject:
    """Return the group of this process's children; may raise OSError."""
    return JobObject(load_kernel32())


def load_kernel32() -> Any:
    """Return Windows' kernel32 library, with types set for the functions in use."""
    library = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    handle, number, is_done = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    for name, result, arguments in (
        ("CreateJobObjectW", handle, (ctypes.c_void_p, ctypes.c_wchar_p)),
        ("SetInformationJobObject", is_done, (handle, ctypes.c_int, ctypes.c_void_p, number)),
        ("OpenProcess", handle, (number, is_done, number)),
        ("AssignProcessToJobObject", is_done, (handle, handle)),
        ("CloseHandle", is_done, (handle,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
