"""What is known of devices and of what connects them: speeds are predicted from these numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from engine.planning.speed.collectives import Group, SumTime, by_way, sums

CPU = "cpu"

CACHE = "KV"
"""The kind of what is read of the cache, in `DeviceFacts.rates`."""


@dataclass(frozen=True, slots=True)
class WeightRate:
    """How fast a device multiplies with weights of one kind.

    Attributes:
        bytes_per_s: of weights, as held, for one token.
        thread_bytes_per_s: the same by one thread of a CPU.
        flop_per_s: multiplications and additions for many tokens at once.
    """

    bytes_per_s: float
    thread_bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What one device can do.

    Attributes:
        device: its id; ranks with the same one share it.
        bytes_per_s: reading weights that nothing else is known of, and keys and values.
        flop_per_s: products of matrices for many tokens.
        op_s: what each matrix costs a token beside its bytes: starting, ending, and the small steps
            between matrices.
        routed_op_s: the same in a block whose tokens go to different experts.
        host_s: between two tokens: sampling, Python.
        n_threads: of a CPU, all of them; 0 for a GPU.
        thread_bytes_per_s: `bytes_per_s` of one of them; 0 where there are none.
        unpack_bytes: memory traffic for each quantised weight and batch of a prompt, where matrices
            are dequantised before they are multiplied.
        cache_part: of `bytes_per_s`, at which keys and values are read.
        rates: by kind of weights.
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
        """How fast it is with weights of a kind, or with the cache."""
        known = self.rates.get(kind)
        if known is not None:
            return known
        part = self.cache_part if kind == CACHE else 1.0
        one = self.thread_bytes_per_s or self.bytes_per_s
        return WeightRate(part * self.bytes_per_s, part * one, self.flop_per_s)


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What connects two devices: Hockney's model (Parallel Computing 20, 1994).

    Attributes:
        latency_s: of a sum over the two, or of a move from one to the other, of very few bytes.
        bytes_per_s: of what is sent, in one direction, while the other is in use as well.
        covered_bytes: so many are sent within the latency.
    """

    latency_s: float
    bytes_per_s: float
    covered_bytes: float = 0.0

    def payload_s(self, n_bytes: float) -> float:
        """Seconds of some bytes beside the latency."""
        return max(0.0, n_bytes - self.covered_bytes) / self.bytes_per_s


class Links:
    """What connects the devices of a machine.

    Args:
        pairs: by two ids in any order; the same id twice is for ranks that share a device.
        other: for pairs that are not named.
        ways: how pairs reach each other, such as "nvlink" or "host": of one device, those by the
            same way share it.
        host_bytes_per_s: of the host's memory, read and written, which pairs by way of "host"
            share; 0 where nobody knows.
    """

    def __init__(
        self,
        pairs: Mapping[tuple[str, str], LinkFacts],
        other: LinkFacts | None = None,
        ways: Mapping[tuple[str, str], str] | None = None,
        host_bytes_per_s: float = 0.0,
    ) -> None:
        self._pairs = {_sorted(pair): facts for pair, facts in pairs.items()}
        self._other = other or HOST_STAGED
        self._ways = {_sorted(pair): way for pair, way in (ways or {}).items()}
        self._host_bytes_per_s = host_bytes_per_s
        self._groups: dict[tuple[str, ...], Group] = {}
        self._sums: dict[tuple[tuple[str, ...], float], list[SumTime]] = {}

    def between(self, a: str, b: str) -> LinkFacts:
        """The link of two devices."""
        known = self._pairs.get((a, b) if a <= b else (b, a))
        if known is not None:
            return known
        if a == b:
            return SHARED_MEMORY if a == CPU else ON_ONE_GPU
        return self._other

    def way(self, a: str, b: str) -> str:
        """How two devices reach each other; "" where nobody says."""
        return self._ways.get(_sorted((a, b)), "")

    def group(self, devices: Sequence[str]) -> Group:
        """The links between two ranks or more."""
        ids = tuple(devices)
        found = self._groups.get(ids)
        if found is None:
            found = self._groups[ids] = self._make_group(ids)
        return found

    def _make_group(self, ids: tuple[str, ...]) -> Group:
        peers = []
        for rank, a in enumerate(ids):
            others = [*ids[:rank], *ids[rank + 1 :]]
            peers.append(by_way([(self.way(a, b), self.between(a, b)) for b in others]))
        n_by_host = sum(self.way(*pair) == "host" for pair in combinations(ids, 2))
        return Group(len(ids), CPU in ids, tuple(peers), n_by_host, self._host_bytes_per_s)

    def sums(self, devices: Sequence[str], n_bytes: float) -> list[SumTime]:
        """The ways to make a sum that all ranks on `devices` get, first the one that is used.

        Args:
            n_bytes: of what each rank has, in F32.
        """
        if len(devices) < 2:
            return []
        key = tuple(devices), n_bytes
        found = self._sums.get(key)
        if found is None:
            if len(self._sums) >= MOST_SUMS:
                self._sums.clear()
            found = self._sums[key] = sums(self.group(devices), n_bytes)
        return found

    def all_reduce_s(self, devices: Sequence[str], n_bytes: float) -> float:
        """Seconds of such a sum as it is made; see `sums`."""
        found = self.sums(devices, n_bytes)
        return found[0].seconds if found else 0.0


def _sorted(pair: tuple[str, str]) -> tuple[str, str]:
    a, b = pair
    return (a, b) if a <= b else (b, a)


MOST_SUMS = 1 << 12
"""Sums that are remembered: a split that is dragged has the same ones all the time."""

SHARED_MEMORY = LinkFacts(11e-6, 3e9, 32 << 10)
"""Ranks that are threads on one CPU: 2 × 2048 numbers in 11 µs; see tests/bench/LOG.md."""

HOST_STAGED = LinkFacts(13e-6, 13e9)
"""GPUs that reach each other by way of the host's memory: an estimate until it is measured."""

ON_ONE_GPU = LinkFacts(4e-6, 200e9)
"""Ranks that share a GPU exchange in its memory, by kernels: an estimate."""
