"""From one cut of units to another: who gets what from whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.sharding.ranges import Ranges

Segments = tuple[Ranges, ...]
"""What a rank holds: its interval of the first, then of the second, and so on."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring units that one rank gets from another one.

    Attributes:
        source: the rank that has them.
        start: of the first, among the units of that rank.
        goal: of the first, among the units of the rank that gets them.
        n: how many.
    """

    source: int
    start: int
    goal: int
    n: int


def runs(old: Segments, new: Segments, rank: int, sources: Sequence[int]) -> list[Run]:
    """Where `rank` of the cut `new` finds its units among the ranks of `old`.

    Units that several ranks of `old` have are taken once.

    Args:
        sources: the ranks of `old`, those that are asked first in front.
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
    """The cut in which a single rank has all units, each once."""
    return tuple(Ranges(((0, segment.total),), segment.total) for segment in cut)


@dataclass(frozen=True, slots=True)
class Move:
    """Something that is brought to its new places in one go.

    Attributes:
        adds: bytes that each device takes for it before anything is freed.
        drops: bytes that each device gives back afterwards.
    """

    adds: Mapping[str, int]
    drops: Mapping[str, int]


def next_move(
    moves: Sequence[Move], held: Mapping[str, int], spare: Mapping[str, int],
    limits: Mapping[str, int],
) -> int:  # fmt: skip
    """Which of the moves leaves the fullest device the most room.

    What devices pass to each other is then passed in turn, so that none ever holds much more than
    it does before or after all moves.

    Args:
        held: bytes on each device.
        spare: how many of them can be freed at any time.
        limits: what each device should hold at most.
    """

    def excess(move: Move) -> int:
        return max(
            held[device] + move.adds.get(device, 0) - spare.get(device, 0) - limit
            for device, limit in limits.items()
        )

    return min(range(len(moves)), key=lambda index: excess(moves[index]))
