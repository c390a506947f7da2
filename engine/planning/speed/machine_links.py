"""The links between all devices, and the time of all-reduces over some of them and of moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TypeVar

from engine.hardware.devices.places import far_id, is_cpu, local_id, machine_of
from engine.planning.speed.collectives import AllReduceTime, LinkGroup, all_reduce_times, by_route
from engine.planning.speed.facts import LinkFacts
from engine.planning.speed.wires import Wires

V = TypeVar("V")


class Links:
    """The links between the devices of one machine, or of several.

    Args:
        pairs: links by two ids in any order; the same id twice is for ranks that share a device.
        other: link of pairs that are not named.
        ways: routes of pairs, such as "nvlink" or "host": one device's pairs by the same route
            share its bandwidth.
        host_bytes_per_s: bandwidth of host memory, read and written, which pairs by "host" share;
            0 if unknown.
        wires: links between machines.

    Attributes:
        wires: links between machines.
    """

    def __init__(
        self,
        pairs: Mapping[tuple[str, str], LinkFacts],
        other: LinkFacts | None = None,
        ways: Mapping[tuple[str, str], str] | None = None,
        host_bytes_per_s: float = 0.0,
        wires: Wires | None = None,
    ) -> None:
        self.wires = wires or Wires()
        self._pairs = {_sorted(pair): facts for pair, facts in pairs.items()}
        self._other = other or HOST_STAGED
        self._routes = {_sorted(pair): route for pair, route in (ways or {}).items()}
        self._host_bytes_per_s = host_bytes_per_s
        self._groups: dict[tuple[str, ...], LinkGroup] = {}
        self._sums: dict[tuple[tuple[str, ...], float], list[AllReduceTime]] = {}

    @classmethod
    def of_machines(cls, machines: Sequence[Links], wires: Wires) -> Links:
        """Return the links of several machines, given those of each with the ids it has there."""
        found = cls({}, wires=wires)
        for number, links in enumerate(machines):
            found._pairs |= _renamed(links._pairs, number)
            found._routes |= _renamed(links._routes, number)
        # the smallest, as pairs by "host" share that of their machine
        rates = [links._host_bytes_per_s for links in machines]
        found._host_bytes_per_s = min(rates, default=0.0)
        return found

    def on_machine(self, number: int) -> Links:
        """Return the links of one machine, with the ids that devices have there."""

        def own(values: Mapping[tuple[str, str], V]) -> dict[tuple[str, str], V]:
            return {
                (local_id(a), local_id(b)): value
                for (a, b), value in values.items()
                if machine_of(a) == machine_of(b) == number
            }

        return Links(own(self._pairs), self._other, own(self._routes), self._host_bytes_per_s)

    def between(self, a: str, b: str) -> LinkFacts:
        """Return the link between two devices."""
        known = self._pairs.get((a, b) if a <= b else (b, a))
        if known is not None:
            return known
        if machine_of(a) != machine_of(b):
            return self.wires.between(machine_of(a), machine_of(b))
        if a == b:
            return SHARED_MEMORY if is_cpu(a) else ON_ONE_GPU
        return self._other

    def way(self, a: str, b: str) -> str:
        """Return the route between two devices, such as "nvlink"; "" if unknown."""
        return self._routes.get(_sorted((a, b)), "")

    def group(self, devices: Sequence[str]) -> LinkGroup:
        """Return the links between two or more ranks, given their devices."""
        ids = tuple(devices)
        found = self._groups.get(ids)
        if found is None:
            found = self._groups[ids] = self._make_group(ids)
        return found

    def _make_group(self, ids: tuple[str, ...]) -> LinkGroup:
        peers = []
        for rank, a in enumerate(ids):
            others = [*ids[:rank], *ids[rank + 1 :]]
            peers.append(by_route([(self.way(a, b), self.between(a, b)) for b in others]))
        n_by_host = sum(self.way(*pair) == "host" for pair in combinations(ids, 2))
        return LinkGroup(
            len(ids), any(map(is_cpu, ids)), tuple(peers), n_by_host, self._host_bytes_per_s
        )

    def sums(self, devices: Sequence[str], n_bytes: float) -> list[AllReduceTime]:
        """Return the algorithms for an all-reduce over ranks on `devices`, first the one used.

        Args:
            n_bytes: bytes of each rank's value in F32.
        """
        if len(devices) < 2:
            return []
        key = tuple(devices), n_bytes
        found = self._sums.get(key)
        if found is None:
            if len(self._sums) >= MOST_KNOWN:
                self._sums.clear()
            found = self._sums[key] = self._sum_times(devices, n_bytes)
        return found

    def _sum_times(self, devices: Sequence[str], n_bytes: float) -> list[AllReduceTime]:
        """Return the algorithms for an all-reduce; between machines there is one."""
        inside = _by_machine(devices)
        if len(inside) == 1:
            return all_reduce_times(self.group(devices), n_bytes)
        seconds = self.wires.sum_s(devices, n_bytes)
        seconds += max(self.all_reduce_s(ids, n_bytes) for ids in inside.values())
        return [AllReduceTime(seconds, "machines", "F32")]

    def move_s(self, source: str, goals: Sequence[str], n_bytes: float) -> float:
        """Return the time of a move of `n_bytes` from one rank's device to others', in seconds.

        To each other machine it goes once, and is passed on there.
        """
        machines = _by_machine(goals)
        here = machines.pop(machine_of(source), [])
        links = [self.between(source, device) for device in here]
        seconds = max((link.latency_s for link in links), default=0.0)
        seconds += sum(link.payload_s(n_bytes) for link in links)
        if machines:
            seconds += self.wires.message_s(machine_of(source), machines, n_bytes)
            inside = (self.move_s(ids[0], ids[1:], n_bytes) for ids in machines.values())
            seconds += max(inside)
        return seconds

    def all_reduce_s(self, devices: Sequence[str], n_bytes: float) -> float:
        """Return the time of an all-reduce as it is made, in seconds; see `sums`."""
        found = self.sums(devices, n_bytes)
        return found[0].seconds if found else 0.0


def _renamed(values: Mapping[tuple[str, str], V], number: int) -> dict[tuple[str, str], V]:
    """Return values of pairs by the ids that all machines know."""
    far = {(far_id(number, a), far_id(number, b)): value for (a, b), value in values.items()}
    return {_sorted(pair): value for pair, value in far.items()}


def _by_machine(devices: Sequence[str]) -> dict[int, list[str]]:
    """Return devices by the number of their machine."""
    found: dict[int, list[str]] = {}
    for device in devices:
        found.setdefault(machine_of(device), []).append(device)
    return found


def _sorted(pair: tuple[str, str]) -> tuple[str, str]:
    a, b = pair
    return (a, b) if a <= b else (b, a)


MOST_KNOWN = 1 << 12
"""Most all-reduces that are kept: a split that is dragged has the same ones all the time."""

SHARED_MEMORY = LinkFacts(11e-6, 3e9, 32 << 10)
"""Link of ranks that are threads on one CPU: 2 × 2048 numbers in 11 µs; see tests/bench/LOG.md."""

HOST_STAGED = LinkFacts(13e-6, 13e9)
"""Link of GPUs that reach each other by host memory: an estimate until it is measured."""

ON_ONE_GPU = LinkFacts(4e-6, 200e9)
"""Link of ranks that share a GPU, where kernels exchange in its memory: an estimate."""
