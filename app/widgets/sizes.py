"""Sizes of widgets that follow the zoom."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Slot
from PySide6.QtWidgets import QAbstractScrollArea, QWidget

from app.core.scale import px
from app.widgets.theme import theme_signals


class _Scaled(QObject):
    """A setter of a widget that is called again whenever the zoom may have changed."""

    def __init__(self, widget: QWidget, apply: Callable[..., object], sizes: tuple[int, ...]):
        super().__init__(widget)
        self._apply, self._sizes = apply, sizes
        theme_signals().changed.connect(self._refresh)
        self._refresh()

    @Slot()
    def _refresh(self) -> None:
        self._apply(*map(px, self._sizes))


def scaled(widget: QWidget, apply: Callable[..., object], *sizes: int) -> None:
    """Call `apply` with sizes in pixels at the present zoom, now and after each change of it.

    Args:
        widget: the widget with whose end this ends.
    """
    _Scaled(widget, apply, sizes)


def fit_height(area: QAbstractScrollArea, height: int) -> None:
    """Make an area as high as its content, and as the bar by which that scrolls sideways."""
    bar = area.horizontalScrollBar()
    if bar.maximum() > 0:
        height += bar.sizeHint().height()
    if height != area.height():
        area.setFixedHeight(height)
