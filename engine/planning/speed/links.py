"""The links between all devices, and the time that all-reduces and moves take over them.

The time of an all-reduce is a closed formula over the links between its ranks, each described by
Hockney's model: latency plus bytes over bandwidth (Parallel Computing 20, 1994). How often a value
crosses a link depends on the algorithm (Thakur, Rabenseifner and Gropp, Int. J. High Perf.
Computing Appl. 19, 2005). There are two:

- *one-shot all-reduce*: a kernel on each rank writes its whole value to every peer and adds up the
  values that arrive. n - 1 values leave each rank and as many arrive, with a single latency. Best
  for few bytes.
- *copies*: copy engines exchange the values (two ranks), or each rank sums its slice of all values
  and sends the sum to all (three or more). 2 (n - 1) / n values leave and arrive, but there are
  more latencies.

Resources that pairs share count once: a GPU's slot, its NVLinks, and host memory, which each byte
crosses twice if there is no peer access.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple, TypeVar

from engine.hardware.devices.topology import Link, Pcie, Topology
from engine.hardware.devices.types import CPU, far_id, is_cpu, local_id, machine_of
from engine.model.forward.batch import MAX_IN_F32, MAX_ONE_SHOT
from engine.planning.speed.device_specs import pcie_bytes_per_s
from engine.planning.speed.facts import LinkFacts, WireSpeed

How = Literal["lane", "copies", "threads", "machines"]
"""Algorithm of an all-reduce, as named in JSON; "lane" is the one-shot all-reduce."""

Wire = Literal["F32", "BF16"]
"""Element type on the wire."""

MAX_F32_BYTES = 4 * MAX_IN_F32
"""Largest value, in F32 bytes, that GPUs exchange in F32; larger ones are sent in BF16."""

MAX_ONE_SHOT_BYTES = 4 * MAX_ONE_SHOT
"""Largest value, in F32 bytes, for a one-shot all-reduce."""

PACKET_FACTOR = 2.0
"""Bytes that a one-shot all-reduce sends per byte of the value: every four bytes come with a
four-byte flag that signals their arrival. In measured all-reduces, the latency includes this."""

PEER_S = 0.4e-6
"""Seconds per rank beyond the second: published all-reduces of a few bytes over 2, 4 and 8 ranks
with NVLink take 3.7, 4.8 and 5.9 µs (sglang#2904)."""

COPY_S = 25e-6
"""Seconds that a stage of copies takes on top of the latency, for launches and events. An estimate:
NCCL's all-reduces over two ranks took 39 µs without copies and 81 µs with them (sglang#39605)."""


class AllReduceTime(NamedTuple):
    """Predicted seconds of an all-reduce with one algorithm."""

    seconds: float
    how: How
    wire: Wire


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """The links between a group of ranks.

    Attributes:
        has_cpu: whether any of the ranks is on the CPU; threads then exchange F32 in host memory.
        peers: for each rank, its links to the others, grouped by route.
        n_by_host: number of pairs that exchange through host memory.
        host_bytes_per_s: bandwidth of host memory, reads plus writes; 0 if unknown.
    """

    n: int
    has_cpu: bool
    peers: tuple[tuple[tuple[LinkFacts, ...], ...], ...]
    n_by_host: int = 0
    host_bytes_per_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """Latency of an all-reduce in seconds: that of the slowest pair, plus polling each peer."""
        slowest = max(link.latency_s for rank in self.peers for route in rank for link in route)
        return slowest + PEER_S * (self.n - 2)

    def exchange_s(self, n_bytes: float) -> float:
        """Return the seconds, latency excluded, until each rank has `n_bytes` from every peer."""
        own = max(
            sum(link.payload_s(n_bytes) for link in route) for rank in self.peers for route in rank
        )
        if not self.host_bytes_per_s:
            return own
        return max(own, 4 * self.n_by_host * n_bytes / self.host_bytes_per_s)

    def one_shot_s(self, n_bytes: float) -> float:
        """Return the seconds that a one-shot all-reduce of `n_bytes` takes."""
        return self.latency_s + self.exchange_s(n_bytes)

    def sliced_s(self, n_bytes: float, stage_s: float) -> float:
        """Return the seconds that an all-reduce of `n_bytes` in slices takes.

        Each rank sums one slice and sends it to all; two ranks exchange whole values.

        Args:
            stage_s: seconds that each of the two exchanges takes on top of its latency.
        """
        if self.n == 2:
            return stage_s + self.one_shot_s(n_bytes)
        return 2 * (stage_s + self.one_shot_s(n_bytes / self.n))


def all_reduce_times(group: LinkGroup, n_bytes: float) -> list[AllReduceTime]:
    """Return the algorithms for an all-reduce of `n_bytes` in F32; the first is the one used."""
    if group.has_cpu:
        threads = min(group.one_shot_s(n_bytes), group.sliced_s(n_bytes, 0.0))
        return [AllReduceTime(threads, "threads", "F32")]
    wire: Wire = "F32" if n_bytes <= MAX_F32_BYTES else "BF16"
    sent = n_bytes if wire == "F32" else n_bytes / 2
    copies = AllReduceTime(group.sliced_s(sent, COPY_S), "copies", wire)
    if n_bytes > MAX_ONE_SHOT_BYTES:
        return [copies]
    return [AllReduceTime(group.one_shot_s(PACKET_FACTOR * sent), "lane", wire), copies]


def by_route(links: Sequence[tuple[str, LinkFacts]]) -> tuple[tuple[LinkFacts, ...], ...]:
    """Group one rank's links by route: links on one route share the rank's slot or NVLinks."""
    routes = dict.fromkeys(route for route, _ in links)
    return tuple(tuple(link for of, link in links if of == route) for route in routes)


MAX_AT_ONCE_BYTES = 4 << 14
"""Largest value, in F32 bytes, that machines exchange without a header round (see
`engine.distributed.process_comm.MAX_AT_ONCE`)."""

MIN_SLICED_BYTES = 4 << 16
"""Smallest value that three or more machines sum in slices, one each (`MIN_SLICED` there)."""

EXCHANGE = 2
"""Latencies per simultaneous exchange."""

GIGABIT = LinkFacts(0.3e-3, 117e6, 4096)
"""Default link between machines: Ethernet of 1 Gbit/s through a switch."""


class Wires:
    """The links between machines.

    Args:
        pairs: links keyed by two machine numbers, in either order.
        other: link for all other pairs.
        measured: measured links, which override those in `pairs`.
    """

    def __init__(
        self, pairs: Mapping[tuple[int, int], LinkFacts] | None = None, other: LinkFacts = GIGABIT,
        measured: Iterable[WireSpeed] = (),
    ) -> None:  # fmt: skip
        self._pairs = {_ordered(*pair): facts for pair, facts in (pairs or {}).items()}
        self._measured = {_ordered(one.a, one.b): one for one in measured}
        self._pairs |= {pair: one.facts for pair, one in self._measured.items()}
        self._other = other
        # in a token ring, losses are noticed later, as measured (tests/bench/log)
        self._is_ring = len({number for pair in self._measured for number in pair}) > 2

    def is_measured(self, a: int, b: int) -> bool:
        """Return whether the link between two machines was measured."""
        return _ordered(a, b) in self._measured

    def exchange_s(self, a: int, b: int) -> float:
        """Return the seconds that two machines take to exchange short messages simultaneously."""
        found = self._measured.get(_ordered(a, b))
        return EXCHANGE * self.between(a, b).latency_s if found is None else found.exchange_s

    def between(self, a: int, b: int) -> LinkFacts:
        """Return the link between two machines."""
        return self._pairs.get(_ordered(a, b), self._other)

    def order_s(self, machine: int, begun_s: float, *, waits: bool) -> float:
        """Return how long a pass waits until a machine has received its command, in seconds.

        Commands are sent immediately, so they may arrive while other machines compute; waiting
        for a lost packet takes longer than that.

        Args:
            begun_s: seconds since the pass started.
            waits: whether the machine must first announce that it is waiting for a tensor.
        """
        link = self.between(0, machine)
        left = (EXCHANGE if waits else 1) * link.latency_s - begun_s
        return max(left, (2 if self._is_ring else 1) * self._stall_s(0, machine))

    def message_s(self, source: int, targets: Iterable[int], n_bytes: float) -> float:
        """Return the seconds that a message takes to reach the machines waiting for it."""
        far = [target for target in targets if target != source]
        links = [self.between(source, target) for target in far]
        latency = max((link.latency_s for link in links), default=0.0)
        if self._is_ring:
            latency += max((self._stall_s(source, target) for target in far), default=0.0)
        return latency + sum(link.payload_s(n_bytes) for link in links)

    def _stall_s(self, a: int, b: int) -> float:
        found = self._measured.get(_ordered(a, b))
        return 0.0 if found is None else found.stall_s

    def sum_s(self, devices: Sequence[str], n_bytes: float) -> float:
        """Return the seconds that an all-reduce takes between machines, but not within them.

        Args:
            devices: devices of the ranks, on at least two machines.
            n_bytes: size of each rank's value in F32, in bytes.
        """
        n_ranks = Counter(machine_of(device) for device in devices)
        pairs = list(combinations(n_ranks, 2))
        exchange = max(self.exchange_s(a, b) for a, b in pairs)
        is_short = len(n_ranks) == len(devices) and n_bytes <= MAX_AT_ONCE_BYTES
        n_exchanges = 1 if is_short else 2  # the first one announces shapes
        sent = n_bytes * max(n_ranks.values()) * (len(n_ranks) - 1)
        if len(n_ranks) == len(devices) > 2 and n_bytes >= MIN_SLICED_BYTES:
            sent, n_exchanges = 2 * sent / len(n_ranks), 3
        slowest = max(self.between(a, b).payload_s(sent) for a, b in pairs)
        return n_exchanges * exchange + slowest


def _ordered(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a <= b else (b, a)


V = TypeVar("V")


class Links:
    """The links between the devices of one or several machines.

    Args:
        pairs: links keyed by two ids in either order; equal ids mean ranks on the same device.
        other: link for all other pairs.
        ways: route of each pair, such as "nvlink" or "host"; one device's pairs on the same route
            share its bandwidth.
        host_bytes_per_s: bandwidth of host memory, reads plus writes, which pairs on the route
            "host" share; 0 if unknown.
    """

    def __init__(
        self, pairs: Mapping[tuple[str, str], LinkFacts], other: LinkFacts | None = None,
        ways: Mapping[tuple[str, str], str] | None = None, host_bytes_per_s: float = 0.0,
        wires: Wires | None = None,
    ) -> None:  # fmt: skip
        self.wires = wires or Wires()
        self._pairs = {_sorted(pair): facts for pair, facts in pairs.items()}
        self._other = other or HOST_STAGED
        self._routes = {_sorted(pair): route for pair, route in (ways or {}).items()}
        self._host_bytes_per_s = host_bytes_per_s
        self._groups: dict[tuple[str, ...], LinkGroup] = {}
        self._sums: dict[tuple[tuple[str, ...], float], list[AllReduceTime]] = {}

    @classmethod
    def of_machines(cls, machines: Sequence[Links], wires: Wires) -> Links:
        """Return the links of several machines, given each one's links with local ids."""
        found = cls({}, wires=wires)
        for number, links in enumerate(machines):
            found._pairs |= _renamed(links._pairs, number)
            found._routes |= _renamed(links._routes, number)
        # that of the slowest host memory, as there is only one value for all machines
        rates = [links._host_bytes_per_s for links in machines]
        found._host_bytes_per_s = min(rates, default=0.0)
        return found

    def on_machine(self, number: int) -> Links:
        """Return the links of one machine, keyed by its local device ids."""

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
        """Return the links between the ranks on `devices`, of which there are at least two."""
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
        """Return the algorithms for an all-reduce over `devices`; the first is the one used."""
        if len(devices) < 2:
            return []
        key = tuple(devices), n_bytes
        found = self._sums.get(key)
        if found is None:
            if len(self._sums) >= MAX_KNOWN:
                self._sums.clear()
            found = self._sums[key] = self._sum_times(devices, n_bytes)
        return found

    def _sum_times(self, devices: Sequence[str], n_bytes: float) -> list[AllReduceTime]:
        inside = _by_machine(devices)
        if len(inside) == 1:
            return all_reduce_times(self.group(devices), n_bytes)
        seconds = self.wires.sum_s(devices, n_bytes)
        seconds += max(self.all_reduce_s(ids, n_bytes) for ids in inside.values())
        return [AllReduceTime(seconds, "machines", "F32")]

    def move_s(self, source: str, targets: Sequence[str], n_bytes: float) -> float:
        """Return the seconds it takes to move `n_bytes` from one rank's device to others.

        Each other machine receives the bytes once and distributes them.
        """
        machines = _by_machine(targets)
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
        """Return the seconds that an all-reduce takes with the algorithm in use; see `sums`."""
        found = self.sums(devices, n_bytes)
        return found[0].seconds if found else 0.0


def _renamed(values: Mapping[tuple[str, str], V], number: int) -> dict[tuple[str, str], V]:
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


MAX_KNOWN = 1 << 12
"""Maximum number of cached all-reduces; consecutive splits during a drag share them."""

SHARED_MEMORY = LinkFacts(11e-6, 3e9, 32 << 10)
"""Link between ranks that are threads on one CPU: 2 × 2048 numbers in 11 µs (tests/bench/log)."""

HOST_STAGED = LinkFacts(13e-6, 13e9)
"""Link between GPUs through host memory; an estimate until it is measured."""

ON_ONE_GPU = LinkFacts(4e-6, 200e9)
"""Link between ranks on one GPU, whose kernels exchange data in its memory; an estimate."""


NVLINK_BYTES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Bytes/s of one NVLink in one direction, by version (NVIDIA's data sheets)."""

NVLINK_EFFICIENCY = 0.8
"""Fraction of NVLink's bandwidth that exchanges reach."""

HOST_PART = 0.5
"""Fraction of a slot's bandwidth left if each byte goes up and down again: 12.5 of 26 GB/s."""

USUAL_SLOT = Pcie(4, 16, 4, 16)
"""Slot assumed if the driver reports none."""


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Expected speed of a class of links.

    Attributes:
        latency_s: seconds that an all-reduce of a few numbers takes.
        part: fraction of the slot's bandwidth; 0 if independent of it.
        bytes_per_s: bandwidth that does not depend on the slot.
        covered_bytes: bytes sent within the latency.
    """

    latency_s: float
    part: float = 0.0
    bytes_per_s: float = 0.0
    covered_bytes: float = 0.0

    def facts(self, slot_bytes_per_s: float) -> LinkFacts:
        """Return the facts of a link, given the bandwidth of the slower of its two slots."""
        rate = self.bytes_per_s or self.part * slot_bytes_per_s
        return LinkFacts(self.latency_s, rate, self.covered_bytes)


CLASSES: Mapping[str, LinkClass] = {
    "nvlink": LinkClass(6e-6, bytes_per_s=45e9),
    "p2p": LinkClass(6e-6, 1.0),
    "host": LinkClass(13e-6, HOST_PART),
    "shm": LinkClass(40e-6, bytes_per_s=1.9e9, covered_bytes=64 << 10),
}
"""Link classes by name, fastest first; NVLink's bandwidth depends on the number of links. "shm"
is as slow as NCCL through shared memory, which takes 37 µs for 32 KiB and 38.5 µs for 64 KiB on
eight GPUs (nccl#922)."""


def nvlink_facts(bytes_per_s: float) -> LinkFacts:
    """Return the facts of NVLinks with this total bandwidth per direction."""
    return LinkFacts(CLASSES["nvlink"].latency_s, NVLINK_EFFICIENCY * bytes_per_s)


def link_facts(link: Link, pcie: Mapping[str, Pcie]) -> LinkFacts:
    """Return the expected facts of a link reported by the driver, given each device's slot."""
    if link.kind == "nvlink":
        return nvlink_facts(link.n_nvlink * NVLINK_BYTES.get(link.nvlink_version, 25e9))
    slots = [slot_bytes_per_s(pcie.get(device, USUAL_SLOT)) for device in (link.a, link.b)]
    return CLASSES[link.kind].facts(min(slots))


def slot_bytes_per_s(slot: Pcie) -> float:
    """Return a slot's maximum bandwidth in bytes/s; while its GPU is idle, it may run slower."""
    generation = slot.max_generation or slot.generation or USUAL_SLOT.generation
    return pcie_bytes_per_s(generation, slot.width or slot.max_width or USUAL_SLOT.width)


def expected_links(
    topology: Topology, measured: Mapping[tuple[str, str], LinkFacts] | None = None
) -> Links:
    """Return all links of a machine, measured if available, otherwise as expected."""
    pairs = {(link.a, link.b): link_facts(link, topology.pcie) for link in topology.links}
    host = {
        (device, CPU): LinkFacts(CLASSES["host"].latency_s, slot_bytes_per_s(slot))
        for device, slot in topology.pcie.items()
    }
    routes = {(link.a, link.b): link.kind for link in topology.links}
    return Links({**pairs, **host, (CPU, CPU): SHARED_MEMORY, **(measured or {})}, ways=routes)
