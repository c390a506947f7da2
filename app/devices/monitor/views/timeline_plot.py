"""A strip per rank: the part of its time that it computed, waited for others, or did neither.

A good split keeps all ranks computing: a rank that waits has too small a share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.core.scale import px
from app.core.translation import tr
from app.core.units import decimal
from app.devices.monitor.figures import SeriesHistory
from app.devices.monitor.views.graph import AXIS_WIDTH, WINDOW_S, lay_out
from app.widgets.text import LegendLabel, Sign, set_tip
from app.widgets.theme import mix, theme
from engine import TokenTimes

CAPACITY: Final = 4096
BIN_PIXELS: Final = 3
"""Width of one bin, in pixels; the mean of its values is drawn."""

GAP: Final = 3
MAX_STRIP: Final = 22
WAIT_FADE: Final = 0.55


class TimelinePlot(QWidget):
    """Graph of how every rank spent the last two minutes, fed with token times."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.latest = LegendLabel()
        self.latest.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self.latest.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.strips = _Strips()
        lay_out(self, tr("Computing"), self.latest, self.strips)
        self._labels: tuple[str, ...] = ()
        self._history = SeriesHistory(CAPACITY)
        self._last: TokenTimes | None = None

    @property
    def has_data(self) -> bool:
        return self._last is not None

    def set_ranks(self, labels: Sequence[str]) -> None:
        """Start again with the ranks of another model or split."""
        self._labels = tuple(labels)
        self._history, self._last = SeriesHistory(CAPACITY), None

    def add(self, now_s: float, times: TokenTimes) -> None:
        """Add the times of one token; late ones, of an earlier split, are ignored."""
        if len(times.ranks) != len(self._labels) or times.seconds <= 0:
            return
        values: dict[str, float] = {}
        for rank, spent in enumerate(times.ranks):
            values[f"{rank} computed"] = spent.computed_s / times.seconds
            values[f"{rank} waited"] = spent.waited_s / times.seconds
        self._history.append(now_s, values)
        self._last = times

    def show_until(self, now_s: float, colours: Sequence[int]) -> None:
        """Draw the two minutes until `now_s`.

        Args:
            now_s: end of the time axis, in seconds.
            colours: index of each rank's device colour.
        """
        self.strips.show_history(self._history, self._labels, colours, now_s)
        self._show_latest(colours)

    def _show_latest(self, colours: Sequence[int]) -> None:
        times = self._last
        if times is None:
            self.latest.set_signs(())
            return
        palette, signs, spoken = theme(), [], []
        for name, colour, spent in zip(self._labels, colours, times.ranks, strict=True):
            computed, waited = spent.computed_s / times.seconds, spent.waited_s / times.seconds
            share = f"{computed:.0%}".replace("%", " %")
            signs.append(Sign(palette.device_colour(colour), "●", share))
            told = tr("{name} computes {computed} and waits {waited}")
            shares = (f"{part:.0%}".replace("%", " %") for part in (computed, waited))
            spoken.append(told.format(name=name, computed=next(shares), waited=next(shares)))
        self.latest.set_signs(signs)
        text = ", ".join(spoken)
        milliseconds = tr("{ms} ms per token").format(ms=decimal(f"{1000 * times.seconds:.1f}"))
        self.setAccessibleDescription(f"{milliseconds}: {text}")
        legend = tr("Full colour: computing. Pale: waiting. Empty: neither.")
        set_tip(self, f"{milliseconds}: {text}\n{legend}")


class _Strips(QWidget):
    """The painted strips; all values are parts of a token's time, 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self._history = SeriesHistory(1)
        self._labels: tuple[str, ...] = ()
        self._colours: tuple[int, ...] = ()
        self._now_s = 0.0

    def show_history(
        self, history: SeriesHistory, labels: Sequence[str], colours: Sequence[int], now_s: float
    ) -> None:
        self._history, self._now_s = history, now_s
        self._labels, self._colours = tuple(labels), tuple(colours)
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(160, 60)

    def paintEvent(self, event: QPaintEvent) -> None:
        if not self._labels:
            return
        painter = QPainter(self)
        font = painter.font()
        font.setPixelSize(px(10))
        painter.setFont(font)
        pitch = min(self.height() / len(self._labels), px(MAX_STRIP) + GAP)
        for rank, (name, colour) in enumerate(zip(self._labels, self._colours, strict=True)):
            area = QRectF(AXIS_WIDTH, rank * pitch, self.width() - AXIS_WIDTH, pitch - GAP)
            self._paint_rank(painter, area, rank, QColor(theme().device_colour(colour)))
            painter.setPen(QColor(theme().muted))
            side = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
            if area.height() >= painter.fontMetrics().ascent() - 2:
                painter.drawText(QRectF(0, area.top(), AXIS_WIDTH, area.height()), side, name)

    def _paint_rank(self, painter: QPainter, area: QRectF, rank: int, full: QColor) -> None:
        colours = theme()
        painter.fillRect(area, QColor(colours.raised))
        since = self._now_s - WINDOW_S
        if f"{rank} computed" not in self._history.series:
            return
        places = [(time_s - since) / WINDOW_S for time_s in self._history.times(since)]
        n_bins = max(1, int(area.width()) // BIN_PIXELS)
        computed = binned(places, self._history.values(f"{rank} computed", since), n_bins)
        waited = binned(places, self._history.values(f"{rank} waited", since), n_bins)
        pale = QBrush(QColor(mix(full.name(), colours.raised, WAIT_FADE)))
        width = area.width() / n_bins
        for at, (part_computed, part_waited) in enumerate(zip(computed, waited, strict=True)):
            if math.isnan(part_computed):
                continue
            left = area.left() + at * width
            busy = area.height() * part_computed
            wait = min(area.height() - busy, area.height() * part_waited)
            painter.fillRect(QRectF(left, area.bottom() - busy, width, busy), full)
            painter.fillRect(QRectF(left, area.bottom() - busy - wait, width, wait), pale)


def binned(places: Sequence[float], values: Sequence[float], n_bins: int) -> list[float]:
    """Return the mean value in each of `n_bins` equal parts of 0 to 1; NaN for empty ones."""
    counts, sums = [0] * n_bins, [0.0] * n_bins
    for place, value in zip(places, values, strict=True):
        at = min(int(place * n_bins), n_bins - 1)
        counts[at] += 1
        sums[at] += value
    return [total / n if n else math.nan for total, n in zip(sums, counts, strict=True)]
