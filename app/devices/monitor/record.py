"""What the monitor has seen: the last minutes of every figure, and marks of messages."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from app.core.translation import english
from app.devices.monitor.figures import FIGURES, RATE, SeriesHistory
from app.devices.split.figures import rank_labels
from engine import DeviceSnapshot

CAPACITY: Final = 512
RATE_FADES_S: Final = 1.5
"""Age at which a rate no longer counts, in seconds; a running engine reports more often."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A message on the time axis, by `time.monotonic()`."""

    time_s: float

    def clock(self) -> str:
        """Return the time of day: "14:03:12"."""
        return clock_text_of(self.time_s)


class MonitorRecord:
    """The figures of all devices over time, and the speed of answers.

    Attributes:
        histories: one for each figure, with a series for each device, and one for `RATE`.
        colours: index of each device's colour, by its id.
        now_s: time of the newest reading.
        latest: newest reading.
        n_answers: number of the answers that the newest rate is of.
        guesses: what guesses brought in the last answer, as text; "" for nothing.
    """

    def __init__(self) -> None:
        self.histories = {name: SeriesHistory(CAPACITY) for name in (*FIGURES, RATE)}
        self.colours: dict[str, int] = {}
        self.now_s = 0.0
        self.latest: tuple[DeviceSnapshot, ...] = ()
        self._marks: deque[Mark] = deque(maxlen=64)
        self._rate, self._rate_s = 0.0, -math.inf
        self.n_answers = 0
        self.guesses = ""
        self._has_ended = False

    def add(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Add a reading of all devices, with the rate since the one before."""
        self.now_s, self.latest = snapshots[0].time_s, tuple(snapshots)
        for snapshot in snapshots:
            self.colours.setdefault(snapshot.device, len(self.colours))
        for name, figure in FIGURES.items():
            values = {s.device: figure.value(s) for s in snapshots if not s.problem}
            known = {device: value for device, value in values.items() if value is not None}
            self.histories[name].append(self.now_s, known)
        self.histories[RATE].append(self.now_s, {RATE: self._take_rate()})

    def add_rate(self, tokens_per_s: float, n_answers: int = 1) -> None:
        """Note the present rate of all answers together, 0 at the end of the last one."""
        self._has_ended = tokens_per_s <= 0
        if not self._has_ended:
            self._rate, self._rate_s = tokens_per_s, time.monotonic()
            self.n_answers = n_answers

    def mark_message(self) -> None:
        """Mark the present moment, and forget what guesses brought before."""
        self.guesses = ""
        self._marks.append(Mark(time.monotonic()))

    def marks(self, since_s: float) -> list[Mark]:
        """Return the marks from `since_s` until the newest reading."""
        return [mark for mark in self._marks if since_s <= mark.time_s <= self.now_s]

    def labels(self) -> dict[str, str]:
        """Return the label of each device, by its id."""
        devices = list(self.colours)
        return dict(zip(devices, rank_labels(devices), strict=True))

    def table(self, names: Sequence[str], since_s: float) -> list[list[str]]:
        """Return the readings since then as rows of a table, with a head.

        The columns are time of day, seconds before the newest reading, each figure of each device
        that has it, and whether a message was sent since the row before.

        Args:
            names: figures of `FIGURES`, or `RATE`.
        """
        columns: list[tuple[str, list[float]]] = []
        for name in names if self.latest else ():
            history = self.histories[name]
            if name == RATE:
                columns.append(("Tokens per second", history.values(RATE, since_s)))
                continue
            title, unit = english(FIGURES[name].title), FIGURES[name].unit
            columns += [
                (f"{title} {label} ({unit})", history.values(device, since_s))
                for device, label in self.labels().items()
                if device in history.series
            ]
        times = self.histories[RATE].times(since_s)
        rows = [["Time", "Seconds", *(title for title, _ in columns), "Message"]]
        marks = [mark.time_s for mark in self.marks(since_s)]
        before = since_s
        for at, time_s in enumerate(times):
            is_marked = any(before < mark <= time_s for mark in marks)
            cells = (_cell(values[at]) for _, values in columns)
            rows.append(
                [clock_text_of(time_s), f"{time_s - self.now_s:.1f}", *cells, str(int(is_marked))]
            )
            before = time_s
        return rows

    def _take_rate(self) -> float:
        """Return the rate since the last reading, even if the answer has ended since."""
        rate = self._rate if self.now_s - self._rate_s <= RATE_FADES_S else 0.0
        if self._has_ended:
            self._rate = 0.0
        return rate


def clock_text_of(time_s: float) -> str:
    """Return a time of `time.monotonic()` as the time of day."""
    moment = datetime.fromtimestamp(time.time() - time.monotonic() + time_s)
    return moment.strftime("%H:%M:%S")


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"
