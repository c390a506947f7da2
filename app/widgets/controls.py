"""Small controls: a switch, a dot, a sheet, fields that ignore the mouse wheel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from PySide6.QtCore import QEvent, QObject, QPoint, QRectF, QSignalBlocker, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QShowEvent
from PySide6.QtWidgets import (
    QAbstractButton,
    QDoubleSpinBox,
    QFrame,
    QLayout,
    QScrollArea,
    QScrollBar,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from app.widgets.layout import NO_MARGINS, fill, scaled
from app.widgets.theme import mix, px, theme

SHEET_WIDTH, MAX_SHEET_HEIGHT, SHEET_GAP = 420, 480, 6
"""A sheet's width, its maximum height and its distance from the opener, in pixels."""


def line() -> QWidget:
    """Return a thin horizontal line."""
    result = QWidget()
    result.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
    result.setProperty("role", "line")
    return result


class _WheelBlocker(QObject):
    def __init__(self, widget: QWidget, *, always: bool) -> None:
        super().__init__(widget)
        self._always = always
        widget.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        is_wheel = event.type() == QEvent.Type.Wheel
        if is_wheel and isinstance(watched, QWidget) and (self._always or not watched.hasFocus()):
            event.ignore()
            return True
        return False


def ignore_wheel(widget: QWidget, *, always: bool = False) -> None:
    """Let the mouse wheel scroll the panel instead of changing an unfocused field.

    Args:
        always: also while the field has the focus; for panels that are scrolled a lot.
    """
    widget.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
    _WheelBlocker(widget, always=always)


class _MarginKeeper(QObject):
    """Event filter that shrinks a margin by a visible scroll bar's width, so that nothing moves."""

    def __init__(self, bar: QScrollBar, layout: QLayout) -> None:
        super().__init__(bar)
        self._layout = layout
        self._margins = layout.contentsMargins()
        bar.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if isinstance(watched, QWidget) and event.type() in (QEvent.Type.Show, QEvent.Type.Hide):
            bar_width = watched.sizeHint().width() if event.type() == QEvent.Type.Show else 0
            left, right = self._margins.left(), self._margins.right()
            top, bottom = self._margins.top(), self._margins.bottom()
            self._layout.setContentsMargins(left, top, max(0, right - bar_width), bottom)
        return False


def keep_margin(scroll: QScrollArea, layout: QLayout) -> None:
    """Keep the right edge of `layout` in place, whether or not the scroll bar is visible."""
    _MarginKeeper(scroll.verticalScrollBar(), layout)


def page_scroll(content: QWidget, layout: QLayout, name: str) -> QScrollArea:
    """Return a frameless vertical scroll area for a page; `name` is for screen readers."""
    scroll = QScrollArea()
    scroll.setFrameShape(QFrame.Shape.NoFrame)
    scroll.setWidgetResizable(True)
    scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    scroll.setWidget(content)
    scroll.setAccessibleName(name)
    keep_margin(scroll, layout)
    return scroll


def show_number(field: QSpinBox | QDoubleSpinBox, value: float) -> None:
    """Show a value without emitting a signal or changing text that is being typed."""
    with QSignalBlocker(field):
        if isinstance(field, QSpinBox):
            if field.value() != round(value):
                field.setValue(round(value))
        elif field.value() != round(value, field.decimals()):
            field.setValue(value)


class Switch(QAbstractButton):
    """An on/off switch; checked means on."""

    WIDTH, HEIGHT = 28, 16

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setCheckable(True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)

    def sizeHint(self) -> QSize:
        return QSize(px(self.WIDTH) + 2, px(self.HEIGHT) + 2)

    def paintEvent(self, event: QPaintEvent) -> None:
        colours = theme()
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        width, height = px(self.WIDTH), px(self.HEIGHT)
        top = (self.height() - height) / 2
        track = QRectF(1, top, width, height)
        fill = colours.accent if self.isChecked() else mix(colours.line, colours.muted, 0.35)
        if not self.isEnabled():
            fill = mix(fill, colours.surface, 0.6)
        painter.setPen(QColor(colours.text) if self.hasFocus() else Qt.PenStyle.NoPen)
        painter.setBrush(QColor(fill))
        painter.drawRoundedRect(track, height / 2, height / 2)
        size = height - 4
        left = track.right() - size - 2 if self.isChecked() else track.left() + 2
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(colours.on_accent if self.isChecked() else colours.surface))
        painter.drawEllipse(QRectF(left, top + 2, size, size))


class ColourDot(QWidget):
    """A dot in a device's colour."""

    SIZE = 9

    def __init__(self, colour_index: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._colour_index = colour_index
        scaled(self, self.setFixedSize, self.SIZE, self.SIZE)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(theme().device_colour(self._colour_index)))
        painter.drawRoundedRect(QRectF(self.rect()), 2.5, 2.5)


class Sheet(QFrame):
    """A popup as high as the contents of `column`; Esc or a click outside it closes it."""

    def __init__(self, name: str, parent: QWidget) -> None:
        super().__init__(parent, Qt.WindowType.Popup)
        self.setObjectName("sheet")
        self.setAccessibleName(name)
        content = QWidget()
        self.column = fill(QVBoxLayout(content), margins=(16, 14, 16, 14), spacing=4)
        self._scroll = QScrollArea(widgetResizable=True)
        self._scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._scroll.setFrameShape(QFrame.Shape.NoFrame)
        self._scroll.setWidget(content)
        fill(QVBoxLayout(self), self._scroll, margins=NO_MARGINS)

    def show_below(self, opener: QWidget) -> None:
        """Open below a widget, within its window's width."""
        colours = theme()
        self.setStyleSheet(
            f"#sheet {{ background: {colours.surface}; border: 1px solid {colours.line};"
            " border-radius: 8px; }"
        )
        self.fit()
        window, gap = opener.window(), SHEET_GAP
        right = window.mapToGlobal(QPoint(window.width(), 0)).x() - self.width() - gap
        corner = opener.mapToGlobal(QPoint(0, opener.height() + gap))
        self.move(max(window.mapToGlobal(QPoint(gap, 0)).x(), min(corner.x(), right)), corner.y())
        self.show()

    def fit(self) -> None:
        """Fit the height to the content."""
        width = px(SHEET_WIDTH)
        self.setFixedWidth(width)
        needed = self.column.heightForWidth(width - 2)
        height = (needed if needed >= 0 else self.column.sizeHint().height()) + 2
        policy = Qt.ScrollBarPolicy
        is_long = height > MAX_SHEET_HEIGHT
        self._scroll.setVerticalScrollBarPolicy(
            policy.ScrollBarAsNeeded if is_long else policy.ScrollBarAlwaysOff
        )
        self.setFixedHeight(min(MAX_SHEET_HEIGHT, height))


W = TypeVar("W", bound=QWidget)


class LateWidget(QWidget, Generic[W]):
    """A widget that calls `make` to create its content on first use."""

    def __init__(self, make: Callable[[], W], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._make = make
        self._content: W | None = None
        self._column = fill(QVBoxLayout(self), margins=NO_MARGINS)

    @property
    def content(self) -> W:
        """The content, created on first use."""
        if self._content is None:
            self._content = self._make()
            self._column.addWidget(self._content)
        return self._content

    def showEvent(self, event: QShowEvent) -> None:
        _ = self.content
        super().showEvent(event)


HEADROOM: Final = 1.1  # minimum ratio of an axis's top to the highest value


def nice_top(highest: float) -> float:
    """Return an axis top with headroom above `highest`: 1, 2, 4, 5 or 8 times a power of ten."""
    least = max(1.0, highest * HEADROOM)
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= least)
