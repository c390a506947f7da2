"""Ranks that others wait for in vain: who they are, within seconds, and never one that computes.

A rank may well compute for minutes while others wait for it. So time alone tells nothing: a rank
counts as stalled when nothing at all has come from it for a few seconds (`parallel.liveness`),
and from no other one either that still has something to do, for it may be one of these that holds
it up.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Protocol

from engine.errors import CommError
from engine.parallel.liveness import Life

SILENT_S = 3.5
"""Seconds without a sign of life after which a rank that is waited for has stalled."""

LOOK_S = 0.2
"""Seconds between two looks. A longer gap counts as two of them: then this process stood still."""

LONGEST_S = 300.0
"""Seconds without any collective after which a rank has stalled that does show signs of life.

Every block has collectives, and none takes so long; a rank without end does.
"""


class Meetings(Protocol):
    """What the ranks of a pool tell about each other, see `parallel.thread_comm.ThreadGroup`."""

    @property
    def n_passed(self) -> int:
        """Collectives of all ranks so far."""
        ...

    def waiting(self) -> Mapping[int, Collection[int]]:
        """The ranks that wait for others now, and for which ones."""
        ...

    def is_alive(self, rank: int) -> bool | None:
        """Whether a rank's device does something; None where its threads tell."""
        ...

    def device(self, rank: int) -> str:
        """The device of a rank; "" if it is not known."""
        ...


class Watch:
    """Looks at the ranks of a pool during one job, every `LOOK_S` or so."""

    def __init__(self, meetings: Meetings, lives: Mapping[int, Life]) -> None:
        self._meetings = meetings
        self._lives = lives
        self._looked = self._passed_at = time.perf_counter()
        self._n_passed = -1
        self._silent_s: dict[int, float] = {}
        self._stuck_s = 0.0

    def look(self, busy: Collection[int]) -> CommError | None:
        """What is wrong, if anything is; `busy` are the ranks that have not ended."""
        waiting = self._meetings.waiting()
        working = [rank for rank in busy if rank not in waiting]
        step = self._step(working)
        if not working:
            self._stuck_s += step
            return self._unreached(busy, waiting) if self._stuck_s >= SILENT_S else None
        self._stuck_s = 0.0
        if all(self._silent_s[rank] >= SILENT_S for rank in working):
            return self.error(working, f"shown no sign of life for {SILENT_S:g} seconds")
        if waiting and self._since_passed_s() >= LONGEST_S:
            return self.error(working, f"reached no other rank for {LONGEST_S:.0f} seconds")
        return None

    def is_silent(self, rank: int) -> bool:
        """Whether there has been no sign of a rank for long; to be asked after a look."""
        return self._silent_s.get(rank, 0.0) >= SILENT_S

    def error(self, ranks: Collection[int], what: str) -> CommError:
        """An error that names ranks.

        Args:
            what: they have done, behind "has" or "have".
        """
        first, *others = ranks
        named = [f"{self._meetings.device(rank)} (rank {rank})".lstrip() for rank in others]
        verb = f"and {' and '.join(named)} have" if named else "has"
        return CommError(first, f"{verb} {what}", self._meetings.device(first))

    def look_at(self, ranks: Collection[int]) -> None:
        """Only see whether there are signs of ranks."""
        self._step(ranks)

    def _step(self, ranks: Collection[int]) -> float:
        """Count how long ranks have been silent; returns the seconds since the last look."""
        now = time.perf_counter()
        step, self._looked = min(now - self._looked, 2 * LOOK_S), now
        self._silent_s = {
            rank: 0.0 if self._shows_life(rank) else self._silent_s.get(rank, 0.0) + step
            for rank in ranks
        }
        return step

    def _shows_life(self, rank: int) -> bool:
        has_moved = rank in self._lives and self._lives[rank].has_moved()
        is_alive = self._meetings.is_alive(rank)
        return has_moved if is_alive is None else is_alive

    def _since_passed_s(self) -> float:
        now, n_passed = time.perf_counter(), self._meetings.n_passed
        if n_passed != self._n_passed:
            self._n_passed, self._passed_at = n_passed, now
        return now - self._passed_at

    def _unreached(
        self, busy: Collection[int], waiting: Mapping[int, Collection[int]]
    ) -> CommError:
        """All who have not ended wait: for one that has, or for each other."""
        awaited = sorted({rank for missing in waiting.values() for rank in missing})
        gone = [rank for rank in awaited if rank not in busy] or awaited or sorted(busy)
        return self.error(gone, "not come to where other ranks wait")
