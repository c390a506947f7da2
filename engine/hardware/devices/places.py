"""Ids of devices on several machines: those of machine N have "N/" before theirs; machine 0's not.

So "1/cuda:0" is the first GPU of the second machine.
"""

from __future__ import annotations

from engine.hardware.devices.types import CPU

__all__ = ["far_id", "is_cpu", "local_id", "machine_of"]


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
