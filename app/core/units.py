"""Number formatting for display."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from app.core.translation import tr, tr_later, tr_n

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

SPOKEN: Final = {
    "B": tr_later("bytes"), "KiB": tr_later("kibibytes"), "MiB": tr_later("mebibytes"),
    "GiB": tr_later("gibibytes"),
}  # fmt: skip
"""Units as a screen reader pronounces them."""


def decimal(number: str) -> str:
    """Return a number with the decimal separator of the window's language."""
    return number.replace(".", tr("0.5", "shows the decimal sign")[1])


def size_text(n_bytes: float) -> str:
    """Format a size: "13.3 GiB", "214 MiB", "1.2 MiB", "32 KiB", "512 B", "0 MiB"."""
    size = abs(n_bytes)
    if size >= GIB:
        return decimal(f"{n_bytes / GIB:.1f} GiB")
    if size >= 10 * MIB or size == 0:
        return f"{n_bytes / MIB:.0f} MiB"
    if size >= MIB:
        return decimal(f"{n_bytes / MIB:.1f} MiB")
    return f"{n_bytes / KIB:.0f} KiB" if size >= KIB else f"{n_bytes:.0f} B"


def decimal_size(n_bytes: int) -> str:
    """Format a file size in decimal units, as file managers and websites do."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= size:
            return decimal(f"{n_bytes / size:.1f} {unit}")
    return f"{n_bytes} B"


def spoken_size(n_bytes: float) -> str:
    """Format a size for a screen reader: "13.3 gibibytes"."""
    number, unit = size_text(n_bytes).split()
    return f"{number} {tr(SPOKEN[unit])}"


def use_text(used: float, total: float, free: float) -> str:
    """Format a device's memory use: "13.3 of 24.0 GiB · 9.6 free", or "… · 1.8 GiB short"."""
    if free < 0:
        text = tr("{used} of {total} · {short} short")
        return text.format(used=size_text(used), total=size_text(total), short=size_text(-free))
    text = tr("{used} of {total} · {free} free")
    if used >= GIB and total >= GIB:
        total_text = decimal(f"{total / GIB:.1f} GiB")
        used_text, free_text = decimal(f"{used / GIB:.1f}"), decimal(f"{free / GIB:.1f}")
        return text.format(used=used_text, total=total_text, free=free_text)
    return text.format(used=size_text(used), total=size_text(total), free=size_text(free))


def percent_text(share: float) -> str:
    """Format a fraction as a percentage without its sign: "45.8"."""
    return decimal(f"{100 * share:.1f}")


def signed_percent_text(ratio: float) -> str:
    """Format a deviation: "+1.2 %", "−0.4 %" or "0.0 %"; from 10 % on, "+34 %"."""
    percent = abs(100 * ratio)
    text = f"{percent:.1f}" if percent < 10 else f"{percent:.0f}"
    if float(text) == 0:
        return decimal(f"{text} %")
    text = decimal(f"{text} %")
    return ("+" if ratio > 0 else "−") + text


def context_text(n_tokens: int) -> str:
    """Format a context length: "512", "4k" or "128k"."""
    return f"{n_tokens // 1024}k" if n_tokens >= 1024 and n_tokens % 1024 == 0 else str(n_tokens)


def rate_text(per_s: float) -> str:
    """Format tokens per second with at least three digits: "6.25", "61.8", "1240", "29 650"."""
    if per_s >= 100:
        return _grouped(per_s) if per_s >= 10000 else f"{per_s:.0f}"
    return decimal(f"{per_s:.1f}" if per_s >= 10 else f"{per_s:.2f}")


def tokens_text(n_tokens: int) -> str:
    """Format a token count with digit grouping: "53 760 tokens"."""
    return tr("{n} tokens").format(n=_grouped(n_tokens))


def _grouped(number: float) -> str:
    return f"{number:,.0f}".replace(",", "\u202f")


SPEED_S = 6.0  # averaging window for the speed, in seconds


@dataclass(slots=True)
class TransferProgress:
    """Progress of a download.

    Attributes:
        n_bytes: number of bytes on disk.
        bytes_per_s: speed over the last `SPEED_S` seconds.
        is_checking: whether the checksum is being verified.
    """

    n_bytes: int = 0
    bytes_per_s: float = 0.0
    is_checking: bool = False
    seen: deque[tuple[float, int]] = field(default_factory=deque)

    def note(self, n_bytes: int, *, is_checking: bool) -> None:
        """Update the number of bytes."""
        now = time.monotonic()
        self.n_bytes, self.is_checking = n_bytes, is_checking
        self.seen.append((now, n_bytes))
        while now - self.seen[0][0] > SPEED_S:
            self.seen.popleft()
        seconds, grown = now - self.seen[0][0], n_bytes - self.seen[0][1]
        self.bytes_per_s = grown / seconds if seconds > 0.2 and not is_checking else 0.0


def amount_text(n_bytes: int, total_bytes: int) -> str:
    """Format progress: "1.2 GB of 4.9 GB"."""
    text = tr("{done} of {total}")
    return text.format(done=decimal_size(n_bytes), total=decimal_size(total_bytes))


def moving_text(progress: TransferProgress, total_bytes: int) -> str:
    """Format progress: "1.2 GB of 4.9 GB · 35.0 MB/s · 2 min left"."""
    amount, rate = amount_text(progress.n_bytes, total_bytes), progress.bytes_per_s
    if rate < 1:
        return tr("{amount} · waiting for data").format(amount=amount)
    left = left_text((total_bytes - progress.n_bytes) / rate)
    return f"{amount} · {decimal_size(int(rate))}/s · {left}"


def left_text(seconds: float) -> str:
    """Format a remaining time in its largest useful unit."""
    if seconds < 60:
        return tr_n("{n} s left", "{n} s left", max(round(seconds), 1))
    if seconds < 3600:
        return tr_n("{n} min left", "{n} min left", round(seconds / 60))
    return tr("{n} h left").format(n=decimal(f"{seconds / 3600:.1f}"))


def drafts_text(n_accepted: int, n_drafted: int, gain: float) -> str:
    """Return "7 of 9 draft tokens accepted, 2.1× as fast"; "" if none was accepted.

    Args:
        gain: speedup over decoding without drafts; 1 if unknown.
    """
    if not n_accepted:
        return ""
    text = tr("{n} of {total} draft tokens accepted").format(n=n_accepted, total=n_drafted)
    times = f"{gain:.1f}"
    if times == "1.0":
        return text
    speed = tr("{n}× as fast").format(n=decimal(times))
    return f"{text}, {speed}"
