"""Curves over the last two minutes, painted; a library of plots takes longer to import than the
whole window to show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import QEvent, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QHelpEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.core.scale import px
from app.core.translation import tr
from app.core.units import decimal
from app.widgets.text import show_tip
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
