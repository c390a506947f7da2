"""Finds texts in a window that have less room than they need."""

from __future__ import annotations

from collections.abc import Iterator

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractScrollArea,
    QAbstractSpinBox,
    QCheckBox,
    QComboBox,
    QHeaderView,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QStyle,
    QStyleOptionComboBox,
    QStyleOptionFrame,
    QTabBar,
    QToolButton,
    QWidget,
)

from app.widgets.buttons import ElidedButton
from app.widgets.text import ElidedLabel

LINE_MARGIN = 2
"""Pixels that Qt leaves free at both ends of a line's text."""


def clipped(root: QWidget) -> list[str]:
    """Return the visible texts below a widget that do not fit, with need and room in pixels.

    A label or a button that ends behind an edge of what shows it does not fit, either.
    """
    found = []
    for widget in (root, *root.findChildren(QWidget)):
        if not widget.isVisible():
            continue
        for text, need, room in (*_needs(widget), *_behind_an_edge(widget)):
            if text.strip() and need > room:
                found.append(f"{type(widget).__name__} “{text[:60]}”: {need} of {room} px")
    return found


def _needs(widget: QWidget) -> Iterator[tuple[str, int, int]]:
    """Yield the texts of a widget, the pixels that each needs, and those that it has."""
    if isinstance(widget, ElidedLabel | ElidedButton):
        return  # ends in "…", and has a tool tip
    if isinstance(widget, QLabel):
        yield from _label_needs(widget)
    elif isinstance(widget, QTabBar):
        yield from _tab_needs(widget)
    elif isinstance(widget, QHeaderView):
        yield from _header_needs(widget)
    elif isinstance(widget, QPushButton | QCheckBox | QToolButton):
        if widget.text():
            yield widget.text(), _hint(widget).width(), widget.width()
    elif isinstance(widget, QAbstractButton):
        yield widget.text(), _width(widget, widget.text()), widget.width()
    else:
        yield from _field_needs(widget)


def _field_needs(widget: QWidget) -> Iterator[tuple[str, int, int]]:
    """Yield the needs of a field that people fill in: its choices, value or hint."""
    if isinstance(widget, QComboBox):
        yield from _choice_needs(widget)
    elif isinstance(widget, QAbstractSpinBox):
        yield widget.text(), _width(widget, widget.text()), widget.lineEdit().width()
    elif isinstance(widget, QLineEdit) and not isinstance(widget.parent(), QAbstractSpinBox):
        yield widget.placeholderText(), _width(widget, widget.placeholderText()), _inside(widget)
    elif isinstance(widget, QPlainTextEdit) and not widget.toPlainText():
        is_one_line = widget.viewport().height() < 2 * widget.fontMetrics().lineSpacing()
        text = widget.placeholderText() if is_one_line else ""
        room = widget.viewport().width() - 2 * round(widget.document().documentMargin())
        yield text, _width(widget, text), room


def _behind_an_edge(widget: QWidget) -> Iterator[tuple[str, int, int]]:
    """Yield the text of a label or button, its width, and the width that is seen of it."""
    seen = widget.visibleRegion().boundingRect().width()
    if not seen or _can_scroll(widget):
        return  # further down, or behind a tab
    if isinstance(widget, QLabel | QPushButton | QCheckBox):
        yield widget.text(), widget.width(), seen


def _can_scroll(widget: QWidget) -> bool:
    """Return whether a bar scrolls to what is behind the right edge."""
    around = widget.parentWidget()
    while around is not None:
        if isinstance(around, QAbstractScrollArea) and around.horizontalScrollBar().isVisible():
            return True
        around = around.parentWidget()
    return False


def _label_needs(label: QLabel) -> Iterator[tuple[str, int, int]]:
    if label.textFormat() is Qt.TextFormat.RichText:
        return  # a legend, which breaks its lines
    if not label.wordWrap():
        yield label.text(), _hint(label).width(), label.width()
        return
    yield label.text(), label.heightForWidth(label.width()), label.height()
    longest = max(label.text().replace("\u200b", " ").split(), key=len, default="")
    yield longest, _width(label, longest), label.contentsRect().width()


def _tab_needs(tabs: QTabBar) -> Iterator[tuple[str, int, int]]:
    for at in range(tabs.count()):
        shown = tabs.tabRect(at).intersected(tabs.rect())
        yield tabs.tabText(at), _width(tabs, tabs.tabText(at)), shown.width()


def _header_needs(header: QHeaderView) -> Iterator[tuple[str, int, int]]:
    if header.orientation() is not Qt.Orientation.Horizontal or header.model() is None:
        return
    if type(header) is not QHeaderView:
        return  # one that paints its titles by itself
    margin = header.style().pixelMetric(QStyle.PixelMetric.PM_HeaderMargin, None, header)
    for at in range(header.count()):
        text = str(header.model().headerData(at, header.orientation()) or "")
        if not header.isSectionHidden(at):
            yield text, _width(header, text) + 2 * margin, header.sectionSize(at)


def _choice_needs(box: QComboBox) -> Iterator[tuple[str, int, int]]:
    option = QStyleOptionComboBox()
    box.initStyleOption(option)
    control, field = QStyle.ComplexControl.CC_ComboBox, QStyle.SubControl.SC_ComboBoxEditField
    room = box.style().subControlRect(control, option, field, box).width()
    for at in range(box.count()):
        yield box.itemText(at), _width(box, box.itemText(at)), room


def _inside(line: QLineEdit) -> int:
    """Return the width that the text of a line has, between its frame and its margins."""
    option = QStyleOptionFrame()
    line.initStyleOption(option)
    part = QStyle.SubElement.SE_LineEditContents
    return line.style().subElementRect(part, option, line).width() - 2 * LINE_MARGIN


def _hint(widget: QWidget) -> QSize:
    widget.ensurePolished()
    return widget.sizeHint()


def _width(widget: QWidget, text: str) -> int:
    return widget.fontMetrics().horizontalAdvance(text)
