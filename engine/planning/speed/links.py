"""The links between all devices, and the time of all-reduces over some of them and of moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from engine.hardware.devices.topology import Link, Pcie, Topology
from engine.hardware.devices.types import CPU, far_id, is_cpu, local_id, machine_of
from engine.planning.speed.collectives import (
    AllReduceTime,
    LinkGroup,
    Wires,
    all_reduce_times,
    by_route,
)
from engine.planning.speed.device_specs import pcie_bytes_per_s
from engine.planning.speed.facts import LinkFacts

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


NVLINK_BYTES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Bytes/s of one NVLink in one direction, by version (NVIDIA's data sheets)."""

NVLINK_EFFICIENCY = 0.8
"""Part of NVLink's bandwidth that exchanges reach."""

HOST_PART = 0.5
"""Part of a slot's bandwidth left where each byte goes up and down again: 12.5 of 26 GB/s."""

USUAL_SLOT = Pcie(4, 16, 4, 16)
"""Slot of a GPU about which the driver says nothing."""


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Expected speed of one class of links.

    Attributes:
        latency_s: seconds of an all-reduce of few numbers.
        part: part of the slot's bandwidth; 0 where that does not matter.
        bytes_per_s: bandwidth where the slot's does not matter, in bytes/s.
        covered_bytes: bytes that are sent within the latency.
    """

    latency_s: float
    part: float = 0.0
    bytes_per_s: float = 0.0
    covered_bytes: float = 0.0

    def facts(self, slot_bytes_per_s: float) -> LinkFacts:
        """Return the facts of a link between devices whose slower slot has this bandwidth."""
        rate = self.bytes_per_s or self.part * slot_bytes_per_s
        return LinkFacts(self.latency_s, rate, self.covered_bytes)


CLASSES: Mapping[str, LinkClass] = {
    "nvlink": LinkClass(6e-6, bytes_per_s=45e9),
    "p2p": LinkClass(6e-6, 1.0),
    "host": LinkClass(13e-6, HOST_PART),
    "shm": LinkClass(40e-6, bytes_per_s=1.9e9, covered_bytes=64 << 10),
}
"""Link classes by name, the fastest first; NVLink's bandwidth depends on the number of links. "shm"
is as slow as NCCL through shared memory: 37 and 38.5 µs for 32 and 64 KiB and eight GPUs
(nccl#922)."""


def nvlink_facts(bytes_per_s: float) -> LinkFacts:
    """Return the facts of NVLinks that together have this bandwidth in one direction."""
    return LinkFacts(CLASSES["nvlink"].latency_s, NVLINK_EFFICIENCY * bytes_per_s)


def link_facts(link: Link, pcie: Mapping[str, Pcie]) -> LinkFacts:
    """Return the expected facts of a link that the driver reports.

    Args:
        link: the link.
        pcie: slots by device.
    """
    if link.kind == "nvlink":
        return nvlink_facts(link.n_nvlink * NVLINK_BYTES.get(link.nvlink_version, 25e9))
    slots = [slot_bytes_per_s(pcie.get(device, USUAL_SLOT)) for device in (link.a, link.b)]
    return CLASSES[link.kind].facts(min(slots))


def slot_bytes_per_s(slot: Pcie) -> float:
    """Return a slot's largest bandwidth in bytes/s: the slot of an idle GPU may run slower."""
    generation = slot.max_generation or slot.generation or USUAL_SLOT.generation
    return pcie_bytes_per_s(generation, slot.width or slot.max_width or USUAL_SLOT.width)


def expected_links(
    topology: Topology, measured: Mapping[tuple[str, str], LinkFacts] | None = None
) -> Links:
    """Return all links of a machine, with expected facts where they were not measured."""
    pairs = {(link.a, link.b): link_facts(link, topology.pcie) for link in topology.links}
    host = {
        (device, CPU): LinkFacts(CLASSES["host"].latency_s, slot_bytes_per_s(slot))
        for device, slot in topology.pcie.items()
    }
    routes = {(link.a, link.b): link.kind for link in topology.links}
    return Links({**pairs, **host, (CPU, CPU): SHARED_MEMORY, **(measured or {})}, ways=routes)
