"""Watchdog of a model's ranks: finds hung ranks within seconds, and never one that computes.

A rank may well compute for minutes while others wait for it, so time alone tells nothing. A rank
counts as hung when it has shown no sign of life for a few seconds (`parallel.liveness`), and no
other rank that still has work to do has shown any either: that one may be holding it up.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Protocol

from engine.errors import CommError
from engine.parallel.liveness import Life

SILENT_S = 3.5
"""Seconds without a sign of life after which a rank that is waited for counts as hung."""

LOOK_S = 0.2
"""Seconds between two looks. A longer gap counts as two looks: the process itself stood still."""

LONGEST_S = 300.0
"""Seconds without any collective after which a rank counts as hung though it shows signs of life.

Every block of a model has collectives and takes far less; only an endless loop takes longer.
"""


class Meetings(Protocol):
    """State of the collectives that the watchdog reads; see `parallel.thread_comm.ThreadGroup`."""

    @property
    def n_collectives(self) -> int:
        """Number of collectives of all ranks so far."""
        ...

    def waiting(self) -> Mapping[int, Collection[int]]:
        """Return the ranks that wait now, each with the ranks it waits for."""
        ...

    def is_alive(self, rank: int) -> bool | None:
        """Return whether a rank's device is at work; None if its threads' CPU time shows it."""
        ...

    def device(self, rank: int) -> str:
        """Return the name of a rank's device; "" if it is not known."""
        ...


class Watch:
    """Watchdog of one job of the ranks, asked about every `LOOK_S`.

    Args:
        meetings: state of the ranks' collectives.
        lives: activity of each rank's threads, by rank.
    """

    def __init__(self, meetings: Meetings, lives: Mapping[int, Life]) -> None:
        self._meetings = meetings
        self._lives = lives
        self._looked = self._collective_at = time.perf_counter()
        self._n_collectives = -1
        self._silent_s: dict[int, float] = {}
        self._stuck_s = 0.0

    def look(self, busy: Collection[int]) -> CommError | None:
        """Return an error if ranks hang, else None.

        Args:
            busy: ranks that have not ended the job.
        """
        waiting = self._meetings.waiting()
        working = [rank for rank in busy if rank not in waiting]
        step = self._step(working)
        if not working:
            self._stuck_s += step
            return self._unreached(busy, waiting) if self._stuck_s >= SILENT_S else None
        self._stuck_s = 0.0
        if all(self._silent_s[rank] >= SILENT_S for rank in working):
            return self.error(working, f"shown no sign of life for {SILENT_S:g} seconds")
        if waiting and self._since_collective_s() >= LONGEST_S:
            return self.error(working, f"reached no other rank for {LONGEST_S:.0f} seconds")
        return None

    def is_silent(self, rank: int) -> bool:
        """Return whether a rank had shown no sign of life for `SILENT_S` at the last look."""
        return self._silent_s.get(rank, 0.0) >= SILENT_S

    def error(self, ranks: Collection[int], what: str) -> CommError:
        """Return an error that names ranks.

        Args:
            ranks: the ranks; the first one is the error's rank.
            what: what they have done or not, as the words after "has" or "have".
        """
        first, *others = ranks
        named = [f"{self._meetings.device(rank)} (rank {rank})".lstrip() for rank in others]
        verb = f"and {' and '.join(named)} have" if named else "has"
        return CommError(first, f"{verb} {what}", self._meetings.device(first))

    def look_at(self, ranks: Collection[int]) -> None:
        """Look for signs of life of ranks without judging them."""
        self._step(ranks)

    def _step(self, ranks: Collection[int]) -> float:
        """Add up how long ranks have been silent; return the seconds since the last look."""
        now = time.perf_counter()
        step, self._looked = min(now - self._looked, 2 * LOOK_S), now
        self._silent_s = {
            rank: 0.0 if self._shows_life(rank) else self._silent_s.get(rank, 0.0) + step
            for rank in ranks
        }
        return step

    def _shows_life(self, rank: int) -> bool:
        """Return whether a rank has shown a sign of life since the last look."""
        has_moved = rank in self._lives and self._lives[rank].has_moved()
        is_alive = self._meetings.is_alive(rank)
        return has_moved if is_alive is None else is_alive

    def _since_collective_s(self) -> float:
        """Return the seconds since any collective was last seen to be made."""
        now, n_collectives = time.perf_counter(), self._meetings.n_collectives
        if n_collectives != self._n_collectives:
            self._n_collectives, self._collective_at = n_collectives, now
        return now - self._collective_at

    def _unreached(
        self, busy: Collection[int], waiting: Mapping[int, Collection[int]]
    ) -> CommError:
        """Return the error for ranks that all wait: for one that has ended, or for each other."""
        awaited = sorted({rank for missing in waiting.values() for rank in missing})
        gone = [rank for rank in awaited if rank not in busy] or awaited or sorted(busy)
        return self.error(gone, "not come to where other ranks wait")
