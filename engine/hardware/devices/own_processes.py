"""This process and those that it has started: what others do is the rest."""

from __future__ import annotations

import os
import time

import psutil

__all__ = ["OwnProcesses"]

LOOK_EVERY_S = 3.0
"""Seconds between two looks for children: that reads a file for each process of the machine."""


class OwnProcesses:
    """The processes of this program: itself, its children and theirs."""

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._found: tuple[psutil.Process, ...] = ()
        self._looked_s = -LOOK_EVERY_S
        self._seconds: dict[psutil.Process, float] = {}

    def pids(self) -> frozenset[int]:
        """Return the numbers of the processes; a child counts within `LOOK_EVERY_S`."""
        return frozenset((os.getpid(), *(process.pid for process in self._processes())))

    def busy_seconds(self) -> float:
        """Return the processor time that they have used since the last call."""
        now: dict[psutil.Process, float] = {}
        for process in self._processes():
            try:
                times = process.cpu_times()
            except psutil.Error:  # it has ended
                continue
            now[process] = times.user + times.system
        before, self._seconds = self._seconds, now
        return sum(now[process] - before.get(process, now[process]) for process in now)

    def _processes(self) -> tuple[psutil.Process, ...]:
        if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            try:
                self._found = (self._self, *self._self.children(recursive=True))
            except psutil.Error:  # a system that does not tell of parents
                self._found = (self._self,)
        return self._found
