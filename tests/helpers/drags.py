"""Drags that enter a widget, in any version of Qt."""

from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt
from PySide6.QtGui import QDragEnterEvent

COPY = Qt.DropAction.CopyAction
NO_KEY = Qt.KeyboardModifier.NoModifier


def drag_enter(x: int, y: int, data: QMimeData) -> QDragEnterEvent:
    """Return the event of a drag that enters a widget at a place in it, in pixels."""
    button = Qt.MouseButton.LeftButton
    try:
        return QDragEnterEvent(QPointF(x, y), COPY, data, button, NO_KEY)
    except TypeError:  # before Qt 6.12
        return QDragEnterEvent(QPoint(x, y), COPY, data, button, NO_KEY)
