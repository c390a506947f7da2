"""Curves for the last two minutes, and strips that show how each rank spends a token's time.

No plot library is used, because importing one takes longer than showing the window. In a good
split, all ranks compute all the time; a rank that waits has too small a share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import QEvent, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QHelpEvent, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from app.core.translation import tr
from app.core.units import decimal
from app.devices.monitor.record import SeriesHistory
from app.widgets.controls import nice_top
from app.widgets.layout import NO_MARGINS, fill, scaled
from app.widgets.text import LegendLabel, Sign, label, set_tip, show_tip
from app.widgets.theme import mix, px, theme
from engine import TokenTimes

WINDOW_S: Final = 120.0
AXIS_WIDTH: Final = 44  # pixels; enough for five digits
AXIS_GAP: Final = 6
TICK_PIXELS: Final = 11
ROOM: Final = 7  # pixels above and below the scale, for half a line of text
GRID_WEIGHT: Final = 0.2
LINE_WIDTH: Final = 1.5
MARK: Final = 3  # half the width of a message mark
NEAR: Final = 6


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve in a device's colour; gaps are NaN."""

    colour: int
    ages: Sequence[float]  # negative, in seconds
    values: Sequence[float]


class Graph(QWidget):
    """Curves and vertical marks on a scale from 0 to `top`; times are negative ages in seconds."""

    def __init__(self, top: float, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.top = top
        self.curves: Mapping[str, Curve] = {}
        self.marks: Sequence[float] = ()
        self._clocks: Sequence[str] = ()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)

    def show_curves(self, curves: Mapping[str, Curve], top: float) -> None:
        """Draw curves on a scale from 0 to `top`."""
        self.curves, self.top = curves, top
        self.update()

    def set_marks(self, marks: Sequence[float], clocks: Sequence[str]) -> None:
        """Draw a dotted line per message.

        Args:
            marks: negative ages in seconds.
            clocks: times of day, for tooltips.
        """
        self.marks, self._clocks = marks, clocks
        self.update()

    def mark_at(self, x: float) -> str:
        """Return the time of day of a message mark within `NEAR` pixels of `x`, or ""."""
        pairs = zip(self.marks, self._clocks, strict=True)
        found = [(abs(self.point(mark, 0).x() - x), clock) for mark, clock in pairs]
        distance, clock = min(found, default=(math.inf, ""))
        return clock if distance <= px(NEAR) else ""

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            clock = self.mark_at(event.pos().x())
            if clock:
                tip = tr("Message at {time}").format(time=clock)
                show_tip(self, event.globalPos(), tip)
                return True
        return super().event(event)

    def area(self) -> QRectF:
        """Return the rectangle in which curves are drawn."""
        inner = QRectF(self.rect()).adjusted(px(AXIS_WIDTH), px(ROOM), 0, -px(ROOM))
        return inner if inner.isValid() else QRectF()

    def point(self, age: float, value: float) -> QPointF:
        """Return a value's position; `age` is negative."""
        area = self.area()
        x = area.right() + age / WINDOW_S * area.width()
        return QPointF(x, area.bottom() - value / self.top * area.height())

    def sizeHint(self) -> QSize:
        return QSize(160, 60)

    def paintEvent(self, event: QPaintEvent) -> None:
        area = self.area()
        if area.isEmpty():
            return
        painter = QPainter(self)
        self._paint_scale(painter, area)
        painter.setClipRect(area.adjusted(0, -px(ROOM), 0, px(ROOM)))
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(QColor(theme().muted), 1, Qt.PenStyle.DotLine))
        for mark in self.marks:
            x = self.point(mark, 0).x()
            painter.drawLine(QPointF(x, area.top()), QPointF(x, area.bottom()))
            size = px(MARK)
            head = [QPointF(x - size, area.top() - size), QPointF(x + size, area.top() - size)]
            painter.setBrush(QColor(theme().accent))
            painter.drawPolygon([*head, QPointF(x, area.top() + size)])
        painter.setBrush(Qt.BrushStyle.NoBrush)
        for curve in self.curves.values():
            painter.setPen(QPen(QColor(theme().device_colour(curve.colour)), LINE_WIDTH))
            for line in self._lines(curve, area):
                painter.drawPolyline(line)

    def _paint_scale(self, painter: QPainter, area: QRectF) -> None:
        font = painter.font()
        font.setPixelSize(px(TICK_PIXELS))
        painter.setFont(font)
        muted = QColor(theme().muted)
        faint = QColor(mix(theme().surface, theme().muted, GRID_WEIGHT))  # opaque: cheaper to draw
        side = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        for value in (0.0, self.top / 2, self.top):
            y = self.point(0, value).y()
            painter.fillRect(QRectF(area.left(), round(y), area.width(), 1), faint)
            painter.setPen(muted)
            place = QRectF(0, y - px(ROOM), px(AXIS_WIDTH - AXIS_GAP), 2 * px(ROOM))
            painter.drawText(place, side, tick(value))

    def _lines(self, curve: Curve, area: QRectF) -> Iterator[list[QPointF]]:
        right, bottom = area.right(), area.bottom()
        across, up = area.width() / WINDOW_S, area.height() / self.top
        line: list[QPointF] = []
        for age, value in zip(curve.ages, curve.values, strict=True):
            if not math.isnan(value):
                line.append(QPointF(right + age * across, bottom - value * up))
            elif line:
                yield line
                line = []
        if line:
            yield line


def tick(value: float) -> str:
    """Return a scale label: up to three significant digits below 1000, never an exponent."""
    return decimal(f"{value:.3g}") if value < 1000 else f"{value:.0f}"


MANY: Final = 4  # maximum number of values shown with coloured dots


MIN_AXIS: Final = 190  # minimum width in pixels of an axis with three labels


class HistoryPlot(QWidget):
    """A title, the latest values as text, and two minutes of curves; `top` fixes the scale."""

    def __init__(
        self, title: str, unit: str, top: float | None = None, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._unit = unit
        self._top = top
        self.latest = LegendLabel()
        self.latest.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        # many devices must not widen the window; the tooltip has all values
        self.latest.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.graph = Graph(top or 1.0)
        lay_out(self, title, self.latest, self.graph)

    def show_history(
        self, history: SeriesHistory, colours: Mapping[str, int], now_s: float
    ) -> None:
        """Draw the series named in `colours`, which maps them to device colour indices."""
        since = now_s - WINDOW_S
        ages = [time_s - now_s for time_s in history.times(since)]
        curves = {
            name: Curve(colour, ages, history.values(name, since))
            for name, colour in colours.items()
            if name in history.series
        }
        highest = max((_highest(curve.values) for curve in curves.values()), default=0.0)
        self.graph.show_curves(curves, nice_top(highest) if self._top is None else self._top)

    def set_top(self, top: float) -> None:
        """Fix the upper end of the scale."""
        self._top = top

    def set_marks(self, marks: Sequence[tuple[float, str]]) -> None:
        """Draw a dotted line per message, given its age in seconds and its time of day."""
        self.graph.set_marks([-age for age, _ in marks], [clock for _, clock in marks])

    def set_latest(self, values: Sequence[tuple[str, int, str]], note: str = "") -> None:
        """Show the newest values as text.

        Args:
            values: (name, device colour index, formatted number).
            note: shown after the values if there is room.
        """
        has_dots, colours = len(values) <= MANY, theme()
        signs = [
            Sign(shown, "●", number) if has_dots else Sign(shown, number)
            for shown, number in ((colours.device_colour(at), number) for _, at, number in values)
        ]
        note = f" · {note}" if note else ""
        self.latest.set_signs(signs, f"{self._unit}{note}")
        if self.latest.sizeHint().width() > self.latest.width():
            self.latest.set_signs(signs, self._unit)
        spoken = ", ".join(f"{name} {number} {self._unit}" for name, _, number in values) + note
        self.setAccessibleDescription(spoken)
        set_tip(self, spoken)


def lay_out(host: QWidget, title: str, latest: QWidget, graph: QWidget) -> None:
    """Lay out a title, the latest values, a graph and its time axis."""
    heading = label(title, "heading")
    heading.setMinimumWidth(1)  # many graphs must not widen the window
    parts = fill(QHBoxLayout(), heading, (latest, 1)), (graph, 1), _TimeLabels()
    fill(QVBoxLayout(host), *parts, margins=NO_MARGINS, spacing=2)
    host.setAccessibleName(title)


class _TimeLabels(QWidget):
    def __init__(self) -> None:
        super().__init__()
        row = QHBoxLayout(self)
        scaled(self, lambda left: row.setContentsMargins(left, 0, 0, 0), AXIS_WIDTH)
        align = Qt.AlignmentFlag
        first, self._middle, last = (
            label(text, "muted") for text in ("−120 s", "−60 s", tr("now"))
        )
        row.addWidget(first, 1, align.AlignLeft)
        row.addWidget(self._middle, 1, align.AlignHCenter)
        row.addWidget(last, 1, align.AlignRight)
        self.setMinimumWidth(1)  # many graphs must not widen the window

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._middle.setVisible(self.width() >= px(MIN_AXIS))


def _highest(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=0.0)


CAPACITY: Final = 4096
BIN_PIXELS: Final = 3  # bin width in pixels; the mean of each bin is drawn

GAP: Final = 3
MAX_STRIP: Final = 22
WAIT_FADE: Final = 0.55


class TimelinePlot(QWidget):
    """Graph of how each rank spent the last two minutes, based on token times."""

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
        """Clear the graph and use the ranks of another model or split."""
        self._labels = tuple(labels)
        self._history, self._last = SeriesHistory(CAPACITY), None

    def add(self, now_s: float, times: TokenTimes) -> None:
        """Add the times for one token; ignore late times from another split."""
        if len(times.ranks) != len(self._labels) or times.seconds <= 0:
            return
        values: dict[str, float] = {}
        for rank, spent in enumerate(times.ranks):
            values[f"{rank} computed"] = spent.computed_s / times.seconds
            values[f"{rank} waited"] = spent.waited_s / times.seconds
        self._history.append(now_s, values)
        self._last = times

    def show_until(self, now_s: float, colours: Sequence[int]) -> None:
        """Draw the two minutes up to `now_s`; `colours` are the ranks' device colours."""
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
            waiting = f"{waited:.0%}".replace("%", " %")
            text = tr("{name}: {computed} computing, {waited} waiting")
            spoken.append(text.format(name=name, computed=share, waited=waiting))
        self.latest.set_signs(signs)
        text = "; ".join(spoken)
        milliseconds = tr("{ms} ms per token").format(ms=decimal(f"{1000 * times.seconds:.1f}"))
        self.setAccessibleDescription(f"{milliseconds}: {text}")
        legend = tr("Full colour: computing. Pale: waiting. Empty: neither.")
        set_tip(self, f"{milliseconds}: {text}\n{legend}")


class _Strips(QWidget):
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
    """Return the mean value in each of `n_bins` equal parts of 0 to 1, NaN if a part is empty."""
    counts, sums = [0] * n_bins, [0.0] * n_bins
    for place, value in zip(places, values, strict=True):
        at = min(int(place * n_bins), n_bins - 1)
        counts[at] += 1
        sums[at] += value
    return [total / n if n else math.nan for total, n in zip(sums, counts, strict=True)]
