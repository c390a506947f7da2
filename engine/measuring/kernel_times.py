"""Where GPUs spend their time, by NVIDIA's and AMD's own records: torch's profiler reads them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.runtime.timeline import GpuTimes, KernelTime

if TYPE_CHECKING:
    from engine.runtime.thread_runtime import ThreadRuntime

N_STARTED = 32
"""Tokens that the host starts, to see how long that takes it."""


class Span(NamedTuple):
    """Something that ran on a device, from and to in microseconds of any clock."""

    device: str
    name: str
    begin: float
    end: float


def gpu_times(compute: Callable[[], object], n_tokens: int) -> GpuTimes | None:
    """Compute some tokens and see what ran on GPUs; None where that is not recorded.

    Recording slows the host down, so nothing else is to be measured at the same time.
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
    """Add up what ran for so many tokens; None if nothing did."""
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
    """How long at least one of them ran; they are sorted by their begin."""
    total, until = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total


def short_name(name: str) -> str:
    """Of a kernel of C++ without types and arguments: "gemm" of "void ns::gemm<int>(int*)"."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = plain.partition("<")[0].partition("(")[0].strip()
    return head.rpartition("::")[2] or name


def host_s(runtime: ThreadRuntime, position: int) -> float | None:
    """Seconds per token that the host takes to start one on all GPUs, not waiting for them.

    The token at `position` is computed anew each time; what the cache holds from there on is then
    of no use. None where a model is not one graph on each of its GPUs.
    """
    runner = runtime.runner
    if not runner.is_captured_whole or not runner.executor.has_gpus:
        return None
    times = []
    for _ in range(N_STARTED):
        begun = perf_counter()
        runner.start(0, position)
        times.append(perf_counter() - begun)
        runner.executor.wait()
    return median(times)
