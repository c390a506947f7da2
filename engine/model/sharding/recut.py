"""Plans the change from one cut of units to another: which rank gets which units from which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.model.sharding.ranges import Ranges

Segments = tuple[Ranges, ...]
"""Cuts of several segments; a rank holds its interval of the first, then of the second, ..."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of adjacent units that one rank gets from another.

    Attributes:
        source: rank that has the units.
        start: index of the first one among the units of the source.
        goal: index of the first one among the units of the receiving rank.
        n: number of units.
    """

    source: int
    start: int
    goal: int
    n: int


def runs(old: Segments, new: Segments, rank: int, sources: Sequence[int]) -> list[Run]:
    """Return from where among the ranks of `old` each unit of `rank` in `new` comes.

    Units that several ranks of `old` have are taken from one of them.

    Args:
        sources: ranks of `old` in order of preference.
    """
    found: list[Run] = []
    goal = 0
    for index, (was, now) in enumerate(zip(old, new, strict=True)):
        at, stop = now.spans[rank]
        while at < stop:
            source = next(r for r in sources if was.spans[r][0] <= at < was.spans[r][1])
            first, last = was.spans[source]
            before = sum(segment.size(source) for segment in old[:index])
            n = min(stop, last) - at
            found.append(Run(source, before + at - first, goal, n))
            at, goal = at + n, goal + n
    return found


def as_one(cut: Segments) -> Segments:
    """Return the cut in which a single rank has all units, each once."""
    return tuple(Ranges(((0, segment.total),), segment.total) for segment in cut)


@dataclass(frozen=True, slots=True)
class Move:
    """A change of places that is made in one go, with the memory it takes.

    Attributes:
        adds: bytes to allocate on each device before anything is freed.
        drops: bytes to free on each device afterwards.
    """

    adds: Mapping[str, int]
    drops: Mapping[str, int]


def next_move(
    moves: Sequence[Move], held: Mapping[str, int], spare: Mapping[str, int],
    limits: Mapping[str, int],
) -> int:  # fmt: skip
    """Return the index of the move that leaves the fullest device the most room.

    With it, devices hand parts to each other in turn, and none ever holds much more than it does
    before or after all moves.

    Args:
        held: bytes held on each device.
        spare: bytes of these that can be freed at any time.
        limits: bytes that each device should hold at most.
    """

    def excess(move: Move) -> int:
        return max(
            held[device] + move.adds.get(device, 0) - spare.get(device, 0) - limit
            for device, limit in limits.items()
        )

    return min(range(len(moves)), key=lambda index: excess(moves[index]))
