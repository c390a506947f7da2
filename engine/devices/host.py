"""Describes the CPU and the host's memory, on Linux, macOS and Windows."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil

from engine.devices.types import DeviceInfo, DeviceSnapshot

__all__ = ["CpuReader", "cpu_info", "cpu_name", "usable_cores"]

CPUINFO = Path("/proc/cpuinfo")


def cpu_info() -> DeviceInfo:
    """Return the CPU as a device."""
    memory = psutil.virtual_memory()
    return DeviceInfo(
        id="cpu",
        kind="cpu",
        name=cpu_name(),
        total_bytes=memory.total,
        free_bytes=memory.available,
        n_cores=usable_cores(),
    )


def usable_cores() -> int:
    """Return the number of physical cores, or of processors the process is bound to if fewer."""
    n_cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        n_cores = min(n_cores, len(os.sched_getaffinity(0)))
    return n_cores


def cpu_name() -> str:
    """Return the CPU's product name, or its architecture where the system does not tell."""
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
    """Reader of the host's load and memory; the load is the average since the previous reading.

    psutil's own `cpu_percent` keeps its previous reading per process and thread, so two callers
    would disturb each other.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._busy_s, self._elapsed_s = _cpu_seconds()

    def read(self) -> DeviceSnapshot:
        """Return the state of the CPU now."""
        memory = psutil.virtual_memory()
        return DeviceSnapshot(
            device="cpu",
            time_s=time.monotonic(),
            used_bytes=memory.total - memory.available,
            total_bytes=memory.total,
            free_bytes=memory.available,
            load_percent=self._load_percent(),
            own_bytes=self._process.memory_info().rss,
        )

    def _load_percent(self) -> float | None:
        busy_s, elapsed_s = _cpu_seconds()
        busy, elapsed = busy_s - self._busy_s, elapsed_s - self._elapsed_s
        if elapsed <= 0:  # the counters tick every 10 ms or so
            return None
        self._busy_s, self._elapsed_s = busy_s, elapsed_s
        return min(100.0, max(0.0, 100.0 * busy / elapsed))


def _cpu_seconds() -> tuple[float, float]:
    """Return the busy and the total seconds of all processors since the machine started."""
    times = psutil.cpu_times()._asdict()
    # the time of guests is already in `user` and `nice`
    total = sum(value for name, value in times.items() if not name.startswith("guest"))
    idle = times["idle"] + times.get("iowait", 0.0)
    return total - idle, total
