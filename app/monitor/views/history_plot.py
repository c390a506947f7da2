"""A small graph of the last two minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyqtgraph as pg
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QFont
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from app.monitor.history import Floats, SeriesHistory
from app.theme import theme
from app.widgets.axis import nice_top
from app.widgets.text import LegendLabel, Sign, label, set_tip

WINDOW_S: Final = 120.0
Y_PADDING: Final = 0.08
"""Room above and below the scale for half a line of text, as a part of the scale."""
AXIS_WIDTH: Final = 44
"""Width in pixels: room for five digits."""
MANY: Final = 4
"""Number of values from which on they have no dots."""


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
        self._shown_top = 0.0
        self._curves: dict[str, Any] = {}
        self._colours: dict[str, int] = {}
        self._marks: list[Any] = []
        self.latest = LegendLabel()
        self.latest.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        # many devices must not widen the window; the tool tip has all values
        self.latest.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.plot = pg.PlotWidget(background=None)
        self.plot.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.plot.viewport().setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self._set_up_plot()
        lay_out(self, title, self.latest, self.plot)
        self.apply_theme()

    def link_x(self, other: HistoryPlot) -> None:
        """Show the same time range as `other`."""
        self.plot.setXLink(other.plot)

    def show_history(
        self, history: SeriesHistory, colours: Mapping[str, int], now_s: float
    ) -> None:
        """Draw the series of `colours`, which maps their names to indices of device colours."""
        since = now_s - WINDOW_S
        x = history.times(since) - now_s
        highest = 0.0
        for name, colour in colours.items():
            if name not in history.series:
                continue
            y = history.values(name, since)
            self._curve(name, colour).setData(x, y)
            highest = max(highest, _highest(y))
        self._show_top(nice_top(highest) if self._top is None else self._top)

    def set_top(self, top: float) -> None:
        """Fix the upper end of the scale."""
        self._top = top

    def set_marks(self, ages_s: Sequence[float]) -> None:
        """Draw dotted vertical lines at these ages, in seconds."""
        while len(self._marks) > len(ages_s):
            self.plot.removeItem(self._marks.pop())
        while len(self._marks) < len(ages_s):
            mark = pg.InfiniteLine(angle=90, pen=self._mark_pen())
            self._marks.append(mark)
            self.plot.addItem(mark)
        for mark, age in zip(self._marks, ages_s, strict=True):
            mark.setValue(-age)

    def set_latest(self, values: Sequence[tuple[str, int, str]]) -> None:
        """Show the newest values as text, without dots if there are many.

        Args:
            values: (name, index of its device colour, number as text).
        """
        has_dots, colours = len(values) <= MANY, theme()
        signs = [
            Sign(shown, "●", number) if has_dots else Sign(shown, number)
            for shown, number in ((colours.device_colour(at), number) for _, at, number in values)
        ]
        self.latest.set_signs(signs, self._unit)
        spoken = ", ".join(f"{name} {number} {self._unit}" for name, _, number in values)
        self.setAccessibleDescription(spoken)
        set_tip(self, spoken)

    def apply_theme(self) -> None:
        """Use the colours of the current theme."""
        colours = theme()
        self.plot.getAxis("left").setTextPen(QColor(colours.muted))
        self.plot.getAxis("left").setTickPen(QColor(colours.muted))
        for name, curve in self._curves.items():
            curve.setPen(pg.mkPen(colours.device_colour(self._colours[name]), width=1.5))
        for mark in self._marks:
            mark.setPen(self._mark_pen())

    def _curve(self, name: str, colour: int) -> Any:
        if name not in self._curves:
            pen = pg.mkPen(theme().device_colour(colour), width=1.5)
            self._curves[name] = self.plot.plot(pen=pen, connect="finite", antialias=True)
            self._colours[name] = colour
        return self._curves[name]

    def _mark_pen(self) -> Any:
        return pg.mkPen(theme().muted, width=1, style=Qt.PenStyle.DotLine)

    def _set_up_plot(self) -> None:
        item = self.plot.getPlotItem()
        item.setMenuEnabled(False)
        item.hideButtons()
        self.plot.setMouseEnabled(x=False, y=False)
        self.plot.setAntialiasing(True)
        self.plot.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.plot.setXRange(-WINDOW_S, 0, padding=0)
        font = QFont(self.font())
        font.setPixelSize(11)
        item.hideAxis("bottom")
        left = self.plot.getAxis("left")
        left.setStyle(tickLength=0, tickFont=font, tickTextOffset=6)
        left.setWidth(AXIS_WIDTH)
        left.setPen(pg.mkPen(None))
        self.plot.showGrid(y=True, alpha=0.2)
        self._show_top(self._top or 1.0)

    def _show_top(self, top: float) -> None:
        if top == self._shown_top:
            return
        self._shown_top = top
        self.plot.setYRange(0, top, padding=Y_PADDING)
        ticks = [(value, _tick(value)) for value in (0.0, top / 2, top)]
        self.plot.getAxis("left").setTicks([ticks])


def _tick(value: float) -> str:
    """Return a value on the scale in at least three digits, without an exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def lay_out(host: QWidget, title: str, latest: QWidget, picture: QWidget) -> None:
    """Lay out a title, the latest values, a graph and its time axis."""
    header = QHBoxLayout()
    header.addWidget(label(title, "heading"))
    header.addWidget(latest, 1)
    layout = QVBoxLayout(host)
    layout.setContentsMargins(0, 0, 0, 0)
    layout.setSpacing(2)
    layout.addLayout(header)
    layout.addWidget(picture, 1)
    layout.addLayout(time_labels())
    host.setAccessibleName(title)


def time_labels() -> QHBoxLayout:
    """Return the labels of a two-minute time axis."""
    row = QHBoxLayout()
    row.setContentsMargins(AXIS_WIDTH, 0, 0, 0)
    sides = (Qt.AlignmentFlag.AlignLeft, Qt.AlignmentFlag.AlignHCenter, Qt.AlignmentFlag.AlignRight)
    for text, side in zip(("−120 s", "−60 s", "now"), sides, strict=True):
        row.addWidget(label(text, "muted"), 1, side)
    return row


def _highest(values: Floats) -> float:
    finite = values[values == values]
    return float(finite.max()) if finite.size else 0.0
