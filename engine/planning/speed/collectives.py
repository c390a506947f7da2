"""What a sum takes that all ranks of a group get: closed forms over the links of each pair.

Every way is Hockney's: a latency, and bytes over bandwidth (Parallel Computing 20, 1994). How often
a value crosses a link follows from the algorithm (Thakur, Rabenseifner and Gropp, Int. J. High
Perf. Computing Appl. 19, 2005), of which two are used:

- *one-shot all-reduce*: a kernel of each rank writes the whole value for every other one and adds
  up what it finds: n - 1 values out of each rank and as many in, one latency. That pays for few
  bytes.
- *copies*: copy engines exchange halves (two ranks), or each rank adds up its slice of all values
  and gives the sum to all (three and more): 2 (n - 1) / n values out and in, but more latencies.

What pairs share counts once for all of them: a GPU's slot, its NVLinks, and the memory of the host,
through which each byte goes twice where GPUs do not reach each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from engine.planning.speed.facts import LinkFacts

How = Literal["lane", "copies", "threads"]
Wire = Literal["F32", "BF16"]

MOST_F32_BYTES = 32 << 10
"""Of a value in F32: up to here GPUs exchange it as it is, beyond that in BF16."""

MOST_ONE_SHOT_BYTES = 256 << 10
"""Of the largest values in F32 that go by one-shot all-reduces."""

PACKET_FACTOR = 2.0
"""Bytes that a one-shot all-reduce sends for each one: every four have a mark of four, by which a
reader knows them. Sums of ranks that were measured have it within their latency."""

PEER_S = 0.4e-6
"""For each rank after the second: 3.7, 4.8 and 5.9 µs were measured by others for sums of 2, 4 and
8 ranks over NVLink, of a few bytes (sglang#2904)."""

COPY_S = 25e-6
"""What a stage of copies costs beside the latency: starting them, and events. An estimate: 39 and
81 µs were measured for NCCL's sums of two ranks, without and with copies (sglang#39605)."""


class SumTime(NamedTuple):
    """One way to add up.

    Attributes:
        wire: the type of what is exchanged.
    """

    seconds: float
    how: How
    wire: Wire


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """The links between some ranks.

    Attributes:
        n: of ranks.
        has_cpu: one of them is the CPU; then their threads exchange F32 in the host's memory.
        peers: of each rank, in groups that share a way out of it: its links to the others.
        n_by_host: pairs that exchange by way of the host's memory.
        host_bytes_per_s: which that gives and takes in all; 0 where nobody knows.
    """

    n: int
    has_cpu: bool
    peers: tuple[tuple[tuple[LinkFacts, ...], ...], ...]
    n_by_host: int = 0
    host_bytes_per_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """Of the slowest pair, and of one rank after the other that is looked for."""
        slowest = max(link.latency_s for rank in self.peers for way in rank for link in way)
        return slowest + PEER_S * (self.n - 2)

    def exchange_s(self, n_bytes: float) -> float:
        """Until every rank has so many bytes of every other one, beside the latency."""
        own = max(
            sum(link.payload_s(n_bytes) for link in way) for rank in self.peers for way in rank
        )
        if not self.host_bytes_per_s:
            return own
        return max(own, 4 * self.n_by_host * n_bytes / self.host_bytes_per_s)

    def one_shot_s(self, n_bytes: float) -> float:
        """Of values of so many bytes: all at once."""
        return self.latency_s + self.exchange_s(n_bytes)

    def sliced_s(self, n_bytes: float, stage_s: float) -> float:
        """The same in slices, each summed by one rank; of two ranks each takes the other's whole.

        Args:
            stage_s: what each of the two exchanges costs more than its latency.
        """
        if self.n == 2:
            return stage_s + self.one_shot_s(n_bytes)
        return 2 * (stage_s + self.one_shot_s(n_bytes / self.n))


def sums(group: LinkGroup, n_bytes: float) -> list[SumTime]:
    """The ways to add up values of so many bytes in F32, first the one that is used."""
    if group.has_cpu:
        threads = min(group.one_shot_s(n_bytes), group.sliced_s(n_bytes, 0.0))
        return [SumTime(threads, "threads", "F32")]
    wire: Wire = "F32" if n_bytes <= MOST_F32_BYTES else "BF16"
    sent = n_bytes if wire == "F32" else n_bytes / 2
    copies = SumTime(group.sliced_s(sent, COPY_S), "copies", wire)
    if n_bytes > MOST_ONE_SHOT_BYTES:
        return [copies]
    return [SumTime(group.one_shot_s(PACKET_FACTOR * sent), "lane", wire), copies]


def by_way(links: Sequence[tuple[str, LinkFacts]]) -> tuple[tuple[LinkFacts, ...], ...]:
    """One rank's links, those of one way together: they share its slot, or its NVLinks."""
    ways = dict.fromkeys(way for way, _ in links)
    return tuple(tuple(link for of, link in links if of == way) for way in ways)
