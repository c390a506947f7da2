"""Value types for devices: fixed facts (`DeviceInfo`) and current state (`DeviceSnapshot`).

If there are several machines, ids on machine N start with "N/", except on machine 0: "1/cuda:0" is
the first GPU on the second machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]

ClockLimit = Literal["power", "heat", "supply", "setting", "hardware"]
"""Cause of a low clock: power limit, temperature, power supply, clocks set by the user, or the
hardware for an unknown reason."""

CPU = "cpu"
"""Id of the CPU; that of a GPU is "cuda:N"."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a GPU, in bytes."""

    total_bytes: int
    used_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One physical device; for virtual devices, the same id is given several times.

    Args:
        id: "cpu", or "cuda:N", where N is torch's number.
        free_bytes: free memory at the time of reading; for the CPU, available without swapping.
        uuid: UUID of a GPU, stable over reboots; "" for the CPU.
        pci_bus: PCI bus id of a GPU, such as "00000000:01:00.0"; "" for the CPU.
        n_cores: number of CPU cores that this process may use; 0 for a GPU.
        compute_capability: compute capability of an NVIDIA GPU, such as "8.9"; "" for others.
        driver: version of the GPU's driver; "" for the CPU.
        usable: whether a model can be loaded on it.
        reason: sentence that says why the device is not usable, or "".
        arch: instruction set of an AMD GPU, such as "gfx1100"; "" for others.
        note: sentence saying that support for a usable device is untested, or "".
        remedy: command that makes an unusable device usable on this system, or "".
    """

    id: str
    kind: DeviceKind
    name: str
    total_bytes: int
    free_bytes: int
    uuid: str = ""
    pci_bus: str = ""
    n_cores: int = 0
    compute_capability: str = ""
    driver: str = ""
    usable: bool = True
    reason: str = ""
    arch: str = ""
    note: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """The state of a device; unknown numbers are None.

    Args:
        time_s: time of the reading, from `time.monotonic()`.
        load_percent: load, 0 to 100, since the last snapshot (CPU) or in the driver's window (GPU).
        own_bytes: memory used by this process.
        clock_mhz: clock of a GPU's multiprocessors, or mean clock of the CPU's cores.
        problem: sentence that says why the device could not be read, or ""; if set, numbers are 0
            or None.
        power_limit_w: power at which the device throttles, in watts.
        clock_limits: causes of a low clock.
        sent_bytes_s, received_bytes_s: a GPU's PCIe traffic in bytes per second; only in a
            monitor's periodic readings.
        others_bytes: GPU memory used by programs other than this one and its children.
        others_percent: CPU load from those programs, 0 to 100, since the last snapshot.
    """

    device: str
    time_s: float
    used_bytes: int
    total_bytes: int
    free_bytes: int
    load_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    own_bytes: int | None = None
    clock_mhz: int | None = None
    problem: str = ""
    power_limit_w: float | None = None
    memory_clock_mhz: int | None = None
    clock_limits: tuple[ClockLimit, ...] | None = None
    sent_bytes_s: int | None = None
    received_bytes_s: int | None = None
    others_bytes: int | None = None
    others_percent: float | None = None


def far_id(machine: int, device: str) -> str:
    """Return the global id of a device on a machine."""
    return f"{machine}/{device}" if machine else device


def local_id(device: str) -> str:
    """Return a device's local id on its machine."""
    return device.rpartition("/")[2]


def machine_of(device: str) -> int:
    """Return the number of a device's machine."""
    return int(device.rpartition("/")[0] or 0)


def is_cpu(device: str) -> bool:
    """Return whether a device is the CPU of a machine."""
    return local_id(device) == CPU
