"""Times of GPU kernels, from the drivers' records that torch's profiler reads."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import torch

from engine.model.forward.batch import Batch, Piece
from engine.runtime.timeline import GpuTimes, KernelTime

if TYPE_CHECKING:
    from engine.runtime.thread_runtime import ThreadRuntime

N_STARTED = 32
"""Number of tokens to launch when measuring launch times."""


class Span(NamedTuple):
    """One run of a kernel or a copy on a device; begin and end are in microseconds on any clock."""

    device: str
    name: str
    begin: float
    end: float


def gpu_times(compute: Callable[[], object], n_tokens: int) -> GpuTimes | None:
    """Compute some tokens and return the times of all GPU work; None if nothing was recorded.

    Recording slows down the host, so measure nothing else at the same time.

    Args:
        compute: computes `n_tokens` tokens.
    """
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as record:
        compute()
        torch.cuda.synchronize()
    return summed(_spans(record.events() or ()), n_tokens)


def _spans(events: Iterable[Any]) -> Iterator[Span]:
    for event in events:
        if event.device_type.name != "CPU":
            device = f"cuda:{event.device_index}"
            yield Span(device, event.name, event.time_range.start, event.time_range.end)


def summed(spans: Iterable[Span], n_tokens: int) -> GpuTimes | None:
    """Sum spans by device and name, per token; return None if there are none."""
    found = sorted(spans, key=lambda span: (span.device, span.begin))
    totals: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in found:
        totals[span.device, short_name(span.name)].append(span.end - span.begin)
    kernels = [
        KernelTime(device, name, len(times) / n_tokens, sum(times) / 1e6 / n_tokens)
        for (device, name), times in totals.items()
    ]
    busy = {
        device: _covered(some) / 1e6 / n_tokens
        for device, some in itertools.groupby(found, key=lambda span: span.device)
    }
    kernels.sort(key=lambda kernel: -kernel.seconds)
    return GpuTimes(tuple(kernels), busy) if found else None


def _covered(spans: Iterable[Span]) -> float:
    total, until = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total


def short_name(name: str) -> str:
    """Return a C++ name without types and arguments: "gemm" for "void ns::gemm<int>(int*)"."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = plain.partition("<")[0].partition("(")[0].strip()
    return head.rpartition("::")[2] or name


def host_s(runtime: ThreadRuntime, place: Piece) -> float | None:
    """Measure the seconds that the host takes to launch a token on all GPUs, without waiting.

    Args:
        place: position of the token, which is recomputed each time; the cache is invalid from there
            on.

    Returns:
        The median; None if the model is not a single graph on each of its GPUs.
    """
    runner = runtime.runner
    if not runner.is_captured_whole or not runner.executor.has_gpus:
        return None
    times = []
    for _ in range(N_STARTED):
        begun = perf_counter()
        runner.start([0], Batch((place,), 0))
        times.append(perf_counter() - begun)
        runner.executor.wait()
    return median(times)
