"""The mouse wheel."""

from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QApplication, QWidget


def wheel(
    widget: QWidget, notches: int = -1, keys: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier
) -> QWheelEvent:
    """Turn the wheel over a widget: towards the user, unless `notches` is positive."""
    place = QPointF(widget.rect().center())
    event = QWheelEvent(
        place, widget.mapToGlobal(place), QPoint(), QPoint(0, 120 * notches),
        Qt.MouseButton.NoButton, keys, Qt.ScrollPhase.NoScrollPhase, False,
    )  # fmt: skip
    QApplication.sendEvent(widget, event)
    return event
