"""The links between all devices of a machine, and what sums over some of them take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from engine.devices.types import CPU
from engine.planning.speed.collectives import LinkGroup, SumTime, by_way, sums
from engine.planning.speed.facts import LinkFacts


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
        self._groups: dict[tuple[str, ...], LinkGroup] = {}
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

    def group(self, devices: Sequence[str]) -> LinkGroup:
        """The links between two ranks or more."""
        ids = tuple(devices)
        found = self._groups.get(ids)
        if found is None:
            found = self._groups[ids] = self._make_group(ids)
        return found

    def _make_group(self, ids: tuple[str, ...]) -> LinkGroup:
        peers = []
        for rank, a in enumerate(ids):
            others = [*ids[:rank], *ids[rank + 1 :]]
            peers.append(by_way([(self.way(a, b), self.between(a, b)) for b in others]))
        n_by_host = sum(self.way(*pair) == "host" for pair in combinations(ids, 2))
        return LinkGroup(len(ids), CPU in ids, tuple(peers), n_by_host, self._host_bytes_per_s)

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
