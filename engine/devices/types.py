"""What is known of a device: once (`DeviceInfo`) and at a moment (`DeviceSnapshot`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CPU", "DeviceInfo", "DeviceKind", "DeviceSnapshot"]

DeviceKind = Literal["cpu", "cuda"]

CPU = "cpu"
"""Id of the CPU; a GPU's is "cuda:N"."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One physical device; a virtual device is the same id named twice.

    Args:
        id: "cpu", or "cuda:N" with the number that torch gives it.
        uuid: of a GPU, stable over reboots; "" for the CPU.
        pci_bus: of a GPU, as in "00000000:01:00.0"; "" for the CPU.
        free_bytes: at the time of asking; on the CPU what can be had without swapping.
        n_cores: cores of the CPU that this process may use; 0 for a GPU.
        compute_capability: as in "8.9"; "" for the CPU.
        driver: version of the NVIDIA driver; "" for the CPU.
        usable: whether a model can be put there.
        reason: a sentence that says why it is not usable, else "".
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


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """The state of one device; None where the device does not tell.

    Args:
        device: its id, as in `DeviceInfo`.
        time_s: of `time.monotonic()`.
        load_percent: 0 to 100 since the last snapshot (CPU) or over the driver's window (GPU).
        own_bytes: what this process holds there.
        clock_mhz: of a GPU's multiprocessors.
        problem: a sentence when the device could not be read, and then the figures are 0 or None.
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
