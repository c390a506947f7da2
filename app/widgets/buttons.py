"""Buttons, including icon buttons that follow the theme."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QSize, Qt, Signal, Slot
from PySide6.QtGui import QEnterEvent, QFocusEvent, QIcon, QResizeEvent
from PySide6.QtWidgets import QPushButton, QStyle, QStyleOptionButton, QToolButton, QWidget

from app.core.translation import tr
from app.widgets.shortcuts import with_keys
from app.widgets.text import caption_text, set_tip
from app.widgets.theme import icon, px, set_role, theme, theme_signals
from engine import one_line

MIN_SHOWN = "mmmm…"  # an elided button is at least wide enough for this


class IconButton(QToolButton):
    """A flat button that shows only an icon; its text is the accessible name and tooltip.

    Args:
        is_muted: whether to draw the icon in the muted colour while the button is not checked.
    """

    def __init__(
        self, name: str, text: str, parent: QWidget | None = None, *, size: int = 18,
        is_muted: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._name, self._is_muted, self._size = name, is_muted, size
        self.setAutoRaise(True)
        self.set_text(text)
        self.toggled.connect(self.refresh)
        theme_signals().changed.connect(self.refresh)
        self.refresh()

    def set_text(self, text: str) -> None:
        if text == self.toolTip():
            return
        self.setAccessibleName(text.partition(" (")[0])
        set_tip(self, text)

    def set_icon(self, name: str) -> None:
        """Show another icon."""
        if name != self._name:
            self._name = name
            self.refresh()

    @Slot()
    def refresh(self) -> None:
        self.setIconSize(QSize(px(self._size), px(self._size)))
        self.setIcon(self.current_icon())

    def current_icon(self) -> QIcon:
        quiet = self._is_muted and not self.isChecked()
        return icon(self._name, theme().muted if quiet else theme().text)


class HoverButton(IconButton):
    """Message button, visible only while hovered or focused; always in the tab order."""

    def __init__(self, name: str, text: str, parent: QWidget | None = None) -> None:
        self._is_shown = False
        super().__init__(name, text, parent, size=16)

    def set_shown(self, shown: bool) -> None:
        if shown != self._is_shown:
            self._is_shown = shown
            self.refresh()

    def current_icon(self) -> QIcon:
        return super().current_icon() if self._is_shown or self.hasFocus() else QIcon()

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.refresh()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.refresh()

    def enterEvent(self, event: QEnterEvent) -> None:
        super().enterEvent(event)
        self.set_shown(True)


class ElidedButton(QPushButton):
    """A push button that elides its text."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._full = ""
        self.set_full_text(text)

    def set_full_text(self, text: str) -> None:
        """Set the text and the accessible name."""
        self._full = one_line(text)
        self.setAccessibleName(self._full)
        self.updateGeometry()
        self._elide()

    def sizeHint(self) -> QSize:
        return self._size_for(self._full)

    def minimumSizeHint(self) -> QSize:
        return self._size_for(MIN_SHOWN)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._elide()

    def _elide(self) -> None:
        needed = self.fontMetrics().horizontalAdvance(self._full) + 1
        room = needed + self.width() - self.sizeHint().width()
        shown = self.fontMetrics().elidedText(self._full, Qt.TextElideMode.ElideRight, room)
        self.setText(caption_text(shown, 0))
        set_tip(self, self._full if shown != self._full else "")

    def _size_for(self, text: str) -> QSize:
        """Return the button's size with `text`, plus one pixel for fractional widths."""
        option = QStyleOptionButton()
        self.initStyleOption(option)
        room = QSize(self.fontMetrics().horizontalAdvance(text) + 1, super().sizeHint().height())
        size = self.style().sizeFromContents(QStyle.ContentsType.CT_PushButton, option, room, self)
        return QSize(size.width(), room.height())


class Chip(QPushButton):
    """A small button in a bar, hidden while it has no text."""

    changed = Signal()  # visibility or text

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        set_role(self, "chip")
        self._texts: tuple[str, ...] = ()
        self.hide()

    @property
    def is_wanted(self) -> bool:
        """Whether the button has text."""
        return bool(self._texts)

    def set_texts(self, texts: Sequence[str]) -> None:
        """Set texts, longest first; the longest that fits is shown. If empty, hide the button."""
        if tuple(texts) != self._texts:
            self._texts = tuple(texts)
            self.setAccessibleName(one_line(texts[0]) if texts else "")
            self.changed.emit()

    @property
    def least_width(self) -> int:
        """Width with the shortest text; 0 if there is no text."""
        return self._width_with(self._texts[-1]) if self._texts else 0

    def fit(self, width: int) -> None:
        """Show the longest text that fits, or the shortest if none fits."""
        for text in self._texts:
            if self._width_with(text) <= width:
                return

    def _width_with(self, text: str) -> int:
        """Show a text and return its width."""
        self.ensurePolished()  # applies the style sheet's padding
        self.setText(caption_text(text))
        return self.sizeHint().width()


def button(text: str, role: str = "", name: str = "") -> QPushButton:
    """Return a push button with a style sheet role."""
    made = QPushButton(caption_text(text))
    if role:
        made.setProperty("role", role)
    if name:
        made.setAccessibleName(one_line(name))
    return made


def back_button() -> IconButton:
    """Return the button for a page's corner that leads back to the chat."""
    return IconButton("close", with_keys(tr("Back to the chat"), "leave-page"), size=14)
