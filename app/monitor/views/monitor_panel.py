"""Graphs of the last two minutes: memory, load, speed, and how ranks spend their time.

The window shares the processor with the engine, so drawing slows generation down: everything is
drawn once per snapshot of the devices, and not at all while the panel is hidden.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QWidget

from app.monitor.history import SeriesHistory
from app.monitor.views.graph import WINDOW_S
from app.monitor.views.history_plot import HistoryPlot
from app.monitor.views.timeline_plot import TimelinePlot
from app.split.figures import rank_labels
from app.theme import theme_signals
from app.units import GIB
from engine import DeviceSnapshot, TokenTimes

CAPACITY: Final = 512
RATE: Final = "rate"
RATE_FADES_S: Final = 1.5
"""Age at which a rate no longer counts, in seconds; a running engine reports more often."""


class MonitorPanel(QWidget):
    """Graphs on one time axis, fed with snapshots, rates, message marks and token times.

    The timeline of the ranks shows as soon as it has data.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._memory_history = SeriesHistory(CAPACITY)
        self._load_history = SeriesHistory(CAPACITY)
        self._rate_history = SeriesHistory(CAPACITY)
        self._marks: deque[float] = deque(maxlen=64)
        self._rate, self._rate_s = 0.0, -math.inf
        self._has_ended = False
        self._colours: dict[str, int] = {}
        self._ranks: tuple[str, ...] = ()
        self._now_s = 0.0
        self.memory = HistoryPlot("Memory", "GiB")
        self.load = HistoryPlot("Load", "%", top=100.0)
        self.speed = HistoryPlot("Tokens per second", "tok/s")
        self.timeline = TimelinePlot()
        self._build()
        theme_signals().changed.connect(self._on_theme)

    def add_snapshots(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Add a snapshot of all devices, and draw."""
        if not snapshots:
            return
        self._now_s = snapshots[0].time_s
        for snapshot in snapshots:
            self._colours.setdefault(snapshot.device, len(self._colours))
        readable = [s for s in snapshots if s.total_bytes]
        self._memory_history.append(self._now_s, {s.device: s.used_bytes / GIB for s in readable})
        self._load_history.append(
            self._now_s,
            {s.device: s.load_percent for s in readable if s.load_percent is not None},
        )
        self._rate_history.append(self._now_s, {RATE: self._take_rate()})
        if readable:
            self.memory.set_top(max(s.total_bytes for s in readable) / GIB)
        if self.isVisible():
            self._draw()

    def add_rate(self, tokens_per_s: float) -> None:
        """Add the present rate, 0 at the end; it is drawn with the next snapshot."""
        self._has_ended = tokens_per_s <= 0
        if not self._has_ended:
            self._rate, self._rate_s = tokens_per_s, time.monotonic()

    def set_ranks(self, devices: Sequence[str]) -> None:
        """Show the ranks of the loaded model, given by their devices; none without a model."""
        self._ranks = tuple(devices)
        self.timeline.set_ranks(rank_labels(devices))
        self.timeline.hide()

    def add_times(self, times: TokenTimes) -> None:
        """Add the ranks' times of one token; they are drawn with the next snapshot."""
        self.timeline.add(time.monotonic(), times)

    def mark_message(self) -> None:
        """Mark the present moment with a line."""
        self._marks.append(time.monotonic())

    def _take_rate(self) -> float:
        """Return the rate since the last snapshot, even if the answer has ended since."""
        rate = self._rate if self._now_s - self._rate_s <= RATE_FADES_S else 0.0
        if self._has_ended:
            self._rate = 0.0
        return rate

    def _draw(self) -> None:
        now = self._now_s
        self.memory.show_history(self._memory_history, self._colours, now)
        self.load.show_history(self._load_history, self._colours, now)
        self.speed.show_history(self._rate_history, {RATE: 0}, now)
        self.speed.set_marks([now - mark for mark in self._marks if 0 <= now - mark <= WINDOW_S])
        self._show_latest()
        self._show_timeline()

    def _show_timeline(self) -> None:
        if not self.timeline.has_data:
            return
        self.timeline.show()
        places = list(self._colours)
        colours = [
            (places.index(device) if device in places else len(places))
            + self._ranks[:rank].count(device)
            for rank, device in enumerate(self._ranks)
        ]
        self.timeline.show_until(self._now_s, colours)

    def _show_latest(self) -> None:
        names = dict(zip(self._colours, rank_labels(list(self._colours)), strict=True))
        for plot, history, form in (
            (self.memory, self._memory_history, "{:.1f}"),
            (self.load, self._load_history, "{:.0f}"),
        ):
            plot.set_latest(
                [
                    (names[device], colour, form.format(value))
                    for device, colour in self._colours.items()
                    if not math.isnan(value := history.last(device))
                ]
            )
        rate = self._rate_history.last(RATE)
        self.speed.set_latest([("Speed", 0, f"{rate:.1f}")] if rate > 0 else [])

    def _on_theme(self) -> None:
        self._show_latest()
        self._show_timeline()

    def _build(self) -> None:
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "panel")
        layout = QHBoxLayout(self)
        layout.setContentsMargins(16, 10, 16, 8)
        layout.setSpacing(24)
        for plot in (self.memory, self.load, self.speed):
            layout.addWidget(plot, 1)
        layout.addWidget(self.timeline, 1)
        self.timeline.hide()
        self.setMinimumHeight(120)
        self._show_latest()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if self._now_s:
            self._draw()
