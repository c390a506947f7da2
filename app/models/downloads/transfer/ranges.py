"""Ranges of bytes of a file: what has arrived, and what is still missing."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]
"""First byte, and the one behind the last."""

Ranges = tuple[Range, ...]
"""Ranges in order that neither touch nor overlap."""


def merged(ranges: Iterable[Range]) -> Ranges:
    """Return the same bytes in as few ranges as possible, in order."""
    found: list[Range] = []
    for start, end in sorted(pair for pair in ranges if pair[0] < pair[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return tuple(found)


def gaps(ranges: Ranges, start: int, end: int) -> Ranges:
    """Return what `ranges` leave of the bytes from `start` to `end`."""
    found = []
    for first, behind in ranges:
        if behind <= start or first >= end:
            continue
        if first > start:
            found.append((start, first))
        start = behind
    if start < end:
        found.append((start, end))
    return tuple(found)


def n_bytes(ranges: Iterable[Range]) -> int:
    """Return the number of bytes in all."""
    return sum(end - start for start, end in ranges)
