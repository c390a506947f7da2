"""Links between machines, and the time of exchanges that cross them.

A message takes the link's latency, and its bytes over the bandwidth. gloo sends a tensor once the
other side has said that it waits for it: who waits long before gets it after one latency, and two
that begin at once, as in an all-reduce, have each other's after two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from engine.hardware.devices.places import machine_of
from engine.planning.speed.facts import LinkFacts, WireSpeed

MOST_AT_ONCE_BYTES = 4 << 14
"""Largest value, in bytes of F32, that machines exchange without telling its shape first (see
`engine.distributed.process_comm.MOST_AT_ONCE`)."""

LEAST_SLICED_BYTES = 4 << 16
"""Smallest value of which three or more machines sum a slice each (`LEAST_SLICED` there)."""

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
