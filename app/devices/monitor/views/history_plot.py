"""A small graph of the last two minutes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from app.core.scale import px
from app.core.translation import tr
from app.devices.monitor.history import SeriesHistory
from app.devices.monitor.views.graph import AXIS_WIDTH, WINDOW_S, Curve, Graph
from app.widgets.axis import nice_top
from app.widgets.sizes import scaled
from app.widgets.text import LegendLabel, Sign, label, set_tip
from app.widgets.theme import theme

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
