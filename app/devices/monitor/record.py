"""The monitor's figures, their recent history, and message marks."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Final

from app.core.translation import english, tr, tr_later, translated
from app.core.units import GIB, decimal
from app.devices.split.figures import rank_labels
from engine import ClockLimit, DeviceSnapshot


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure measured on each device and shown in one graph.

    Args:
        title: the graph's name, to be translated.
        form: format string for a value.
        value: returns the value from a snapshot, or None if unknown.
        top: upper end of the scale; None adapts it to the data.
    """

    title: str
    unit: str
    form: str
    value: Callable[[DeviceSnapshot], float | None]
    top: float | None = None


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def traffic(snapshot: DeviceSnapshot) -> float | None:
    """Return the PCIe traffic in both directions, in bytes per second, or None if unknown."""
    sent, received = snapshot.sent_bytes_s, snapshot.received_bytes_s
    return None if sent is None or received is None else sent + received


FIGURES: Final[Mapping[str, Figure]] = {
    "memory": Figure(
        tr_later("Memory"), "GiB", "{:.1f}", lambda s: s.used_bytes / GIB if s.total_bytes else None
    ),
    "load": Figure(
        tr_later("Load", "how busy a device is"), "%", "{:.0f}", lambda s: s.load_percent, 100.0
    ),
    "power": Figure(tr_later("Power"), "W", "{:.0f}", lambda s: s.power_w),
    "temperature": Figure(
        tr_later("Temperature"), "°C", "{:.0f}", lambda s: s.temperature_c, 100.0
    ),
    "clock": Figure(tr_later("Clock"), "MHz", "{:.0f}", lambda s: s.clock_mhz),
    "traffic": Figure(
        tr_later("PCIe traffic"), "GB/s", "{:.1f}", lambda s: _scaled(traffic(s), 1e9)
    ),
    "others": Figure(
        tr_later("Other programs' memory"), "GiB", "{:.1f}",
        lambda s: _scaled(s.others_bytes, GIB),
    ),
}  # fmt: skip
"""Figures by name, in the order of their graphs."""

RATE: Final = "rate"  # name of the tokens-per-second graph

DEFAULT_GRAPHS: Final = ("memory", "load", RATE)

LIMITS: Final[Mapping[ClockLimit, str]] = {
    "power": tr_later("power limit"),
    "heat": tr_later("heat"),
    "supply": tr_later("power supply"),
    "setting": tr_later("clock setting"),
    "hardware": tr_later("hardware"),
}


def limits_text(snapshot: DeviceSnapshot) -> str:
    """Return what limits the clock: "heat, power limit"; "" if nothing does or it is unknown."""
    return ", ".join(tr(LIMITS[limit]) for limit in snapshot.clock_limits or ())


def power_text(snapshot: DeviceSnapshot) -> str:
    """Return the power draw and limit: "215 / 450 W"; "" if unknown."""
    if snapshot.power_w is None:
        return ""
    if snapshot.power_limit_w is None:
        return f"{snapshot.power_w:.0f} W"
    return f"{snapshot.power_w:.0f} / {snapshot.power_limit_w:.0f} W"


def traffic_text(snapshot: DeviceSnapshot) -> str:
    """Return the PCIe traffic to and from the device: "↓ 2.0 ↑ 0.1 GB/s"; "" if unknown."""
    sent, received = snapshot.sent_bytes_s, snapshot.received_bytes_s
    if sent is None or received is None:
        return ""
    return decimal(f"↓ {received / 1e9:.1f} ↑ {sent / 1e9:.1f} GB/s")


def others_text(snapshot: DeviceSnapshot) -> str:
    """Return what other programs use: GPU memory or CPU load; "" if unknown."""
    if snapshot.others_bytes is not None:
        return decimal(f"{snapshot.others_bytes / GIB:.1f} GiB")
    return "" if snapshot.others_percent is None else f"{snapshot.others_percent:.0f} %"


def clock_text(snapshot: DeviceSnapshot) -> str:
    """Return the clock and what limits it: "2520 MHz · heat"; "" if unknown."""
    if snapshot.clock_mhz is None:
        return ""
    limits = limits_text(snapshot)
    return f"{snapshot.clock_mhz} MHz" + (f" · {limits}" if limits else "")


def memory_text(snapshot: DeviceSnapshot) -> str:
    """Return the memory in use: "17.3 / 24.0 GiB"; "" if unknown."""
    if not snapshot.total_bytes:
        return ""
    return decimal(f"{snapshot.used_bytes / GIB:.1f} / {snapshot.total_bytes / GIB:.1f} GiB")


def spoken_state(name: str, snapshot: DeviceSnapshot) -> str:
    """Return a device's state as one line, for tooltips and screen readers."""
    if snapshot.problem:
        return f"{name}: {translated(snapshot.problem)}"
    load, heat = snapshot.load_percent, snapshot.temperature_c
    others = others_text(snapshot)
    memory_clock = snapshot.memory_clock_mhz
    parts = [
        tr("memory {text}").format(text=memory_text(snapshot)),
        "" if load is None else tr("load {n} %").format(n=f"{load:.0f}"),
        tr("power {text}").format(text=power_text(snapshot)) if power_text(snapshot) else "",
        "" if heat is None else f"{heat:.0f} °C",
        tr("clock {text}").format(text=clock_text(snapshot)) if clock_text(snapshot) else "",
        "" if memory_clock is None else tr("memory clock {n} MHz").format(n=memory_clock),
        tr("PCIe {text}").format(text=traffic_text(snapshot)) if traffic_text(snapshot) else "",
        tr("other programs {text}").format(text=others) if others else "",
    ]
    return f"{name}: {', '.join(part for part in parts if part)}"


class SeriesHistory:
    """The newest `capacity` entries, each with a time and one value per series."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._times = self._kept(())
        self._values: dict[str, deque[float]] = {}

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(self._values)

    def append(self, time_s: float, values: dict[str, float]) -> None:
        """Add an entry; missing values and earlier values in new series are NaN."""
        for name in values.keys() - self._values.keys():
            self._values[name] = self._kept([math.nan] * len(self._times))
        self._times.append(time_s)
        for name, kept in self._values.items():
            kept.append(values.get(name, math.nan))

    def times(self, since_s: float) -> list[float]:
        """Return the times since `since_s`, oldest first."""
        return list(islice(self._times, self._first(since_s), None))

    def values(self, name: str, since_s: float) -> list[float]:
        """Return a series' values at `times(since_s)`."""
        return list(islice(self._values[name], self._first(since_s), None))

    def last(self, name: str) -> float:
        """Return the newest value, or NaN."""
        kept = self._values.get(name)
        return kept[-1] if kept else math.nan

    def _kept(self, values: Iterable[float]) -> deque[float]:
        return deque(values, maxlen=self._capacity)

    def _first(self, since_s: float) -> int:
        return bisect_left(self._times, since_s)


CAPACITY: Final = 512
RATE_FADES_S: Final = 1.5
"""Age in seconds at which a rate is outdated; a busy engine reports more often."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A message mark; `time_s` is a `time.monotonic()` value."""

    time_s: float

    def clock(self) -> str:
        """Return the time of day: "14:03:12"."""
        return clock_text_of(self.time_s)


class MonitorRecord:
    """Figures of all devices over time, and generation speed.

    Attributes:
        histories: one per figure, with a series per device, and one for `RATE`.
        colours: colour index by device id.
        n_answers: number of answers included in the newest rate.
        drafts: text about draft tokens in the last answer; "" if there is none.
    """

    def __init__(self) -> None:
        self.histories = {name: SeriesHistory(CAPACITY) for name in (*FIGURES, RATE)}
        self.colours: dict[str, int] = {}
        self.now_s = 0.0
        self.latest: tuple[DeviceSnapshot, ...] = ()
        self._marks: deque[Mark] = deque(maxlen=64)
        self._rate, self._rate_s = 0.0, -math.inf
        self.n_answers = 0
        self.drafts = ""
        self._has_ended = False

    def add(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Add a reading of all devices, with the rate since the previous reading."""
        self.now_s, self.latest = snapshots[0].time_s, tuple(snapshots)
        for snapshot in snapshots:
            self.colours.setdefault(snapshot.device, len(self.colours))
        for name, figure in FIGURES.items():
            values = {s.device: figure.value(s) for s in snapshots if not s.problem}
            known = {device: value for device, value in values.items() if value is not None}
            self.histories[name].append(self.now_s, known)
        self.histories[RATE].append(self.now_s, {RATE: self._take_rate()})

    def add_rate(self, tokens_per_s: float, n_answers: int = 1) -> None:
        """Set the total rate over all answers; 0 once the last one finishes."""
        self._has_ended = tokens_per_s <= 0
        if not self._has_ended:
            self._rate, self._rate_s = tokens_per_s, time.monotonic()
            self.n_answers = n_answers

    def mark_message(self) -> None:
        """Add a message mark at the current time, and reset `drafts`."""
        self.drafts = ""
        self._marks.append(Mark(time.monotonic()))

    def marks(self, since_s: float) -> list[Mark]:
        """Return the marks between `since_s` and the newest reading."""
        return [mark for mark in self._marks if since_s <= mark.time_s <= self.now_s]

    def labels(self) -> dict[str, str]:
        """Return the labels by device id."""
        devices = list(self.colours)
        return dict(zip(devices, rank_labels(devices), strict=True))

    def table(self, names: Sequence[str], since_s: float) -> list[list[str]]:
        """Return the readings since `since_s` as table rows, with a header row.

        The columns are the time of day, seconds before the newest reading, figures by device, and
        whether a message was sent since the previous row.

        Args:
            names: keys of `FIGURES`, or `RATE`.
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
        """Return the rate since the last reading, even if the answer is already complete."""
        rate = self._rate if self.now_s - self._rate_s <= RATE_FADES_S else 0.0
        if self._has_ended:
            self._rate = 0.0
        return rate


def clock_text_of(time_s: float) -> str:
    """Return a `time.monotonic()` value as the time of day."""
    moment = datetime.fromtimestamp(time.time() - time.monotonic() + time_s)
    return moment.strftime("%H:%M:%S")


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"
