"""Measurement of the links between machines, by messages as passes send them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations
from statistics import fmean, median

import torch
from torch import Tensor

from engine.distributed.orders import Orders
from engine.distributed.wire import Wire
from engine.planning.speed.facts import MESSAGE_BYTES, WireSpeed

LEAST_ROUNDS, MOST_ROUNDS = 30, 2000
"""Bounds of the number of messages that are sent there and back."""

USUAL_S, LONGEST_S = 0.2, 4.0
"""Seconds of sending messages, and the most where single ones are slow: that is rare, so it takes
many to know how rare. Exchanges get half of it."""

MOST_S = 9.0
"""Seconds for all links together: until then nobody hears of this process."""

SLOW = 4.0
"""Times the median from which a message counts as slow, such as after a lost packet."""

FIRST_BYTES, MOST_BYTES = 64 << 10, 32 << 20
"""Bytes of the first large tensor, and the most of one; each is four times as large as the last."""

LARGE_S = 0.3
"""Seconds in which large tensors are sent; the fastest counts, as one lost packet may stop another
for longer than all of it takes."""

END, EXCHANGE = -1, -2
"""Numbers in a message that mean the end, and that both sides send some more at once."""

N_EXCHANGES = 8
"""Number of these: the next one begins where the last one has left both sides."""

FIRST_TOO_SLOW = 3
"""Number of messages that do not count: the first ones find threads asleep."""


def measure_wires(wire: Wire) -> tuple[WireSpeed, ...]:
    """Return the speed of the link between each two machines; all of them call it at once.

    One link is measured after the other, for some tenths of a second each.

    Raises:
        CommError: a process is gone.
    """
    orders, found = Orders(wire), list[WireSpeed]()
    pairs = list(combinations(range(len(wire.peers)), 2))
    for a, b in pairs:
        mine = None
        if wire.rank == a:
            mine = _Caller(wire, b, MOST_S / len(pairs)).measured()
        elif wire.rank == b:
            _answer(wire, a)
        found.append(WireSpeed(a, b, *orders.told(mine)[a]))
    return tuple(found)


class _Caller:
    """The side of a measurement that sends first, and says what is sent.

    Args:
        most_s: seconds that it may take in all.
    """

    def __init__(self, wire: Wire, other: int, most_s: float) -> None:
        self._wire, self._other = wire, other
        self._most_s = most_s
        self._message = torch.zeros(MESSAGE_BYTES // 8, dtype=torch.int64)

    def measured(self) -> tuple[float, float, float, float]:
        """Return median and mean of the latency, bytes per second, and the mean of exchanges."""
        times = self._times(lambda: self._round_s() / 2, min(LONGEST_S, self._most_s / 2))
        exchanges = self._times(self._exchange_s, min(LONGEST_S / 2, self._most_s / 4))
        middle = median(times)
        n, spent, fastest = FIRST_BYTES, 0.0, 0.0
        while n <= MOST_BYTES and spent < min(LARGE_S, self._most_s / 4):
            seconds = self._large_s(n)
            fastest = max(fastest, n / max(seconds - 2 * middle, seconds / 2))
            spent += seconds
            n *= 4
        self._send(END)
        return middle, fmean(times), fastest, fmean(exchanges)

    def _times(self, measure: Callable[[], float], longest_s: float) -> list[float]:
        """Return the seconds of each of many messages, for at most some seconds."""
        times = list[float]()
        begun = time.perf_counter()
        while len(times) < MOST_ROUNDS:
            times.append(measure())
            spent, n = time.perf_counter() - begun, len(times) - FIRST_TOO_SLOW
            wanted_s = longest_s if _is_uneven(times) else min(USUAL_S, longest_s)
            if spent > longest_s or (n >= LEAST_ROUNDS and spent > wanted_s):
                break
        return times[FIRST_TOO_SLOW:] or times

    def _round_s(self) -> float:
        """Return the seconds of a message and its answer."""
        begun = time.perf_counter()
        self._send(0)
        self._wire.swap([], [(self._other, self._message)])
        return time.perf_counter() - begun

    def _exchange_s(self) -> float:
        """Return the mean seconds of some messages both ways at once, one after the other."""
        self._send(EXCHANGE)
        self._wire.swap([], [(self._other, self._message)])
        begun = time.perf_counter()
        _exchange(self._wire, self._other, self._message)
        return (time.perf_counter() - begun) / N_EXCHANGES

    def _large_s(self, n_bytes: int) -> float:
        """Return the seconds of a large tensor and the answer to it."""
        self._send(n_bytes)
        x = torch.zeros(n_bytes, dtype=torch.uint8)
        begun = time.perf_counter()
        self._wire.swap([(self._other, x)], [])
        self._wire.swap([], [(self._other, self._message)])
        return time.perf_counter() - begun

    def _send(self, n_bytes: int) -> None:
        """Send a message: how many bytes follow it, or what else does."""
        self._message[0] = n_bytes
        self._wire.swap([(self._other, self._message)], [])


def _is_uneven(times: list[float]) -> bool:
    """Return whether single messages were much slower than most."""
    return max(times[FIRST_TOO_SLOW:], default=0.0) > SLOW * median(times)


def _answer(wire: Wire, caller: int) -> None:
    """Answer what the other side of a measurement sends, until its end."""
    message: Tensor = torch.zeros(MESSAGE_BYTES // 8, dtype=torch.int64)
    while True:
        wire.swap([], [(caller, message)])
        n_bytes = int(message[0])
        if n_bytes == END:
            return
        if n_bytes > 0:
            wire.swap([], [(caller, torch.empty(n_bytes, dtype=torch.uint8))])
        wire.swap([(caller, message)], [])
        if n_bytes == EXCHANGE:
            _exchange(wire, caller, message)


def _exchange(wire: Wire, other: int, message: Tensor) -> None:
    """Send messages and receive as many, as ranks do in one all-reduce after the other."""
    for _ in range(N_EXCHANGES):
        wire.swap([(other, message)], [(other, torch.empty_like(message))])
