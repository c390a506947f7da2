"""The last minutes of a few time series.

Plain lists: a few hundred numbers are drawn once a second, and a window that needs no numpy shows
sooner.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import islice


class SeriesHistory:
    """The newest `capacity` entries: a time, and one value per series."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._times = self._kept(())
        self._values: dict[str, deque[float]] = {}

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(self._values)

    def append(self, time_s: float, values: dict[str, float]) -> None:
        """Add an entry; series without a value get NaN, new series NaN for the past."""
        for name in values.keys() - self._values.keys():
            self._values[name] = self._kept([math.nan] * len(self._times))
        self._times.append(time_s)
        for name, kept in self._values.items():
            kept.append(values.get(name, math.nan))

    def times(self, since_s: float) -> list[float]:
        """Return the times from `since_s` on, oldest first."""
        return list(islice(self._times, self._first(since_s), None))

    def values(self, name: str, since_s: float) -> list[float]:
        """Return the values of a series at `times(since_s)`."""
        return list(islice(self._values[name], self._first(since_s), None))

    def last(self, name: str) -> float:
        """Return the newest value; NaN if there is none."""
        kept = self._values.get(name)
        return kept[-1] if kept else math.nan

    def _kept(self, values: Iterable[float]) -> deque[float]:
        return deque(values, maxlen=self._capacity)

    def _first(self, since_s: float) -> int:
        return bisect_left(self._times, since_s)
