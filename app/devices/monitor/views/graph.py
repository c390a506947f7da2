"""Curves over the last two minutes, painted; a library of plots takes longer to import than the
whole window to show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import QEvent, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QHelpEvent, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from app.core.scale import px
from app.core.translation import tr
from app.core.units import decimal
from app.devices.monitor.figures import SeriesHistory
from app.widgets.controls import nice_top
from app.widgets.layout import scaled
from app.widgets.text import LegendLabel, Sign, label, set_tip, show_tip
from app.widgets.theme import mix, theme

WINDOW_S: Final = 120.0
AXIS_WIDTH: Final = 44
"""Width in pixels: room for five digits."""
AXIS_GAP: Final = 6
TICK_PIXELS: Final = 11
ROOM: Final = 7
"""Pixels above and below the scale, for half a line of text."""
GRID_WEIGHT: Final = 0.2
LINE_WIDTH: Final = 1.5
MARK: Final = 3
"""Half the width of the sign of a message."""
NEAR: Final = 6


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve, with NaN where it has a gap.

    Attributes:
        colour: index of its device colour.
        ages: minus the age of each value, in seconds.
    """

    colour: int
    ages: Sequence[float]
    values: Sequence[float]


class Graph(QWidget):
    """Curves and vertical marks over a scale from 0; all graphs have the same time axis.

    Attributes:
        top: upper end of the scale.
        curves: what is shown, by name.
        marks: minus the ages of the dotted lines, in seconds.
    """

    def __init__(self, top: float, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.top = top
        self.curves: Mapping[str, Curve] = {}
        self.marks: Sequence[float] = ()
        self._clocks: Sequence[str] = ()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)

    def show_curves(self, curves: Mapping[str, Curve], top: float) -> None:
        """Draw these curves on a scale that ends at `top`."""
        self.curves, self.top = curves, top
        self.update()

    def set_marks(self, marks: Sequence[float], clocks: Sequence[str]) -> None:
        """Draw messages as dotted lines at these times.

        Args:
            marks: minus their ages in seconds.
            clocks: their times of day, for tool tips.
        """
        self.marks, self._clocks = marks, clocks
        self.update()

    def mark_at(self, x: float) -> str:
        """Return the time of day of the message within `NEAR` pixels of a place, or ""."""
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
        """Return the place of the curves."""
        inner = QRectF(self.rect()).adjusted(px(AXIS_WIDTH), px(ROOM), 0, -px(ROOM))
        return inner if inner.isValid() else QRectF()

    def point(self, age: float, value: float) -> QPointF:
        """Return the place of a value at minus its age."""
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
        """Paint three lines with their values."""
        font = painter.font()
        font.setPixelSize(px(TICK_PIXELS))
        painter.setFont(font)
        muted = QColor(theme().muted)
        faint = QColor(mix(theme().surface, theme().muted, GRID_WEIGHT))  # a solid one is cheap
        side = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        for value in (0.0, self.top / 2, self.top):
            y = self.point(0, value).y()
            painter.fillRect(QRectF(area.left(), round(y), area.width(), 1), faint)
            painter.setPen(muted)
            place = QRectF(0, y - px(ROOM), px(AXIS_WIDTH - AXIS_GAP), 2 * px(ROOM))
            painter.drawText(place, side, tick(value))

    def _lines(self, curve: Curve, area: QRectF) -> Iterator[list[QPointF]]:
        """Yield the pieces of a curve between its gaps; places as `point` has them."""
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
    """Return a value on the scale in at least three digits, without an exponent."""
    return decimal(f"{value:.3g}") if value < 1000 else f"{value:.0f}"


MANY: Final = 4
"""Number of values from which on they have no dots."""


LEAST_AXIS: Final = 190
"""Least width in pixels of an axis with three labels."""


class HistoryPlot(QWidget):
    """A title, the latest values as text, and curves of the last two minutes.

    Args:
        unit: unit of the values, such as "GiB".
        top: upper end of the scale; None follows the data.
    """

    def __init__(
        self, title: str, unit: str, top: float | None = None, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._unit = unit
        self._top = top
        self.latest = LegendLabel()
        self.latest.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        # many devices must not widen the window; the tool tip has all values
        self.latest.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.graph = Graph(top or 1.0)
        lay_out(self, title, self.latest, self.graph)

    def show_history(
        self, history: SeriesHistory, colours: Mapping[str, int], now_s: float
    ) -> None:
        """Draw the series of `colours`, which maps their names to indices of device colours."""
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
        """Draw dotted vertical lines for messages, given by age in seconds and time of day."""
        self.graph.set_marks([-age for age, _ in marks], [clock for _, clock in marks])

    def set_latest(self, values: Sequence[tuple[str, int, str]], note: str = "") -> None:
        """Show the newest values as text, without dots if there are many.

        Args:
            values: (name, index of its device colour, number as text).
            note: what they are of; shown behind them where there is room.
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


def lay_out(host: QWidget, title: str, latest: QWidget, picture: QWidget) -> None:
    """Lay out a title, the latest values, a graph and its time axis."""
    header = QHBoxLayout()
    heading = label(title, "heading")
    heading.setMinimumWidth(1)  # many graphs must not widen the window
    header.addWidget(heading)
    header.addWidget(latest, 1)
    layout = QVBoxLayout(host)
    layout.setContentsMargins(0, 0, 0, 0)
    layout.setSpacing(2)
    layout.addLayout(header)
    layout.addWidget(picture, 1)
    layout.addWidget(_TimeLabels())
    host.setAccessibleName(title)


class _TimeLabels(QWidget):
    """Labels of a two-minute time axis; the middle one needs room."""

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
        self._middle.setVisible(self.width() >= px(LEAST_AXIS))


def _highest(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=0.0)
