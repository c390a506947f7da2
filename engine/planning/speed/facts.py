"""Facts of devices and of links between them, from which speeds are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeVar

from engine.hardware.devices.types import is_cpu, local_id, machine_of

CACHE = "KV"
"""Key of the KV cache's rate in `DeviceFacts.rates`."""


@dataclass(frozen=True, slots=True)
class WeightRate:
    """Speed at which a device multiplies with weights of one kind.

    Attributes:
        bytes_per_s: bytes of weights per second, as they are held, for one token.
        thread_bytes_per_s: bytes of weights per second of one CPU thread, for one token.
        flop_per_s: multiplications and additions per second for many tokens at once.
    """

    bytes_per_s: float
    thread_bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Measured or expected speeds of one device.

    Attributes:
        device: its id; ranks with the same one share it.
        bytes_per_s: bytes per second of weights without a rate of their own, and of the KV cache.
        flop_per_s: operations per second of matrix products for many tokens.
        op_s: seconds that each matrix costs a token beside its bytes: starting, ending, and the
            small steps between matrices.
        routed_op_s: seconds that each matrix costs in a block with routed experts.
        host_s: seconds between two tokens: sampling, Python.
        n_threads: number of the CPU's threads; 0 for a GPU.
        thread_bytes_per_s: `bytes_per_s` of one thread; 0 for a GPU.
        unpack_bytes: memory traffic in bytes for each quantised weight and batch of a prompt, where
            matrices are dequantised before they are multiplied.
        cache_part: part of `bytes_per_s` at which keys and values are read.
        rates: speeds by kind of weights.
    """

    device: str
    bytes_per_s: float
    flop_per_s: float
    op_s: float = 0.0
    routed_op_s: float = 0.0
    host_s: float = 0.0
    n_threads: int = 0
    thread_bytes_per_s: float = 0.0
    unpack_bytes: float = 0.0
    cache_part: float = 1.0
    rates: Mapping[str, WeightRate] = field(default_factory=dict)

    def rate(self, kind: str) -> WeightRate:
        """Return the speed with weights of one kind, or with the KV cache."""
        known = self.rates.get(kind)
        if known is not None:
            return known
        part = self.cache_part if kind == CACHE else 1.0
        one = self.thread_bytes_per_s or self.bytes_per_s
        return WeightRate(part * self.bytes_per_s, part * one, self.flop_per_s)


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """Speed of the link between two devices: Hockney's model (Parallel Computing 20, 1994).

    Attributes:
        latency_s: seconds of an all-reduce or a move of very few bytes.
        bytes_per_s: bytes per second in one direction while the other one is in use as well.
        covered_bytes: bytes that are sent within the latency.
    """

    latency_s: float
    bytes_per_s: float
    covered_bytes: float = 0.0

    def payload_s(self, n_bytes: float) -> float:
        """Return the seconds of `n_bytes` beside the latency."""
        return max(0.0, n_bytes - self.covered_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class WireSpeed:
    """Measured speed of the link between two machines, as tensors go: by TCP, from host memory.

    Attributes:
        a, b: numbers of the machines.
        latency_s: seconds until a message of few bytes has arrived, the median of many.
        mean_s: mean of the same: lost packets make few messages much slower.
        bytes_per_s: bytes per second of a large tensor.
        exchange_s: mean seconds until both have a message that they send each other at once.
    """

    a: int
    b: int
    latency_s: float
    mean_s: float
    bytes_per_s: float
    exchange_s: float

    @property
    def facts(self) -> LinkFacts:
        """Facts from which predictions start."""
        return LinkFacts(self.mean_s, self.bytes_per_s, MESSAGE_BYTES)

    @property
    def stall_s(self) -> float:
        """Mean seconds that a message waits for lost packets."""
        return max(0.0, self.mean_s - self.latency_s)


MESSAGE_BYTES = 4096
"""Bytes of the message whose latency is measured: an order of machine 0, or a small activation."""


Cause = Literal["memory", "compute", "fixed", "wait", "link", "idle"]

WORTH_SAYING = 0.15
"""Least part of the time for which waiting for one device is given as the reason."""

T = TypeVar("T", "RankTime", "Path")


@dataclass(frozen=True, slots=True)
class RankTime:
    """Predicted time of one rank by cause, in seconds; the rest of the whole time is the host's.

    Attributes:
        rank: number of the rank.
        device: id of its device.
        memory_s: time of reading weights, keys and values.
        compute_s: time of multiplying, where that takes longer than reading.
        fixed_s: time that matrices cost however small they are.
        wait_s: time of waiting for slower ranks of its group.
        link_s: time of exchanges with other ranks.
        idle_s: time in which other groups compute.
        waited_s: time in which others wait for this rank alone; a part of the times above.
    """

    rank: int
    device: str
    memory_s: float
    compute_s: float
    fixed_s: float
    wait_s: float
    link_s: float
    idle_s: float
    waited_s: float

    @property
    def busy_s(self) -> float:
        """Time in which the rank computes, in seconds."""
        return self.memory_s + self.compute_s + self.fixed_s

    @property
    def limited_by(self) -> Cause:
        """Cause that takes most of the rank's time."""
        causes: tuple[Cause, ...] = ("memory", "compute", "fixed", "wait", "link", "idle")
        return max(causes, key=lambda cause: float(getattr(self, f"{cause}_s")))


@dataclass(frozen=True, slots=True)
class Path:
    """Predicted time along the slowest rank of each step, by cause, in seconds: the whole time.

    Attributes:
        memory_s: time of reading weights, keys and values.
        compute_s: time of multiplying, where that takes longer than reading.
        fixed_s: time that matrices cost however small they are.
        link_s: time of exchanges between ranks.
        host_s: time between forward passes: sampling, Python.
    """

    memory_s: float = 0.0
    compute_s: float = 0.0
    fixed_s: float = 0.0
    link_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of some tokens on a split.

    Attributes:
        n_tokens: number of tokens.
        seconds: time of all of them.
        ranks: times of each rank, in rank order.
        path: `seconds` by cause.
    """

    n_tokens: int
    seconds: float
    ranks: tuple[RankTime, ...]
    path: Path

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0 where `seconds` is."""
        return self.n_tokens / self.seconds if self.seconds > 0 else 0.0

    def part(self, seconds: float) -> float:
        """Return some seconds as a part of all."""
        return seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def reason(self) -> str:
        """Sentence that says what limits the speed."""
        slow = max(self.ranks, key=lambda rank: rank.waited_s)
        waited = self.part(slow.waited_s)
        if waited >= WORTH_SAYING:
            name = self._name(slow)
            is_pair = len(self.ranks) == 2
            slow_is = "slower; the other waits" if is_pair else "slowest; the others wait"
            return (
                f"{name[0].upper()}{name[1:]} is {slow_is} for it {_percent(waited)} of the time."
            )
        path = {spec.name: getattr(self.path, spec.name) for spec in fields(Path)}
        cause = max(path, key=lambda name: path[name])
        return REASONS[cause].format(part=_percent(self.part(path[cause])))

    def _name(self, rank: RankTime) -> str:
        """Return what the user calls a rank: "GPU 1", "the CPU", "CPU 0", "GPU 1 (rank 2)"."""
        alike = [other.rank for other in self.ranks if other.device == rank.device]
        return rank_name(rank.device, rank.rank, alike)

    def scaled(self, factor: float) -> Prediction:
        """Return the prediction with all times multiplied by `factor`."""
        return replace(
            self,
            seconds=self.seconds * factor,
            ranks=tuple(_scaled(rank, factor) for rank in self.ranks),
            path=_scaled(self.path, factor),
        )


REASONS = {
    "memory_s": "Limited by memory bandwidth: reading takes {part} of the time.",
    "compute_s": "Limited by compute: multiplying takes {part} of the time.",
    "fixed_s": "Limited by the overhead of operations, which takes {part} of the time.",
    "link_s": "Limited by the links: exchanges between devices take {part} of the time.",
    "host_s": "Limited by the work between tokens, such as sampling: {part} of the time.",
}


def device_name(device: str) -> str:
    """Return what the user calls a device within a sentence: "GPU 1" or "the CPU".

    People count machines from 1: "GPU 0 of machine 2".
    """
    kind, _, number = local_id(device).partition(":")
    where = f" of machine {machine_of(device) + 1}" if machine_of(device) else ""
    return (f"GPU {number}" if kind == "cuda" else "the CPU") + where


def rank_name(device: str, rank: int, alike: Sequence[int]) -> str:
    """Return what the user calls a rank within a sentence, as beside the split's handles.

    Args:
        alike: the ranks on its device, itself included, in order.
    """
    if len(alike) == 1:
        return device_name(device)
    if is_cpu(device) and not machine_of(device):
        return f"CPU {alike.index(rank)}"
    return f"{device_name(device)} (rank {rank})"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _scaled(times: T, factor: float) -> T:
    """Return a copy with all fields in seconds multiplied by a factor."""
    names = [spec.name for spec in fields(times) if spec.name.endswith("_s")]
    return replace(times, **{name: factor * getattr(times, name) for name in names})
