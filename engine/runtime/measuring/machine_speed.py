"""Measurement of a device's memory bandwidth and matmul speed.

A model's measured speed is compared with these, and predictions are based on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.hardware.devices.host import usable_cores
from engine.hardware.devices.monitor import DeviceMonitor
from engine.hardware.devices.types import DeviceInfo
from engine.hardware.faults import explain_faults
from engine.hardware.torch_devices import (
    free_bytes,
    is_out_of_memory,
    release_cached_memory,
    torch_device,
)
from engine.planning.speed.device_specs import CORES_PER_BANDWIDTH
from engine.planning.speed.facts import DeviceFacts, WeightRate
from engine.planning.speed.machine_file import MachineFile, expected_facts
from engine.planning.speed.rigs import spec_from_driver
from engine.runtime.measuring.weight_speed import measurable, measure_weights

READ_BYTES = 512 << 20
"""Bytes to read at a time; more than fits in any cache."""

MATMUL_SIZES = {"cpu": (512, 4096, 4096), "cuda": (8192, 4096, 4096)}
"""Numbers of tokens, inputs and outputs in a matmul, by kind of device; similar to prefill."""

MIN_SECONDS = 0.3
"""Seconds for which each measurement is repeated; the best one is used."""

MIN_REPETITIONS = 3

MATRIX_PART = 0.92
"""Bandwidth of a gemv relative to torch's sum on a GPU: a sum reaches 0.92 of the memory's
bandwidth, a good gemv 0.85."""


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Measured speeds of one device.

    Attributes:
        n_threads: number of CPU threads; 0 for a GPU.
        bytes_per_s: bandwidth of sequential memory reads.
        f32_flop_per_s: speed of torch's matmul in F32.
        bf16_flop_per_s: speed of torch's matmul in BF16.
        copy_bytes_per_s: bytes read and written per second while a GPU copies within its own
            memory; None for the CPU.
    """

    device: str
    n_threads: int
    bytes_per_s: float
    f32_flop_per_s: float
    bf16_flop_per_s: float
    copy_bytes_per_s: float | None = None

    @property
    def flop_per_s(self) -> float:
        """Speed of the faster of the two matmuls."""
        return max(self.f32_flop_per_s, self.bf16_flop_per_s)


def measure_device(name: str) -> DeviceSpeed:
    """Measure a device for about a second; on the CPU, use all cores.

    Raises:
        NoDevice: the device does not exist on this machine.
        EngineError: the device has no memory left to measure with, or stops working.
    """
    device = torch_device(name)
    is_cpu = device.type == "cpu"
    n_before = torch.get_num_threads()
    try:
        if is_cpu:
            torch.set_num_threads(usable_cores())
        with torch.inference_mode(), explain_faults([device]):
            return DeviceSpeed(
                device=name,
                n_threads=torch.get_num_threads() if is_cpu else 0,
                bytes_per_s=_read_speed(device, free_bytes([name])[name]),
                f32_flop_per_s=_matmul_speed(device, torch.float32),
                bf16_flop_per_s=_matmul_speed(device, torch.bfloat16),
                copy_bytes_per_s=None if is_cpu else _copy_speed(device, free_bytes([name])[name]),
            )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            "{device} has too little free memory to measure its speed.", device=name
        ) from None
    finally:
        torch.set_num_threads(n_before)
        release_cached_memory([device])


def measure_facts(
    info: DeviceInfo, kinds: Iterable[str] = (), file: MachineFile | None = None
) -> DeviceFacts:
    """Return the facts on which a device's predictions are based; measure those not yet stored.

    Measuring takes some seconds, and about one more for each kind of weights. Facts that are not
    measured (time per operation, time between tokens) are estimated.

    Args:
        info: device to measure.
        kinds: GGML types of weights; a GPU is assumed to read all of them equally fast.
        file: store for the measured facts; None to keep none.

    Raises:
        NoDevice: the device does not exist on this machine.
        EngineError: the device has no memory left to measure with.
    """
    file = file or MachineFile()
    found = file.device(info) or file.keep_device(info, _facts(info))
    missing = [kind for kind in measurable(kinds) if kind not in found.rates]
    if info.kind == "cpu" and missing:
        rates = _weight_rates(missing, found.n_threads)
        found = file.keep_device(info, replace(found, rates=rates))
    return found


def _facts(info: DeviceInfo) -> DeviceFacts:
    speed, expected = measure_device(info.id), expected_facts(info)
    if info.kind == "cpu":
        return replace(
            expected,
            bytes_per_s=speed.bytes_per_s,
            thread_bytes_per_s=speed.bytes_per_s / min(speed.n_threads, CORES_PER_BANDWIDTH),
            flop_per_s=speed.flop_per_s,
            n_threads=speed.n_threads,
        )
    bandwidth = MATRIX_PART * speed.bytes_per_s
    if spec_from_driver(info.name) is not None:
        bandwidth = min(bandwidth, expected.bytes_per_s)
    f32 = WeightRate(bandwidth, bandwidth, speed.f32_flop_per_s)
    return replace(
        expected,
        bytes_per_s=bandwidth,
        flop_per_s=speed.flop_per_s,
        rates={**expected.rates, "F32": f32},
    )


def _weight_rates(kinds: Iterable[str], n_threads: int) -> dict[str, WeightRate]:
    n_before = torch.get_num_threads()
    try:
        torch.set_num_threads(n_threads)
        return measure_weights(kinds, n_threads, min(READ_BYTES, free_bytes(["cpu"])["cpu"] // 4))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            "{device} has too little free memory to measure its speed.", device="cpu"
        ) from None
    finally:
        torch.set_num_threads(n_before)


def _read_speed(device: torch.device, n_free: int) -> float:
    """Return the bytes per second in torch's sum, which is limited by reading memory."""
    numbers = torch.ones(min(READ_BYTES, n_free // 4) // 4, device=device)
    return numbers.nbytes / _best_seconds(numbers.sum, device)


def _copy_speed(device: torch.device, n_free: int) -> float:
    source = torch.ones(min(READ_BYTES, n_free // 8) // 4, device=device)
    goal = torch.empty_like(source)
    return 2 * source.nbytes / _best_seconds(lambda: goal.copy_(source), device)


def _matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second in `x Wᵀ`; a multiplication and an addition count as two."""
    n_tokens, n_in, n_out = MATMUL_SIZES[device.type]
    x = torch.randn(n_tokens, n_in, device=device).to(dtype)
    weight = torch.randn(n_out, n_in, device=device).to(dtype)
    seconds = _best_seconds(lambda: torch.nn.functional.linear(x, weight), device)
    return 2 * n_tokens * n_in * n_out / seconds


def _best_seconds(compute: Callable[[], Tensor], device: torch.device) -> float:
    _seconds(compute, device)
    times: list[float] = []
    while len(times) < MIN_REPETITIONS or sum(times) < MIN_SECONDS:
        times.append(_seconds(compute, device))
    return min(times)


def _seconds(compute: Callable[[], Tensor], device: torch.device) -> float:
    begun = time.perf_counter()
    compute()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


WATCHED_S = 0.25
"""Seconds for which devices are observed."""

MIN_PERCENT = 15.0
"""Load, in percent, below which a device counts as idle."""


def other_load(devices: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return (device, load in percent) for devices that are busy while this program is idle.

    Devices whose load is unknown are omitted.
    """
    try:
        with DeviceMonitor(devices) as monitor:
            monitor.snapshot()  # the CPU's load is measured between two readings
            time.sleep(WATCHED_S)
            found = monitor.snapshot()
    except EngineError:
        return ()
    loads = ((reading.device, reading.load_percent or 0.0) for reading in found)
    return tuple((device, round(load, 1)) for device, load in loads if load >= MIN_PERCENT)
