"""Links between machines, and the time of exchanges that cross them.

A message takes the link's latency, and its bytes over the bandwidth. gloo sends a tensor once the
other side has said that it waits for it: who waits long before gets it after one latency, and two
that begin at once, as in an all-reduce, have each other's after two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from engine.devices.places import machine_of
from engine.planning.speed.facts import LinkFacts

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
    """

    def __init__(
        self, pairs: Mapping[tuple[int, int], LinkFacts] | None = None, other: LinkFacts = GIGABIT
    ) -> None:
        self._pairs = {_sorted(*pair): facts for pair, facts in (pairs or {}).items()}
        self._other = other

    def between(self, a: int, b: int) -> LinkFacts:
        """Return the link between two machines."""
        return self._pairs.get(_sorted(a, b), self._other)

    def order_s(self, machine: int, *, waits: bool) -> float:
        """Return the seconds of a pass before which a machine cannot begin its part.

        Args:
            waits: whether it then waits for another one's tensor, and has to say so first.
        """
        return (EXCHANGE if waits else 1) * self.between(0, machine).latency_s

    def message_s(self, source: int, goals: Iterable[int], n_bytes: float) -> float:
        """Return the seconds of a message to machines that wait for it, in seconds."""
        links = [self.between(source, goal) for goal in goals if goal != source]
        latency = max((link.latency_s for link in links), default=0.0)
        return latency + sum(link.payload_s(n_bytes) for link in links)

    def sum_s(self, devices: Sequence[str], n_bytes: float) -> float:
        """Return the seconds of an all-reduce between machines, beside those inside of them.

        Args:
            devices: devices of the ranks, on two machines or more.
            n_bytes: bytes of each rank's value in F32.
        """
        n_ranks = Counter(machine_of(device) for device in devices)
        links = [self.between(a, b) for a, b in combinations(n_ranks, 2)]
        latency = max(link.latency_s for link in links)
        is_short = len(n_ranks) == len(devices) and n_bytes <= MOST_AT_ONCE_BYTES
        n_exchanges = 1 if is_short else 2  # the first one tells shapes
        sent = n_bytes * max(n_ranks.values()) * (len(n_ranks) - 1)
        if len(n_ranks) == len(devices) > 2 and n_bytes >= LEAST_SLICED_BYTES:
            sent, n_exchanges = 2 * sent / len(n_ranks), 3
        slowest = max(link.payload_s(sent) for link in links)
        return n_exchanges * EXCHANGE * latency + slowest


def _sorted(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a <= b else (b, a)
