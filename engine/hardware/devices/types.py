"""Value types of devices: fixed facts (`DeviceInfo`) and a state at a moment (`DeviceSnapshot`).

Ids of devices on several machines: those of machine N have "N/" before theirs; machine 0's have
none. So "1/cuda:0" is the first GPU of the second machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]

ClockLimit = Literal["power", "heat", "supply", "setting", "hardware"]
"""What keeps a GPU's clock down: its power limit, its temperature, too little from the power
supply, clocks that somebody has set, or its hardware for a reason that it does not tell."""

CPU = "cpu"
"""Id of the CPU; a GPU's is "cuda:N"."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a GPU, in bytes."""

    total_bytes: int
    used_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One physical device; virtual devices are the same id given several times.

    Args:
        id: "cpu", or "cuda:N" with torch's number N.
        kind: "cpu" or "cuda".
        name: product name.
        total_bytes: size of its memory.
        free_bytes: free memory when it was read; on the CPU, what is available without swapping.
        uuid: UUID of a GPU, stable over reboots; "" for the CPU.
        pci_bus: PCI bus id of a GPU, such as "00000000:01:00.0"; "" for the CPU.
        n_cores: number of CPU cores that this process may use; 0 for a GPU.
        compute_capability: compute capability such as "8.9" of an NVIDIA GPU; "" for others.
        driver: version of the GPU's driver; "" for the CPU.
        usable: whether a model can be put there.
        reason: sentence that says why it is not usable, else "".
        arch: instruction set of an AMD GPU such as "gfx1100"; "" for others.
        note: sentence on what is not proven about a usable device, else "".
        remedy: command that makes an unusable device usable on this system, else "".
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
    """The state of one device; numbers are None where the device does not tell.

    Args:
        device: id of the device, as in `DeviceInfo`.
        time_s: time of the reading, by `time.monotonic()`.
        used_bytes, total_bytes, free_bytes: its memory.
        load_percent: load, 0 to 100, since the last snapshot (CPU) or in the driver's window (GPU).
        temperature_c: temperature in °C.
        power_w: power draw in watts.
        own_bytes: memory that this process holds there.
        clock_mhz: clock of a GPU's multiprocessors, or mean clock of the CPU's cores.
        problem: sentence that says why the device could not be read, else ""; numbers are then 0 or
            None.
        power_limit_w: power in watts at which the device slows itself down.
        memory_clock_mhz: clock of a GPU's memory.
        clock_limits: what keeps the clock down now; () if nothing does.
        sent_bytes_s, received_bytes_s: traffic of a GPU over PCIe, in bytes per second; only the
            regular readings of a monitor have it.
        others_bytes: memory that programs other than this one and its children hold on a GPU.
        others_percent: CPU load of those programs, 0 to 100, since the last snapshot.
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
    """Return the id of a machine's device, given its id there."""
    return f"{machine}/{device}" if machine else device


def local_id(device: str) -> str:
    """Return the id that a device has on its own machine."""
    return device.rpartition("/")[2]


def machine_of(device: str) -> int:
    """Return the number of a device's machine."""
    return int(device.rpartition("/")[0] or 0)


def is_cpu(device: str) -> bool:
    """Return whether a device is the CPU of a machine."""
    return local_id(device) == CPU
