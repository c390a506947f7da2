"""What machines tell machine 0 about their devices: facts when they join, states ever after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from engine.hardware.devices.catalog import list_devices
from engine.hardware.devices.types import DeviceInfo, DeviceSnapshot

REPORT_S = 2.0
"""Seconds between two reports."""

MOST_DEVICES, MOST_LETTERS, MOST_NUMBER, MOST_BYTES = 64, 200, 1e6, 1 << 60
"""Most devices of a machine, letters of a text about one, and what a load, a temperature and a
memory are below."""

TOLD = ("id", "kind", "name", "total_bytes", "free_bytes", "n_cores", "compute_capability")
"""Facts of a device that are told."""


def told_devices() -> list[dict[str, Any]]:
    """Return facts of this machine's usable devices, as JSON."""
    usable = [device for device in list_devices() if device.usable]
    return [{name: getattr(device, name) for name in TOLD} for device in usable]


def devices_from(document: object) -> tuple[DeviceInfo, ...]:
    """Return the devices that a machine tells of; what makes no sense is left out."""
    types = {spec.name: spec.type for spec in fields(DeviceInfo)}
    found = []
    for entry in _dicts(document):
        given = {name: entry.get(name) for name in TOLD}
        wanted = {name: int if types[name] == "int" else str for name in TOLD}
        is_whole = all(type(value) is wanted[name] for name, value in given.items())
        if is_whole and given["kind"] in ("cpu", "cuda"):
            cut: dict[str, Any] = {
                k: v[:MOST_LETTERS] if isinstance(v, str) else v for k, v in given.items()
            }
            found.append(DeviceInfo(**cut))
    return tuple(found)


def told_states(snapshots: Sequence[DeviceSnapshot]) -> list[dict[str, Any]]:
    """Return the states of this machine's devices, as JSON."""
    return [
        {
            "device": one.device, "used_bytes": one.used_bytes, "total_bytes": one.total_bytes,
            "free_bytes": one.free_bytes, "load_percent": one.load_percent,
            "temperature_c": one.temperature_c,
        }
        for one in snapshots
        if not one.problem
    ]  # fmt: skip


def states_from(document: object) -> tuple[DeviceSnapshot, ...]:
    """Return the states that a machine tells of, as of now; what makes no sense is left out."""
    found = []
    for entry in _dicts(document):
        sizes = [_size(entry.get(f"{name}_bytes")) for name in ("used", "total", "free")]
        device = entry.get("device")
        if isinstance(device, str) and None not in sizes:
            used, total, free = (size or 0 for size in sizes)
            found.append(
                DeviceSnapshot(
                    device[:MOST_LETTERS], time.monotonic(), used, total, free,
                    load_percent=_number(entry.get("load_percent")),
                    temperature_c=_number(entry.get("temperature_c")),
                )
            )  # fmt: skip
    return tuple(found)


def _dicts(document: object) -> list[dict[str, Any]]:
    entries = document if isinstance(document, list) else []
    return [entry for entry in entries[:MOST_DEVICES] if isinstance(entry, dict)]


def _size(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < MOST_BYTES else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -MOST_NUMBER < value < MOST_NUMBER else None
