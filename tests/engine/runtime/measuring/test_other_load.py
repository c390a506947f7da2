"""Other programs on a device are noticed before a search."""

import os
import subprocess
import sys
import time

import pytest

from engine.hardware.devices.monitor import DeviceMonitor
from engine.hardware.devices.types import DeviceSnapshot
from engine.runtime.measuring.machine_speed import MIN_PERCENT, other_load

BUSY = "while True: pass"


def test_a_busy_program_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    n_cores = os.cpu_count() or 1
    monkeypatch.setattr("engine.runtime.measuring.machine_speed.MIN_PERCENT", 50 / n_cores)
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            time.sleep(0.2)
            found = other_load(["cpu", "cpu"])
        finally:
            busy.kill()
    assert [device for device, _ in found] == ["cpu"]
    assert found[0][1] > 50 / n_cores


def test_only_what_is_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = {"cuda:0": 99.0, "cuda:1": MIN_PERCENT - 1, "cuda:2": None}
    monkeypatch.setattr(
        DeviceMonitor, "snapshot",
        lambda _: [DeviceSnapshot(d, 0.0, 0, 0, 0, load) for d, load in loads.items()],
    )  # fmt: skip
    assert other_load(["cpu"]) == (("cuda:0", 99.0),)


def test_a_device_that_is_not_here_is_left_to_others_to_refuse() -> None:
    assert other_load(["cuda:99"]) == ()
