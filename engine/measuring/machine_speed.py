"""How fast a device can read memory and multiply matrices: what a model's speed is held against,
and what it is predicted from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import torch
from torch import Tensor

from engine.devices import DeviceInfo
from engine.devices.host import usable_cores
from engine.errors import EngineError
from engine.hardware.torch_devices import (
    free_bytes,
    is_out_of_memory,
    release_cached_memory,
    torch_device,
)
from engine.measuring.weight_speed import measurable, measure_weights
from engine.planning.speed.device_specs import CORES_PER_BANDWIDTH
from engine.planning.speed.facts import DeviceFacts, WeightRate
from engine.planning.speed.machine_file import MachineFile, expected_facts
from engine.planning.speed.rigs import spec_from_driver

READ_BYTES = 512 << 20
"""Read at a time: more than any cache holds."""

MATMUL_SIZES = {"cpu": (512, 4096, 4096), "cuda": (8192, 4096, 4096)}
"""Tokens, inputs and outputs, by kind of device: about a prompt's batch and a model's matrix."""

MIN_SECONDS = 0.3
"""Each measurement is repeated for that long, and the best one counts."""

MIN_REPETITIONS = 3

MATRIX_PART = 0.92
"""Of what a sum reads on a GPU, for products of a matrix with one token: a sum reaches 0.92 of what
the memory gives, good products 0.85."""


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What was measured on one device.

    Attributes:
        n_threads: of the CPU; 0 for a GPU.
        bytes_per_s: reading from memory, in order.
        f32_flop_per_s: torch's matrix product in F32.
        bf16_flop_per_s: the same in BF16.
        copy_bytes_per_s: read and written together while a GPU copies its own memory; None for
            the CPU.
    """

    device: str
    n_threads: int
    bytes_per_s: float
    f32_flop_per_s: float
    bf16_flop_per_s: float
    copy_bytes_per_s: float | None = None

    @property
    def flop_per_s(self) -> float:
        """The faster of the two products."""
        return max(self.f32_flop_per_s, self.bf16_flop_per_s)


def measure_device(name: str) -> DeviceSpeed:
    """Measure a device for about a second; the CPU with all its cores.

    Raises:
        NoDevice: it does not exist here.
        EngineError: it has no memory left to measure with.
    """
    device = torch_device(name)
    is_cpu = device.type == "cpu"
    n_before = torch.get_num_threads()
    try:
        if is_cpu:
            torch.set_num_threads(usable_cores())
        with torch.inference_mode():
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
        raise EngineError(f"{name} has no memory left to measure its speed with.") from None
    finally:
        torch.set_num_threads(n_before)
        release_cached_memory([device])


def measure_facts(
    info: DeviceInfo, kinds: Iterable[str] = (), file: MachineFile | None = None
) -> DeviceFacts:
    """What speeds on a device are predicted from: measured now, or kept of an earlier time.

    It takes some seconds, and about one for each kind of weights that was not measured before. What
    is not measured (the time of an operation, of what happens between tokens) is an expectation.

    Args:
        kinds: of weights; on a GPU all are expected to be read alike.
        file: keeps what is measured.

    Raises:
        NoDevice: the device does not exist here.
        EngineError: it has no memory left to measure with.
    """
    file = file or MachineFile()
    found = file.device(info) or file.keep_device(info, _facts(info))
    missing = [kind for kind in measurable(kinds) if kind not in found.rates]
    if info.kind == "cpu" and missing:
        rates = _weight_rates(missing, found.n_threads)
        found = file.keep_device(info, replace(found, rates=rates))
    return found


def _facts(info: DeviceInfo) -> DeviceFacts:
    """What is measured of a device whatever runs there."""
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
        raise EngineError("cpu has no memory left to measure its speed with.") from None
    finally:
        torch.set_num_threads(n_before)


def _read_speed(device: torch.device, n_free: int) -> float:
    """Bytes/s of a sum, which takes less time to add than to read."""
    numbers = torch.ones(min(READ_BYTES, n_free // 4) // 4, device=device)
    return numbers.nbytes / _best_seconds(numbers.sum, device)


def _copy_speed(device: torch.device, n_free: int) -> float:
    """Bytes/s of a copy on a device, those that are read and those that are written."""
    source = torch.ones(min(READ_BYTES, n_free // 8) // 4, device=device)
    goal = torch.empty_like(source)
    return 2 * source.nbytes / _best_seconds(lambda: goal.copy_(source), device)


def _matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Operations/s of `x Wᵀ`, a multiplication and an addition being two."""
    n_tokens, n_in, n_out = MATMUL_SIZES[device.type]
    x = torch.randn(n_tokens, n_in, device=device).to(dtype)
    weight = torch.randn(n_out, n_in, device=device).to(dtype)
    seconds = _best_seconds(lambda: torch.nn.functional.linear(x, weight), device)
    return 2 * n_tokens * n_in * n_out / seconds


def _best_seconds(compute: Callable[[], Tensor], device: torch.device) -> float:
    """The shortest time of several, after one that does not count."""
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
