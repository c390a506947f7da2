"""Facts about devices and the links between them, from which speeds are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeVar

from engine.errors import Sentence
from engine.hardware.devices.types import is_cpu, local_id, machine_of

CACHE = "KV"
"""Key of the KV cache's rate in `DeviceFacts.rates`."""


@dataclass(frozen=True, slots=True)
class WeightRate:
    """Speed at which a device multiplies by weights of one kind.

    Attributes:
        bytes_per_s: weight bytes per second for one token, as stored in memory.
        thread_bytes_per_s: the same for a single CPU thread.
    """

    bytes_per_s: float
    thread_bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Measured or expected speeds of one device.

    Attributes:
        device: its id; ranks with the same id share it.
        bytes_per_s: bandwidth for weights without an entry in `rates`, and for the KV cache.
        flop_per_s: operations per second in matrix products over many tokens.
        op_s: overhead per matrix and token: launches, synchronisation, small kernels in between.
        routed_op_s: the same in a block with routed experts.
        host_s: seconds between two tokens: sampling, Python.
        n_threads: number of CPU threads; 0 for a GPU.
        thread_bytes_per_s: `bytes_per_s` for a single thread; 0 for a GPU.
        unpack_bytes: memory traffic in bytes per quantised weight and prompt batch, if matrices are
            dequantised before they are multiplied.
        cache_part: fraction of `bytes_per_s` reached when reading keys and values.
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
        """Return the speed for weights of one kind, or for the KV cache."""
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
        latency_s: seconds that an all-reduce or move of very few bytes takes.
        bytes_per_s: bandwidth in one direction while the other direction is in use as well.
        covered_bytes: bytes sent within the latency.
    """

    latency_s: float
    bytes_per_s: float
    covered_bytes: float = 0.0

    def payload_s(self, n_bytes: float) -> float:
        """Return the seconds that `n_bytes` take on top of the latency."""
        return max(0.0, n_bytes - self.covered_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class WireSpeed:
    """Measured speed of the TCP link between two machines, from and to host memory.

    Attributes:
        a, b: numbers of the machines.
        latency_s: median one-way time of a short message.
        mean_s: mean one-way time; lost packets make a few messages much slower.
        bytes_per_s: bytes per second when sending a large tensor.
        exchange_s: mean time to exchange two short messages sent simultaneously.
    """

    a: int
    b: int
    latency_s: float
    mean_s: float
    bytes_per_s: float
    exchange_s: float

    @property
    def facts(self) -> LinkFacts:
        """Facts of the link, for predictions."""
        return LinkFacts(self.mean_s, self.bytes_per_s, MESSAGE_BYTES)

    @property
    def stall_s(self) -> float:
        """Mean delay due to lost packets, in seconds."""
        return max(0.0, self.mean_s - self.latency_s)


MESSAGE_BYTES = 4096
"""Size of the messages used to measure latency: that of a command or a small activation."""

Cause = Literal["memory", "compute", "fixed", "wait", "link", "idle"]

WORTH_SAYING = 0.15
"""Smallest fraction of the time at which waiting for one device is given as the reason."""

T = TypeVar("T", "RankTime", "Path")


@dataclass(frozen=True, slots=True)
class RankTime:
    """Predicted time of one rank by cause, in seconds; the host takes the rest of the total.

    Attributes:
        memory_s: reading weights, keys and values.
        compute_s: multiplying, if that takes longer than reading.
        fixed_s: overhead per matrix, regardless of its size.
        wait_s: waiting for slower ranks in the group.
        link_s: exchanges with other ranks.
        idle_s: time in which other groups compute.
        waited_s: time in which others wait only for this rank; included in the times above.
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
    """Predicted time of the slowest rank in each step, by cause, in seconds; sums to the total."""

    memory_s: float = 0.0
    compute_s: float = 0.0
    fixed_s: float = 0.0
    link_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time for a number of tokens on a split."""

    n_tokens: int
    seconds: float
    ranks: tuple[RankTime, ...]
    path: Path

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0 if the time is 0."""
        return self.n_tokens / self.seconds if self.seconds > 0 else 0.0

    def part(self, seconds: float) -> float:
        """Return `seconds` as a fraction of the total."""
        return seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def reason(self) -> Sentence:
        """Sentence that names the bottleneck."""
        slow, waited = self._slowest()
        if waited >= WORTH_SAYING:
            return Sentence(
                "{device} is slower; the other waits for it {part} of the time."
                if len(self.ranks) == 2
                else "{device} is slowest; the others wait for it {part} of the time.",
                device=self._name(slow, begins=True),
                part=percent(waited),
            )
        cause, part = self._cause()
        return Sentence(REASONS[cause].template, part=percent(part))

    @property
    def short_reason(self) -> Sentence:
        """The bottleneck as the end of another sentence, after a comma."""
        slow, waited = self._slowest()
        if waited >= WORTH_SAYING:
            return Sentence(
                "because {device} is slower; the other waits for it {part} of the time"
                if len(self.ranks) == 2
                else "because {device} is slowest; the others wait for it {part} of the time",
                device=self._name(slow),
                part=percent(waited),
            )
        cause, part = self._cause()
        return Sentence(SHORT_REASONS[cause].template, part=percent(part))

    def _slowest(self) -> tuple[RankTime, float]:
        """Return the rank that the others wait for, and the part of the time they wait."""
        slow = max(self.ranks, key=lambda rank: rank.waited_s)
        return slow, self.part(slow.waited_s)

    def _cause(self) -> tuple[str, float]:
        path = {spec.name: getattr(self.path, spec.name) for spec in fields(Path)}
        cause = max(path, key=lambda name: path[name])
        return cause, self.part(path[cause])

    def _name(self, rank: RankTime, *, begins: bool = False) -> str:
        ranks = [other.rank for other in self.ranks if other.device == rank.device]
        return rank_name(rank.device, rank.rank, ranks, begins=begins)

    def scaled(self, factor: float) -> Prediction:
        """Return the prediction with all times multiplied by `factor`."""
        return replace(
            self,
            seconds=self.seconds * factor,
            ranks=tuple(_scaled(rank, factor) for rank in self.ranks),
            path=_scaled(self.path, factor),
        )


REASONS = {
    "memory_s": Sentence("Limited by memory bandwidth: reading takes {part} of the time."),
    "compute_s": Sentence("Limited by compute: multiplying takes {part} of the time."),
    "fixed_s": Sentence("Limited by per-operation overhead, which takes {part} of the time."),
    "link_s": Sentence("Limited by the links: exchanges between devices take {part} of the time."),
    "host_s": Sentence(
        "Limited by work between tokens, such as sampling, which takes {part} of the time."
    ),
}
SHORT_REASONS = {
    "memory_s": Sentence("limited by memory bandwidth"),
    "compute_s": Sentence("limited by compute"),
    "fixed_s": Sentence("limited by per-operation overhead, which takes {part} of the time"),
    "link_s": Sentence("limited by the links"),
    "host_s": Sentence("limited by work between tokens, such as sampling"),
}


def device_name(device: str, *, begins: bool = False) -> str:
    """Return a device's name for use in sentences, such as "GPU 1" or "the CPU".

    Machines are counted from 1: "GPU 0 of machine 2".

    Args:
        begins: whether the name starts a sentence: "The CPU".
    """
    kind, _, number = local_id(device).partition(":")
    name = f"GPU {number}" if kind == "cuda" else Sentence("The CPU" if begins else "the CPU")
    if not machine_of(device):
        return name
    return Sentence("{device} of machine {n}", device=name, n=machine_of(device) + 1)


def rank_name(device: str, rank: int, ranks: Sequence[int], *, begins: bool = False) -> str:
    """Return a rank's name as shown in the split panel; `ranks` are all the ranks on its device."""
    if len(ranks) == 1:
        return device_name(device, begins=begins)
    if is_cpu(device) and not machine_of(device):
        return f"CPU {ranks.index(rank)}"
    name = device_name(device, begins=begins)
    return Sentence("{device} (rank {n})", device=name, n=rank)


def percent(part: float) -> str:
    """Return a fraction as a percentage, such as "45 %"."""
    return f"{100 * part:.0f} %"


def _scaled(times: T, factor: float) -> T:
    names = [spec.name for spec in fields(times) if spec.name.endswith("_s")]
    return replace(times, **{name: factor * getattr(times, name) for name in names})
