"""Measurement of the link between two ranks, using the same collectives as models."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import torch

from engine.backends.cpu.thread_comm import ThreadGroup
from engine.errors import EngineError
from engine.hardware.backend_choice import kernels_for, uses_kernels
from engine.hardware.fallbacks import Fallbacks
from engine.hardware.faults import explain_faults
from engine.hardware.torch_devices import is_out_of_memory, release_cached_memory, torch_device
from engine.parallel.rank_threads import RankThreads
from engine.planning.speed.facts import LinkFacts
from engine.runtime.interconnect.proof import find_routes

SMALL_BYTES = (8 << 10, 16 << 10, 32 << 10)
"""Sizes, in bytes, of all-reduces in decode: 2048 to 8192 F32 numbers."""

LARGE_BYTES = 16 << 20
"""Size, in bytes, of an all-reduce in a long prompt's prefill."""

N_SMALL, N_LARGE = 50, 2
"""Number of all-reduces per measurement, so many that the call overhead is negligible."""

N_ROUNDS = 9
"""Number of measurements after a warm-up; the best one is used."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Measured times of the link between two ranks.

    Attributes:
        a, b: ids of the ranks' devices.
        all_reduce_s: seconds per small all-reduce, by its size in bytes.
        bytes_per_s: speed of a large all-reduce, in bytes of the sum per second.
    """

    a: str
    b: str
    all_reduce_s: Mapping[int, float]
    bytes_per_s: float

    @property
    def facts(self) -> LinkFacts:
        """Latency and bandwidth of the link, and the maximum size sent within the latency."""
        return LinkFacts(max(self.all_reduce_s.values()), self.bytes_per_s, max(self.all_reduce_s))


def measure_link(a: str, b: str) -> LinkSpeed:
    """Measure all-reduces between two ranks with one thread each, for about a second.

    Args:
        a, b: ids of devices; the same id twice measures two ranks on one device.

    Raises:
        NoDevice: a device does not exist on this machine.
        EngineError: a device has no memory left or stops working, or the two cannot communicate.
    """
    devices = [torch_device(name) for name in (a, b)]
    try:
        with (
            explain_faults(devices),
            _two_ranks(devices, _group(a, b, devices)) as (threads, ranks),
        ):
            small = {n: _seconds(threads, ranks, n, N_SMALL) for n in SMALL_BYTES}
            large = _seconds(threads, ranks, LARGE_BYTES, N_LARGE)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            "{a} or {b} has too little free memory to measure their link.", a=a, b=b
        ) from None
    finally:
        release_cached_memory(devices)
    return LinkSpeed(a, b, small, LARGE_BYTES / large)


class _Rank:
    """One rank of the link."""

    def __init__(self, group: ThreadGroup, rank: int, device: torch.device) -> None:
        self._comm = group.communicator(rank, device)
        self._device = device

    def run(self, n_bytes: int, count: int) -> float:
        x = torch.ones(1, n_bytes // 4, device=self._device)
        self._comm.all_reduce(x, (0, 1), x.shape)  # so that both start together
        self._wait()
        begun = time.perf_counter()
        for _ in range(count):
            self._comm.all_reduce(x, (0, 1), x.shape)
        self._wait()
        return (time.perf_counter() - begun) / count

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _group(a: str, b: str, devices: list[torch.device]) -> ThreadGroup:
    if "cpu" in (a, b) or {kernels_for(a), kernels_for(b)} != {"gpu"}:
        return ThreadGroup(spins=uses_kernels(a) and uses_kernels(b))
    from engine.backends.gpu.comm.communicator import device_group  # needs Triton

    return device_group(devices, find_routes([a, b]), Fallbacks())


@contextmanager
def _two_ranks(
    devices: list[torch.device], group: ThreadGroup
) -> Iterator[tuple[RankThreads, list[_Rank]]]:
    ranks = [_Rank(group, rank, device) for rank, device in enumerate(devices)]
    n_before = torch.get_num_threads()
    threads = RankThreads(len(ranks), group.abort, lambda: torch.set_num_threads(1), group)
    try:
        torch.set_num_threads(1)
        yield threads, ranks
    finally:
        threads.close()
        group.settle()
        torch.set_num_threads(n_before)


def _seconds(threads: RankThreads, ranks: list[_Rank], n_bytes: int, count: int) -> float:
    """Return the shortest time for an all-reduce; each time is the slower rank's."""

    def measure(rank: int) -> float:
        with torch.inference_mode():
            return ranks[rank].run(n_bytes, count)

    threads.call_on_all(measure)
    return min(max(threads.call_on_all(measure)) for _ in range(N_ROUNDS))
