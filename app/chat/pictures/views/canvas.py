"""A picture on screen: empty at first, then with its pixels, as sharp as the screen is."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QImage, QPainter, QPainterPath, QPaintEvent
from PySide6.QtWidgets import QWidget

from app.core.scale import px
from app.widgets.theme import theme

RADIUS = 6


def paint_picture(painter: QPainter, area: QRectF, image: QImage | None, note: str) -> None:
    """Paint a picture with round corners into an area of its proportions.

    Args:
        image: the picture; None while it is not there.
        note: words in its place.
    """
    path = QPainterPath()
    path.addRoundedRect(area, px(RADIUS), px(RADIUS))
    painter.setRenderHints(
        QPainter.RenderHint.Antialiasing | QPainter.RenderHint.SmoothPixmapTransform
    )
    painter.fillPath(path, QColor(theme().line))
    if image is not None:
        painter.save()
        painter.setClipPath(path)
        painter.drawImage(area, image)
        painter.restore()
    elif note:
        painter.setPen(QColor(theme().muted))
        flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
        painter.drawText(area.adjusted(px(6), 0, -px(6), 0), flags, note)


def fitting(width: int, height: int, box: QSize) -> QSize:
    """Return the size of a picture within a box: no larger than it is, at least some pixels."""
    size = QSize(max(1, width), max(1, height))
    if size.width() > box.width() or size.height() > box.height():
        size = size.scaled(box, Qt.AspectRatioMode.KeepAspectRatio)
    least = px(24)
    return size.expandedTo(QSize(min(least, box.width()), min(least, box.height())))


class PictureCanvas(QWidget):
    """A small picture.

    Args:
        size: its size in pixels of the window.
    """

    def __init__(self, size: QSize, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.image: QImage | None = None
        self._note = ""
        self.setFixedSize(size)

    def set_image(self, image: QImage) -> None:
        self.image = image
        self.update()

    def set_note(self, note: str) -> None:
        """Show words, since there is no picture."""
        self._note = note
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        paint_picture(painter, QRectF(self.rect()), self.image, self._note)
        painter.end()
