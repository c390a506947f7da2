"""Bar for the whole model, divided into shares by draggable handles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFocusEvent,
    QFont,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPainterPath,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtWidgets import QAbstractSlider, QSizePolicy, QWidget

from app.core.units import percent_text
from app.widgets.shortcuts import is_pressed
from app.widgets.text import set_tip
from app.widgets.theme import mix, px, theme

STEPS = 1000  # resolution of handle positions for assistive technology
PAGE = 10  # notches per PageUp or PageDown
TO_THE_END = 1_000_000  # notches per Home or End; more than any handle has
NOTCHES = {
    "handle-right": 1, "handle-left": -1, "handle-far-right": PAGE, "handle-far-left": -PAGE,
    "handle-first": -TO_THE_END, "handle-last": TO_THE_END,
}  # fmt: skip
"""Notches by which each shortcut moves a handle."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of the bar for one rank.

    Attributes:
        share: width as a fraction of the bar.
        spoken: sentence for screen readers.
        is_taker: whether the rank holds only moved tensors and therefore has no handle.
        is_locked: whether the handles at both ends are fixed.
    """

    colour_index: int
    share: float
    spoken: str
    is_taker: bool = False
    is_locked: bool = False


class ShareBar(QWidget):
    """Bar of segments with a handle between adjacent ones.

    Drags and keys only emit the requested position; the session then updates the segments.
    """

    dragged = Signal(int, float)  # handle, position from 0 to 1
    stepped = Signal(int, int)  # handle, notches
    gesture_began = Signal()
    gesture_ended = Signal()

    HEIGHT = 26

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._segments: tuple[Segment, ...] = ()
        self._handles: list[ShareHandle] = []
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    @property
    def handles(self) -> Sequence[ShareHandle]:
        """Handles from left to right."""
        return self._handles

    def set_segments(self, segments: Sequence[Segment]) -> None:
        """Show segments; takers come last."""
        if tuple(segments) == self._segments:
            return
        self._segments = tuple(segments)
        n_handles = max(0, sum(not segment.is_taker for segment in segments) - 1)
        while len(self._handles) > n_handles:
            handle = self._handles.pop()
            handle.hide()  # moves the focus to the next widget
            handle.deleteLater()
        while len(self._handles) < n_handles:
            handle = ShareHandle(len(self._handles), self)
            handle.moved.connect(self.dragged)
            handle.stepped.connect(self.stepped)
            handle.gesture_began.connect(self.gesture_began)
            handle.gesture_ended.connect(self.gesture_ended)
            handle.show()
            self._handles.append(handle)
        self._place_handles()
        self.update()

    def position_at(self, x: float) -> float:
        """Return the position in the bar, 0 to 1, for an x coordinate in pixels."""
        return min(1.0, max(0.0, x / max(1, self.width())))

    def _place_handles(self) -> None:
        position = 0.0
        for handle, left, right in zip(
            self._handles, self._segments, self._segments[1:], strict=False
        ):
            position += left.share
            is_fixed = left.is_locked or right.is_locked
            handle.place(position, f"{left.spoken}. {right.spoken}", is_fixed=is_fixed)

    def sizeHint(self) -> QSize:
        return QSize(240, px(self.HEIGHT))

    def resizeEvent(self, event: QResizeEvent) -> None:
        self._place_handles()

    def paintEvent(self, event: QPaintEvent) -> None:
        colours = theme()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        clip = QPainterPath()
        clip.addRoundedRect(QRectF(self.rect()), 5, 5)
        painter.setClipPath(clip)
        painter.fillRect(self.rect(), QColor(colours.raised))
        font = QFont(self.font())
        font.setPixelSize(px(11))
        font.setWeight(QFont.Weight.DemiBold)
        painter.setFont(font)
        left = 0.0
        for segment in self._segments:
            width = segment.share * self.width()
            area = QRectF(left, 0, width, self.height())
            painter.fillRect(area, QColor(colours.device_colour(segment.colour_index)))
            text = percent_text(segment.share)
            if painter.fontMetrics().horizontalAdvance(text) + 12 <= width:
                painter.setPen(QColor(colours.on_accent))
                painter.drawText(area, Qt.AlignmentFlag.AlignCenter, text)
            left += width


class ShareHandle(QAbstractSlider):
    """Handle between two segments; a slider to assistive technology."""

    moved = Signal(int, float)
    stepped = Signal(int, int)
    gesture_began = Signal()
    gesture_ended = Signal()

    WIDTH = 14

    def __init__(self, index: int, bar: ShareBar) -> None:
        super().__init__(bar)
        self.index = index
        self._bar = bar
        self._grip = 0.0
        self.setRange(0, STEPS)
        self.setOrientation(Qt.Orientation.Horizontal)
        self.setCursor(Qt.CursorShape.SplitHCursor)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def place(self, position: float, spoken: str, *, is_fixed: bool) -> None:
        """Move to `position`, 0 to 1; `is_fixed` (a neighbour is locked) prevents drags."""
        centre = position * self._bar.width()
        width = px(self.WIDTH)
        left = min(self._bar.width() - width, max(0, round(centre - width / 2)))
        self.setGeometry(left, 0, width, self._bar.height())
        self.setValue(round(position * STEPS))
        self.setEnabled(not is_fixed)
        if is_fixed:
            spoken = f"Locked. {spoken}"
        if spoken != self.accessibleName():
            self.setAccessibleName(spoken)
            set_tip(self, spoken)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        self._grip = event.position().x() - self.width() / 2
        self.setSliderDown(True)
        self.raise_()
        self.gesture_began.emit()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self.isSliderDown():
            x = self.mapToParent(event.position() - QPointF(self._grip, 0)).x()
            self.moved.emit(self.index, self._bar.position_at(x))

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        self.setSliderDown(False)
        self.gesture_ended.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        for name, notches in NOTCHES.items():
            if is_pressed(name, event):
                self.stepped.emit(self.index, notches)
                return
        event.ignore()

    def focusInEvent(self, event: QFocusEvent) -> None:
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        colours = theme()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        area = QRectF(self.rect()).adjusted(3, 1, -3, -1)
        grip = colours.text if self.isEnabled() else mix(colours.muted, colours.surface, 0.3)
        painter.setBrush(QColor(grip))
        painter.setPen(QPen(QColor(colours.surface), 2))
        painter.drawRoundedRect(area, 3.5, 3.5)
        if self.hasFocus():  # not only an outline, which could blend into a segment
            painter.setPen(QPen(QColor(colours.text), 2))
            painter.setBrush(QColor(colours.accent))
            painter.drawRoundedRect(area.adjusted(-1, 1, 1, -1), 3.5, 3.5)
