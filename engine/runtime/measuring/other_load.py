"""Load that other programs put on devices, which makes measured speeds lower and less certain."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.errors import EngineError
from engine.hardware.devices.monitor import DeviceMonitor

WATCHED_S = 0.25
"""Seconds for which devices are watched."""

LEAST_PERCENT = 15.0
"""Load in percent below which a device counts as idle."""


def other_load(devices: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return (device, load in percent) of those that are in use while this program does nothing.

    Devices whose load nobody tells are left out.
    """
    try:
        with DeviceMonitor(devices) as monitor:
            monitor.snapshot()  # the CPU's load is counted between two readings
            time.sleep(WATCHED_S)
            found = monitor.snapshot()
    except EngineError:
        return ()
    loads = ((reading.device, reading.load_percent or 0.0) for reading in found)
    return tuple((device, round(load, 1)) for device, load in loads if load >= LEAST_PERCENT)
