"""Numbers formatted for people."""

from __future__ import annotations

from typing import Final

from app.core.translation import tr, tr_later

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

SPOKEN: Final = {
    "B": tr_later("bytes"), "KiB": tr_later("kibibytes"), "MiB": tr_later("mebibytes"),
    "GiB": tr_later("gibibytes"),
}  # fmt: skip
"""Units of memory as a screen reader says them."""


def decimal(number: str) -> str:
    """Return a number of digits and a point with the decimal sign of the window's language."""
    return number.replace(".", tr("0.5", "shows the decimal sign")[1])


def size_text(n_bytes: float) -> str:
    """Return bytes with a unit: "13.3 GiB", "214 MiB", "1.2 MiB", "32 KiB", "512 B", "0 MiB"."""
    size = abs(n_bytes)
    if size >= GIB:
        return decimal(f"{n_bytes / GIB:.1f} GiB")
    if size >= 10 * MIB or size == 0:
        return f"{n_bytes / MIB:.0f} MiB"
    if size >= MIB:
        return decimal(f"{n_bytes / MIB:.1f} MiB")
    return f"{n_bytes / KIB:.0f} KiB" if size >= KIB else f"{n_bytes:.0f} B"


def decimal_size(n_bytes: int) -> str:
    """Return a file's size in decimal units, as file managers and download pages count."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= size:
            return decimal(f"{n_bytes / size:.1f} {unit}")
    return f"{n_bytes} B"


def spoken_size(n_bytes: float) -> str:
    """Return bytes for a screen reader: "13.3 gibibytes"."""
    number, unit = size_text(n_bytes).split()
    return f"{number} {tr(SPOKEN[unit])}"


def use_text(used: float, total: float, free: float) -> str:
    """Return a device's use: "13.3 of 24.0 GiB · 9.6 free"; negative `free` is "1.8 short"."""
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
    """Return a share of 0 to 1 as "45.8"."""
    return decimal(f"{100 * share:.1f}")


def signed_percent_text(ratio: float) -> str:
    """Return a deviation as "+1.2 %", "−0.4 %" or "0.0 %"; from 10 % on as "+34 %"."""
    percent = abs(100 * ratio)
    text = f"{percent:.1f}" if percent < 10 else f"{percent:.0f}"
    if float(text) == 0:
        return decimal(f"{text} %")
    text = decimal(f"{text} %")
    return ("+" if ratio > 0 else "−") + text


def context_text(n_tokens: int) -> str:
    """Return a context length as "512", "4k" or "128k"."""
    return f"{n_tokens // 1024}k" if n_tokens >= 1024 and n_tokens % 1024 == 0 else str(n_tokens)


def rate_text(per_s: float) -> str:
    """Return tokens per second with three digits or all: "6.25", "61.8", "1240", "29 650"."""
    if per_s >= 100:
        return _grouped(per_s) if per_s >= 10000 else f"{per_s:.0f}"
    return decimal(f"{per_s:.1f}" if per_s >= 10 else f"{per_s:.2f}")


def tokens_text(n_tokens: int) -> str:
    """Return a number of tokens with grouped digits: "53 760 tokens"."""
    return tr("{n} tokens").format(n=_grouped(n_tokens))


def _grouped(number: float) -> str:
    return f"{number:,.0f}".replace(",", "\u202f")
