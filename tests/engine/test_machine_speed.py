"""The device's own speed: plausible, and without a trace afterwards."""

import pytest
import torch

from engine import EngineError, NoDevice, measure_device
from engine.devices.host import usable_cores


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short, even where torch multiplies BF16 one number at a time."""
    monkeypatch.setattr("engine.machine_speed.READ_BYTES", 32 << 20)
    monkeypatch.setattr("engine.machine_speed.MATMUL_SIZES", {"cpu": (64, 256, 256)})
    monkeypatch.setattr("engine.machine_speed.MIN_SECONDS", 0.01)


def test_the_cpu_is_measured_with_all_its_cores() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        speed = measure_device("cpu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert (speed.device, speed.n_threads) == ("cpu", usable_cores())
    assert 1e8 < speed.bytes_per_s < 1e13
    assert 1e7 < speed.f32_flop_per_s < 1e15
    assert speed.flop_per_s == max(speed.f32_flop_per_s, speed.bf16_flop_per_s)


def test_the_best_of_several_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 3.0, 1.0, 2.0] * 3)  # the first is a warm-up
    monkeypatch.setattr("engine.machine_speed._seconds", lambda compute, device: next(times))
    speed = measure_device("cpu")
    assert speed.bytes_per_s == 32 << 20
    assert speed.f32_flop_per_s == speed.bf16_flop_per_s == 2 * 64 * 256 * 256


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoDevice, match="cuda:77"):
        measure_device("cuda:77")

    def fail(*_: object) -> float:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("engine.machine_speed._seconds", fail)
    with pytest.raises(EngineError, match="cpu has no memory left"):
        measure_device("cpu")
