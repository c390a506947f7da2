"""How far something is that is fetched from the network, and how long the rest takes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from app.core.translation import tr, tr_n
from app.core.units import decimal, decimal_size

SPEED_S = 6.0
"""Time in seconds over which the speed is averaged."""


@dataclass(slots=True)
class TransferProgress:
    """The state of something that is fetched: how much is there, and how fast more comes.

    Attributes:
        n_bytes: bytes that are on the disk.
        bytes_per_s: speed of the last seconds.
        is_checking: whether a file is being compared with its hash.
    """

    n_bytes: int = 0
    bytes_per_s: float = 0.0
    is_checking: bool = False
    seen: deque[tuple[float, int]] = field(default_factory=deque)

    def note(self, n_bytes: int, *, is_checking: bool) -> None:
        """Take a new number of bytes."""
        now = time.monotonic()
        self.n_bytes, self.is_checking = n_bytes, is_checking
        self.seen.append((now, n_bytes))
        while now - self.seen[0][0] > SPEED_S:
            self.seen.popleft()
        seconds, grown = now - self.seen[0][0], n_bytes - self.seen[0][1]
        self.bytes_per_s = grown / seconds if seconds > 0.2 and not is_checking else 0.0


def amount_text(n_bytes: int, total_bytes: int) -> str:
    """Return how much of something is there: "1.2 GB of 4.9 GB"."""
    text = tr("{done} of {total}")
    return text.format(done=decimal_size(n_bytes), total=decimal_size(total_bytes))


def moving_text(progress: TransferProgress, total_bytes: int) -> str:
    """Return how it goes on: "1.2 GB of 4.9 GB · 35.0 MB/s · 2 min left"."""
    amount, rate = amount_text(progress.n_bytes, total_bytes), progress.bytes_per_s
    if rate < 1:
        return tr("{amount} · waiting for data").format(amount=amount)
    left = left_text((total_bytes - progress.n_bytes) / rate)
    return f"{amount} · {decimal_size(int(rate))}/s · {left}"


def left_text(seconds: float) -> str:
    """Return how long something still takes, in the largest unit that tells enough."""
    if seconds < 60:
        return tr_n("{n} s left", "{n} s left", max(round(seconds), 1))
    if seconds < 3600:
        return tr_n("{n} min left", "{n} min left", round(seconds / 60))
    return tr("{n} h left").format(n=decimal(f"{seconds / 3600:.1f}"))
