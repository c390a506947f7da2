"""Search along one line: legal positions in order, each with a cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

GOLDEN = (5**0.5 - 1) / 2
"""Part of a bracket that is left after a step of the search."""


def minimise(cost: Callable[[int], float], n: int, start: int, step: int, least: int) -> int:
    """Return the position from 0 to n - 1 with the lowest cost that was found.

    From `start` the search goes downhill with growing steps until it has a bracket, and divides
    that until its parts are no longer than `least`. It asks for costs again, so these should be
    kept.

    Args:
        cost: returns the cost of a position; infinite where that is not possible.
        n: number of positions.
        step: first step.
        least: length of a bracket's parts at which the search ends.
    """
    low, best, high = _bracket(cost, n, start, step)
    while True:
        is_right = high - best >= best - low
        part = high - best if is_right else best - low
        if part <= least or part < 2:
            return best
        move = max(1, round((1 - GOLDEN) * part))
        probe = best + move if is_right else best - move
        if cost(probe) < cost(best):
            low, best, high = (best, probe, high) if is_right else (low, probe, best)
        elif is_right:
            high = probe
        else:
            low = probe


def _bracket(cost: Callable[[int], float], n: int, start: int, step: int) -> tuple[int, int, int]:
    """Return three positions in order of which the middle one is best, or an end of the line."""
    low, best, high = max(0, start - step), start, min(n - 1, start + step)
    if min(cost(low), cost(high)) >= cost(best):
        return low, best, high
    sign = -1 if cost(low) < cost(high) else 1
    behind, best = best, low if sign < 0 else high
    for ahead in _ahead(best, sign * step, n):
        if cost(ahead) >= cost(best):
            return (ahead, best, behind) if sign < 0 else (behind, best, ahead)
        behind, best = best, ahead
    return (best, best, behind) if sign < 0 else (behind, best, best)


def _ahead(position: int, step: int, n: int) -> Iterator[int]:
    """Yield positions further and further on, up to the end."""
    end = n - 1 if step > 0 else 0
    size = float(step)
    while position != end:
        size /= GOLDEN
        position = min(max(position + round(size), 0), n - 1)
        yield position


def ranges(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the first and last index of each run of true flags."""
    edges = [at for at, (a, b) in enumerate(pairwise([False, *flags, False])) if a != b]
    return [(first, stop - 1) for first, stop in zip(edges[::2], edges[1::2], strict=True)]
