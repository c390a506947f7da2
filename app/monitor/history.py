"""The last minutes of a few time series, in arrays allocated once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class SeriesHistory:
    """The newest `capacity` entries: a time, and one value per series.

    Every entry is stored twice, `capacity` apart, so that the newest entries are always contiguous
    piece and are handed out as views.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._times: Floats = np.zeros(2 * capacity)
        self._values: dict[str, Floats] = {}
        self._end = 0
        self._length = 0

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(self._values)

    def append(self, time_s: float, values: dict[str, float]) -> None:
        """Add an entry; series without a value get NaN, new series NaN for the past."""
        for name in values.keys() - self._values.keys():
            self._values[name] = np.full(2 * self._capacity, np.nan)
        slot = self._end % self._capacity
        for place in (slot, slot + self._capacity):
            self._times[place] = time_s
            for name, array in self._values.items():
                array[place] = values.get(name, np.nan)
        self._end += 1
        self._length = min(self._length + 1, self._capacity)

    def times(self, since_s: float) -> Floats:
        """Return the times from `since_s` on, oldest first, as a view."""
        return self._times[self._window(since_s)]

    def values(self, name: str, since_s: float) -> Floats:
        """Return the values of a series at `times(since_s)`, as a view."""
        return self._values[name][self._window(since_s)]

    def last(self, name: str) -> float:
        """Return the newest value; NaN if there is none."""
        if not self._length or name not in self._values:
            return float("nan")
        return float(self._values[name][(self._end - 1) % self._capacity])

    def _window(self, since_s: float) -> slice:
        end = (self._end - 1) % self._capacity + self._capacity + 1 if self._length else 0
        start = end - self._length
        first = int(np.searchsorted(self._times[start:end], since_s))
        return slice(start + first, end)
