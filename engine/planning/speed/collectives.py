"""Predicted time of an all-reduce over some ranks: closed forms over the links of each pair.

Each is Hockney's model: a latency, and bytes over bandwidth (Parallel Computing 20, 1994). How
often a value crosses a link follows from the algorithm (Thakur, Rabenseifner and Gropp, Int. J.
High Perf. Computing Appl. 19, 2005), of which two are used:

- *one-shot all-reduce*: a kernel of each rank writes its whole value to every other one and adds up
  what arrives: n - 1 values out of each rank and as many in, one latency. Best for few bytes.
- *copies*: copy engines exchange the values (two ranks), or each rank adds up its slice of all
  values and gives the sum to all (three and more): 2 (n - 1) / n values out and in, but more
  latencies.

What pairs share counts once for all of them: a GPU's slot, its NVLinks, and host memory, through
which each byte goes twice where GPUs do not reach each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

from engine.hardware.devices.places import machine_of
from engine.model.forward.batch import MAX_IN_F32, MAX_ONE_SHOT
from engine.planning.speed.facts import LinkFacts, WireSpeed

How = Literal["lane", "copies", "threads", "machines"]
"""Algorithm of an all-reduce as JSON names it; "lane" is the one-shot all-reduce."""

Wire = Literal["F32", "BF16"]
"""Element type of what is exchanged."""

MOST_F32_BYTES = 4 * MAX_IN_F32
"""Largest value, in bytes of F32, that GPUs exchange as it is; larger ones go in BF16."""

MOST_ONE_SHOT_BYTES = 4 * MAX_ONE_SHOT
"""Largest value, in bytes of F32, that goes by a one-shot all-reduce."""

PACKET_FACTOR = 2.0
"""Bytes that a one-shot all-reduce sends for each byte of the value: every four have a mark of
four, by which a reader knows that they arrived. Measured all-reduces have it in their latency."""

PEER_S = 0.4e-6
"""Seconds for each rank after the second: others measured 3.7, 4.8 and 5.9 µs for all-reduces of a
few bytes over 2, 4 and 8 ranks with NVLink (sglang#2904)."""

COPY_S = 25e-6
"""Seconds of a stage of copies beside the latency: starting them, and events. An estimate: 39 and
81 µs were measured for NCCL's all-reduces of two ranks, without and with copies (sglang#39605)."""


class AllReduceTime(NamedTuple):
    """Predicted time of an all-reduce by one algorithm.

    Attributes:
        seconds: its time.
        how: the algorithm.
        wire: element type of what is exchanged.
    """

    seconds: float
    how: How
    wire: Wire


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """The links between some ranks.

    Attributes:
        n: number of ranks.
        has_cpu: whether one of them is on the CPU; then threads exchange F32 in host memory.
        peers: for each rank its links to the others, those of one route out of it together.
        n_by_host: number of pairs that exchange by host memory.
        host_bytes_per_s: bandwidth of host memory, read and written; 0 if unknown.
    """

    n: int
    has_cpu: bool
    peers: tuple[tuple[tuple[LinkFacts, ...], ...], ...]
    n_by_host: int = 0
    host_bytes_per_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """Latency of one all-reduce in seconds: the slowest pair plus polling each rank in turn."""
        slowest = max(link.latency_s for rank in self.peers for route in rank for link in route)
        return slowest + PEER_S * (self.n - 2)

    def exchange_s(self, n_bytes: float) -> float:
        """Return the seconds, beside latency, until each rank has `n_bytes` of every other one."""
        own = max(
            sum(link.payload_s(n_bytes) for link in route) for rank in self.peers for route in rank
        )
        if not self.host_bytes_per_s:
            return own
        return max(own, 4 * self.n_by_host * n_bytes / self.host_bytes_per_s)

    def one_shot_s(self, n_bytes: float) -> float:
        """Return the time of a one-shot all-reduce of `n_bytes`, in seconds."""
        return self.latency_s + self.exchange_s(n_bytes)

    def sliced_s(self, n_bytes: float, stage_s: float) -> float:
        """Return the time of an all-reduce of `n_bytes` in slices, in seconds.

        Each rank sums one slice and sends it to all; of two ranks each takes the other's value.

        Args:
            stage_s: seconds that each of the two exchanges takes beside its latency.
        """
        if self.n == 2:
            return stage_s + self.one_shot_s(n_bytes)
        return 2 * (stage_s + self.one_shot_s(n_bytes / self.n))


def all_reduce_times(group: LinkGroup, n_bytes: float) -> list[AllReduceTime]:
    """Return the algorithms for an all-reduce of `n_bytes` in F32, first the one that is used."""
    if group.has_cpu:
        threads = min(group.one_shot_s(n_bytes), group.sliced_s(n_bytes, 0.0))
        return [AllReduceTime(threads, "threads", "F32")]
    wire: Wire = "F32" if n_bytes <= MOST_F32_BYTES else "BF16"
    sent = n_bytes if wire == "F32" else n_bytes / 2
    copies = AllReduceTime(group.sliced_s(sent, COPY_S), "copies", wire)
    if n_bytes > MOST_ONE_SHOT_BYTES:
        return [copies]
    return [AllReduceTime(group.one_shot_s(PACKET_FACTOR * sent), "lane", wire), copies]


def by_route(links: Sequence[tuple[str, LinkFacts]]) -> tuple[tuple[LinkFacts, ...], ...]:
    """Group one rank's links by route: those of one route share its slot, or its NVLinks."""
    routes = dict.fromkeys(route for route, _ in links)
    return tuple(tuple(link for of, link in links if of == route) for route in routes)


MOST_AT_ONCE_BYTES = 4 << 14
"""Largest value, in bytes of F32, that machines exchange without telling its shape first (see
`engine.distributed.process_comm.MAX_AT_ONCE`)."""

LEAST_SLICED_BYTES = 4 << 16
"""Smallest value of which three or more machines sum a slice each (`MIN_SLICED` there)."""

EXCHANGE = 2
"""Latencies of an exchange that both sides begin at once."""

GIGABIT = LinkFacts(0.3e-3, 117e6, 4096)
"""Link of machines that is not named: Ethernet of 1 Gbit/s through a switch."""


class Wires:
    """The links between machines.

    Args:
        pairs: links by the numbers of two machines, in any order.
        other: link of pairs that are not named.
        measured: links that were measured; they count before `pairs`.
    """

    def __init__(
        self, pairs: Mapping[tuple[int, int], LinkFacts] | None = None, other: LinkFacts = GIGABIT,
        measured: Iterable[WireSpeed] = (),
    ) -> None:  # fmt: skip
        self._pairs = {_sorted(*pair): facts for pair, facts in (pairs or {}).items()}
        self._measured = {_sorted(one.a, one.b): one for one in measured}
        self._pairs |= {pair: one.facts for pair, one in self._measured.items()}
        self._other = other
        # where tokens go round, losses are noticed later: measured, see tests/bench/LOG.md
        self._is_ring = len({number for pair in self._measured for number in pair}) > 2

    def is_measured(self, a: int, b: int) -> bool:
        """Return whether the link between two machines was measured."""
        return _sorted(a, b) in self._measured

    def exchange_s(self, a: int, b: int) -> float:
        """Return the seconds until two machines have a short message that they send at once."""
        found = self._measured.get(_sorted(a, b))
        return EXCHANGE * self.between(a, b).latency_s if found is None else found.exchange_s

    def between(self, a: int, b: int) -> LinkFacts:
        """Return the link between two machines."""
        return self._pairs.get(_sorted(a, b), self._other)

    def order_s(self, machine: int, begun_s: float, *, waits: bool) -> float:
        """Return the seconds for which a pass waits until a machine knows of it.

        Orders go out at once, so others may compute meanwhile; a lost packet takes longer than
        that.

        Args:
            begun_s: seconds since the pass began.
            waits: whether the machine then waits for another one's tensor, and has to say so first.
        """
        link = self.between(0, machine)
        left = (EXCHANGE if waits else 1) * link.latency_s - begun_s
        return max(left, (2 if self._is_ring else 1) * self._stall_s(0, machine))

    def message_s(self, source: int, goals: Iterable[int], n_bytes: float) -> float:
        """Return the seconds of a message to machines that wait for it, in seconds."""
        far = [goal for goal in goals if goal != source]
        links = [self.between(source, goal) for goal in far]
        latency = max((link.latency_s for link in links), default=0.0)
        if self._is_ring:
            latency += max((self._stall_s(source, goal) for goal in far), default=0.0)
        return latency + sum(link.payload_s(n_bytes) for link in links)

    def _stall_s(self, a: int, b: int) -> float:
        """Return the mean seconds that a message waits for lost packets."""
        found = self._measured.get(_sorted(a, b))
        return 0.0 if found is None else found.stall_s

    def sum_s(self, devices: Sequence[str], n_bytes: float) -> float:
        """Return the seconds of an all-reduce between machines, beside those inside of them.

        Args:
            devices: devices of the ranks, on two machines or more.
            n_bytes: bytes of each rank's value in F32.
        """
        n_ranks = Counter(machine_of(device) for device in devices)
        pairs = list(combinations(n_ranks, 2))
        exchange = max(self.exchange_s(a, b) for a, b in pairs)
        is_short = len(n_ranks) == len(devices) and n_bytes <= MOST_AT_ONCE_BYTES
        n_exchanges = 1 if is_short else 2  # the first one tells shapes
        sent = n_bytes * max(n_ranks.values()) * (len(n_ranks) - 1)
        if len(n_ranks) == len(devices) > 2 and n_bytes >= LEAST_SLICED_BYTES:
            sent, n_exchanges = 2 * sent / len(n_ranks), 3
        slowest = max(self.between(a, b).payload_s(sent) for a, b in pairs)
        return n_exchanges * exchange + slowest


def _sorted(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a <= b else (b, a)
