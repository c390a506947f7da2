"""Measured speeds of a device: plausible, and no changed settings afterwards."""

import pytest
import torch

from engine import DeviceSpeed, EngineError, NoDevice, list_devices, measure_device
from engine.backends.cpu.kernels.language.isa import chosen
from engine.hardware.devices.host import usable_cores
from engine.hardware.devices.types import DeviceInfo
from engine.planning.speed.machine_file import MachineFile
from engine.runtime.measuring.machine_speed import measure_facts
from engine.runtime.measuring.weight_speed import (
    Probe,
    measurable,
    measure_products,
    measure_weights,
    product_types,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make measurements short, even where torch multiplies BF16 one number at a time."""
    monkeypatch.setattr("engine.runtime.measuring.machine_speed.READ_BYTES", 32 << 20)
    monkeypatch.setattr(
        "engine.runtime.measuring.machine_speed.MATMUL_SIZES", {"cpu": (64, 256, 256)}
    )
    monkeypatch.setattr("engine.runtime.measuring.machine_speed.MIN_SECONDS", 0.01)
    monkeypatch.setattr("engine.runtime.measuring.weight_speed.MIN_SECONDS", 0.01)
    monkeypatch.setattr("engine.runtime.measuring.weight_speed.N_ROWS", 64)
    monkeypatch.setattr("engine.runtime.measuring.weight_speed.N_GEMM_ROWS", 32)
    monkeypatch.setattr("engine.runtime.measuring.weight_speed.N_COLUMNS", 256)


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
    monkeypatch.setattr(
        "engine.runtime.measuring.machine_speed._seconds", lambda compute, device: next(times)
    )
    speed = measure_device("cpu")
    assert speed.bytes_per_s == 32 << 20
    assert speed.f32_flop_per_s == speed.bf16_flop_per_s == 2 * 64 * 256 * 256


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoDevice, match="cuda:77"):
        measure_device("cuda:77")

    def fail(*_: object) -> float:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("engine.runtime.measuring.machine_speed._seconds", fail)
    with pytest.raises(EngineError, match="cpu has too little free memory"):
        measure_device("cpu")


def test_kinds_of_weights_are_measured_by_the_kernels_that_multiply_them() -> None:
    rates = measure_weights(["Q4_K", "F16", "no such type", "Q4_K"], 2, 1 << 16)
    assert list(rates) == ["Q4_K", "F16"]
    for rate in rates.values():
        assert 1e6 < rate.thread_bytes_per_s <= rate.bytes_per_s < 1e13
        assert 1e6 < rate.flop_per_s < 1e15
    assert measurable(["BF16", "F32", "IQ1_S", "F64"]) == ["BF16", "F32", "IQ1_S"]


def test_a_probe_has_as_many_matrices_as_fit_and_at_least_one() -> None:
    probe = Probe("F32", 1, 5 * 64 * 256 * 4 + 7)
    assert len(probe._weights) == 5
    assert len(Probe("F32", 1, 0)._weights) == 1
    single = probe.with_threads(1)
    assert len(single._weights) == 5
    for one in (probe, single):
        one.close()


def test_facts_of_a_device_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, file = list_devices()[-1], MachineFile()
    calls: list[tuple[str, ...]] = []

    def spy(kinds: list[str], *rest: int) -> object:
        calls.append(tuple(kinds))
        return measure_weights(kinds, *rest)

    monkeypatch.setattr("engine.runtime.measuring.machine_speed.measure_weights", spy)
    first = measure_facts(cpu, ["Q8_0"], file)
    assert (first.device, first.n_threads, list(first.rates)) == ("cpu", usable_cores(), ["Q8_0"])
    monkeypatch.setattr("engine.runtime.measuring.machine_speed.measure_device", None)
    assert measure_facts(cpu, ["Q8_0", "packed"], file) == first
    both = measure_facts(cpu, ["Q8_0", "F16"], file)
    assert both.rates["Q8_0"] == first.rates["Q8_0"]
    assert set(both.rates) == {"Q8_0", "F16"}
    assert calls == [("Q8_0",), ("F16",)]


def test_facts_of_a_device_that_is_not_here_are_refused() -> None:
    with pytest.raises(NoDevice, match="cuda:77"):
        measure_facts(DeviceInfo("cuda:77", "cuda", "RTX 3090", 1, 1))


def test_a_lack_of_memory_for_weights_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise MemoryError

    monkeypatch.setattr("engine.runtime.measuring.machine_speed.measure_weights", fail)
    with pytest.raises(EngineError, match="cpu has too little free memory"):
        measure_facts(list_devices()[-1], ["F16"])


@pytest.mark.parametrize(
    ("name", "expected"), [("NVIDIA GeForce RTX 3090", 0.85 * 936e9), ("NVIDIA Z1", 0.92 * 2e12)]
)
def test_a_gpu_is_believed_as_far_as_its_maker_goes(
    name: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = DeviceSpeed("cuda:0", 0, 2e12, f32_flop_per_s=2e13, bf16_flop_per_s=6e13)
    monkeypatch.setattr(
        "engine.runtime.measuring.machine_speed.measure_device", lambda device: measured
    )
    facts = measure_facts(DeviceInfo("cuda:0", "cuda", name, 24 << 30, 23 << 30), ["Q4_K", "F32"])
    assert facts.bytes_per_s == pytest.approx(expected)
    assert (facts.flop_per_s, facts.rate("F32").flop_per_s) == (6e13, 2e13)
    assert facts.n_threads == 0
    assert facts.rate("Q4_K").bytes_per_s == facts.bytes_per_s


@pytest.mark.parametrize("fast_prompts", [False, True])
def test_products_are_measured_by_type(fast_prompts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.cpu.worker.bf16_from", lambda n_threads: 100)
    monkeypatch.setattr("engine.backends.cpu.worker.is_bf16_fast", lambda n_threads: True)
    before = torch.get_num_threads()
    kinds = ["Q4_K", "F16", "F32", "I8"]
    speeds = list(measure_products(kinds, 1, fast_prompts=fast_prompts, n_bytes=1 << 20))
    assert torch.get_num_threads() == before
    fast = "BF16" if fast_prompts else None
    are_int16 = chosen().has_word_dots and not fast_prompts
    f16, f16_bits = ("INT16", 16.125) if are_int16 else ("F32", 16)
    assert [(s.kind, s.bits, s.n_threads, s.arithmetic) for s in speeds] == [
        ("Q4_K", 4.625, 1, fast or "INT8"), ("F16", f16_bits, 1, fast or f16),
        ("F32", 32, 1, "F32"),
    ]  # fmt: skip
    for speed in speeds:
        rates = speed.bytes_per_s, speed.read_bytes_per_s, speed.few_op_per_s, speed.many_op_per_s
        assert all(1e6 < rate < 1e15 for rate in rates)
    assert {"Q4_K", "IQ2_XXS", "BF16"} <= set(product_types())
