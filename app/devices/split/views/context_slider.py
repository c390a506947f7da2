"""Slider over context lengths, with a mark at the longest one that fits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import log2

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QSlider, QWidget

from app.core.scale import px
from app.widgets.theme import theme

HANDLE = 14
"""Width in pixels of the style sheet's handle, whose middle stands for the value."""


class ContextSlider(QSlider):
    """Slider that moves from stop to stop; beyond the mark its groove has the danger colour."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(Qt.Orientation.Horizontal, parent)
        self._stops: Sequence[int] = (1,)
        self._most: int | None = None

    def set_stops(self, stops: Sequence[int]) -> None:
        """Set the context lengths, in tokens, that the slider can stop at."""
        self._stops = stops
        self.setRange(0, len(stops) - 1)
        self.update()

    def set_most(self, n_ctx: int | None) -> None:
        """Mark the longest context that fits, in tokens; None if it is unknown."""
        if n_ctx != self._most:
            self._most = n_ctx
            self.update()

    @property
    def mark(self) -> float | None:
        """Position of the mark, 0 to 1; None where every stop fits or the limit is unknown."""
        if self._most is None or self._most >= self._stops[-1]:
            return None
        return self._place(self._most)

    def _place(self, n_ctx: int) -> float:
        """Return the position of a context length, 0 to 1, logarithmic between the stops."""
        last = len(self._stops) - 1
        if not last or n_ctx <= self._stops[0]:
            return 0.0
        left = min(last - 1, bisect_right(self._stops, n_ctx) - 1)
        low, high = self._stops[left], self._stops[left + 1]
        return (left + log2(n_ctx / low) / log2(high / low)) / last

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        mark = self.mark
        if mark is None:
            return
        colours, room = theme(), self.width() - px(HANDLE)
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        x, middle = px(HANDLE) / 2 + mark * room, self.height() / 2
        at = px(HANDLE) / 2 + self.value() / max(1, self.maximum()) * room
        for start, end in ((x, at - px(HANDLE) / 2), (max(x, at + px(HANDLE) / 2), self.width())):
            if end > start:
                painter.fillRect(QRectF(start, middle - 2, end - start, 4), QColor(colours.danger))
        if abs(x - at) > px(HANDLE) / 2:
            painter.fillRect(QRectF(x - 1, middle - 7, 2, 14), QColor(colours.text))
