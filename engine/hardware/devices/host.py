"""The CPU, host memory and this program's processes, on Linux, macOS and Windows."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil

from engine.hardware.devices.types import DeviceInfo, DeviceSnapshot

LOOK_EVERY_S = 3.0
"""Interval between searches for child processes; each search reads a file per running process."""


class OwnProcesses:
    """The processes of this program: this one, its children and all their descendants."""

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._found: tuple[psutil.Process, ...] = ()
        self._looked_s = -LOOK_EVERY_S
        self._seconds: dict[psutil.Process, float] = {}

    def pids(self) -> frozenset[int]:
        """Return the process ids; new children are included within `LOOK_EVERY_S`."""
        return frozenset((os.getpid(), *(process.pid for process in self._processes())))

    def busy_seconds(self) -> float:
        """Return the CPU time that the processes have used since the last call, in seconds."""
        now: dict[psutil.Process, float] = {}
        for process in self._processes():
            try:
                times = process.cpu_times()
            except psutil.Error:  # it has exited
                continue
            now[process] = times.user + times.system
        before, self._seconds = self._seconds, now
        return sum(now[process] - before.get(process, now[process]) for process in now)

    def _processes(self) -> tuple[psutil.Process, ...]:
        if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            try:
                self._found = (self._self, *self._self.children(recursive=True))
            except psutil.Error:  # a system without parent ids
                self._found = (self._self,)
        return self._found


CPUINFO = Path("/proc/cpuinfo")

CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal")
"""Linux drivers for CPU sensors on Intel, AMD and Arm boards."""

PACKAGE = ("Package id 0", "Tctl", "Tdie")
"""Names of the sensor for the whole CPU; if there is none, the first sensor is used."""


def cpu_info() -> DeviceInfo:
    """Return the CPU as a device."""
    memory = psutil.virtual_memory()
    return DeviceInfo(
        id="cpu", kind="cpu", name=cpu_name(), total_bytes=memory.total,
        free_bytes=memory.available, n_cores=usable_cores(),
    )  # fmt: skip


def usable_cores() -> int:
    """Return the number of physical cores, or of processors in the affinity mask, if fewer."""
    n_cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        n_cores = min(n_cores, len(os.sched_getaffinity(0)))
    return n_cores


def cpu_name() -> str:
    """Return the CPU's product name, or its architecture if the name is unknown."""
    name = ""
    if sys.platform == "linux":
        name = _name_from_cpuinfo()
    elif sys.platform == "darwin":
        name = _name_from_sysctl()
    elif sys.platform == "win32":
        name = _name_from_registry()
    return " ".join(name.split()) or platform.processor() or platform.machine() or "CPU"


def _name_from_cpuinfo() -> str:
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value for key, _, value in pairs if key.strip() == "model name"), "")


def _name_from_sysctl() -> str:
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _name_from_registry() -> str:
    if sys.platform == "win32":
        import winreg

        key = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as processor:
                return str(winreg.QueryValueEx(processor, "ProcessorNameString")[0])
        except OSError:
            return ""
    return ""


class CpuReader:
    """Reader for the host's load and memory; the load is the average since the previous reading.

    psutil's own `cpu_percent` keeps one previous reading per process and thread, so two callers
    would disturb each other. Temperature and clock are slow to read, so they are cached for
    `LOOK_EVERY_S` seconds.
    """

    def __init__(self, own: OwnProcesses | None = None) -> None:
        self._process = psutil.Process()
        self._own = own or OwnProcesses()
        self._own.busy_seconds()
        self._busy_s, self._elapsed_s = _cpu_seconds()
        self._sensors_s = -LOOK_EVERY_S
        self._temperature_c: float | None = None
        self._clock_mhz: int | None = None

    def read(self) -> DeviceSnapshot:
        """Return the current state of the CPU."""
        now, memory = time.monotonic(), psutil.virtual_memory()
        if now - self._sensors_s >= LOOK_EVERY_S:
            self._sensors_s = now
            self._temperature_c, self._clock_mhz = _package_temperature(), _mean_clock()
        load, others = self._loads()
        return DeviceSnapshot(
            device="cpu", time_s=now, used_bytes=memory.total - memory.available,
            total_bytes=memory.total, free_bytes=memory.available, load_percent=load,
            temperature_c=self._temperature_c, own_bytes=self._process.memory_info().rss,
            clock_mhz=self._clock_mhz, others_percent=others,
        )  # fmt: skip

    def _loads(self) -> tuple[float | None, float | None]:
        # load in percent: by all programs, and by all except this one
        busy_s, elapsed_s = _cpu_seconds()
        busy, elapsed = busy_s - self._busy_s, elapsed_s - self._elapsed_s
        if elapsed <= 0:  # the counters tick about every 10 ms
            return None, None
        self._busy_s, self._elapsed_s = busy_s, elapsed_s
        others = busy - self._own.busy_seconds()
        return _percent(busy / elapsed), _percent(others / elapsed)


def _percent(part: float) -> float:
    return min(100.0, max(0.0, 100.0 * part))


def _package_temperature() -> float | None:
    # None if the system does not report it, as on Windows
    ask = getattr(psutil, "sensors_temperatures", None)
    try:
        found = ask() if ask is not None else {}
    except (OSError, ValueError):  # a sensor that answers with an error
        return None
    for driver in CPU_SENSORS:
        if sensors := found.get(driver):
            return float(
                next((s.current for s in sensors if s.label in PACKAGE), sensors[0].current)
            )
    return None


def _mean_clock() -> int | None:
    try:
        clock = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):
        return None
    return round(clock.current) if clock is not None and clock.current > 0 else None


def _cpu_seconds() -> tuple[float, float]:
    times = psutil.cpu_times()._asdict()
    # guest time is already included in `user` and `nice`
    total = sum(value for name, value in times.items() if not name.startswith("guest"))
    idle = times["idle"] + times.get("iowait", 0.0)
    return total - idle, total
