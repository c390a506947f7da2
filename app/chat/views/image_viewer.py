"""The image viewer, with fitted or actual size and buttons to copy and save."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import QRectF, QSize, Qt, Slot
from PySide6.QtGui import QColor, QImage, QPainter, QPainterPath, QPaintEvent, QPixmap, QResizeEvent
from PySide6.QtWidgets import QDialog, QHBoxLayout, QScrollArea, QVBoxLayout, QWidget
from shiboken6 import isValid

from app.chat.images.album import MAX_SIDE, ImageAlbum
from app.chat.message import ChatImage
from app.core.translation import tr
from app.widgets.buttons import IconButton, button
from app.widgets.shortcuts import make_local_shortcut
from app.widgets.text import ElidedLabel, ask_where_to_save, label
from app.widgets.theme import px, theme
from engine import EngineError

PART_OF_WINDOW: Final = 0.92
MIN_SIZE: Final = (320, 280)


class ImageViewer(QDialog):
    """Viewer for a message's images, starting with image `at`; Escape closes it."""

    def __init__(
        self, pictures: Sequence[ChatImage], at: int, album: ImageAlbum, over: QWidget
    ) -> None:
        super().__init__(over)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self._pictures, self._at, self._album = pictures, at, album
        self.image: QImage | None = None
        self._note = ""  # text shown instead of the image
        self._is_fitted = True
        self._label = label()
        self._label.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._area = QScrollArea()
        self._area.setFrameShape(QScrollArea.Shape.NoFrame)
        self._area.setWidget(self._label)
        self._area.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._title = ElidedLabel()
        self._title.setProperty("role", "muted")
        self._make_buttons()
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 12, 12, 12)
        column.addWidget(self._area, 1)
        column.addLayout(self._row)
        for name, step in (("picture-before", -1), ("picture-after", 1)):
            make_local_shortcut(name, self, partial(self._go, step))
        size = over.window().size() * PART_OF_WINDOW
        self.resize(size.expandedTo(QSize(px(MIN_SIZE[0]), px(MIN_SIZE[1]))))
        self._load()

    def _make_buttons(self) -> None:
        self._zoom = button("", "quiet")
        self._zoom.clicked.connect(self._toggle)
        copy = button(tr("Copy"), "quiet", tr("Copy image"))
        copy.clicked.connect(self.copy)
        save = button(tr("Save as…"), "quiet", tr("Save image as…"))
        save.clicked.connect(self._save)
        close = button(tr("Close"), "")
        close.clicked.connect(self.accept)
        self._row = QHBoxLayout()
        self._row.addWidget(self._title, 1)
        if len(self._pictures) > 1:
            for name, text, step in (
                ("chevron-left", tr("Previous image"), -1),
                ("chevron-right", tr("Next image"), 1),
            ):
                arrow = IconButton(name, text)
                arrow.clicked.connect(partial(self._go, step))
                self._row.addWidget(arrow)
        for made in (self._zoom, copy, save, close):
            self._row.addWidget(made)
        close.setDefault(True)
        close.setFocus()

    @property
    def picture(self) -> ChatImage:
        """The current image."""
        return self._pictures[self._at]

    @Slot()
    def copy(self) -> None:
        """Copy the image to the clipboard."""
        self._album.copy(self.picture)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._show()

    def _go(self, step: int, _is_checked: bool = False) -> None:
        self._at = (self._at + step) % len(self._pictures)
        self._load()

    def _load(self) -> None:
        picture = self.picture
        self.image, self._note = None, tr("reading…")
        self.setWindowTitle(picture.title)
        self._title.set_full_text(f"{picture.title} · {self._album.caption(picture)}")
        self._show()

        def take(found: QImage | EngineError) -> None:
            if not isValid(self) or picture is not self.picture:  # closed, or another image
                return
            if isinstance(found, QImage):
                self.image = found
            else:
                self._note = found.message
            self._show()

        self._album.show(picture, MAX_SIDE, take)

    def _show(self) -> None:
        fit, full = tr("Fit to window"), tr("Actual size")
        self._zoom.setText(full if self._is_fitted else fit)
        self._zoom.setEnabled(self.image is not None)
        if self.image is None:
            self._label.setText(self._note)
            self._label.adjustSize()
            return
        ratio = self.devicePixelRatioF()
        room = self._area.maximumViewportSize() * ratio
        image = self.image
        if self._is_fitted and (image.width() > room.width() or image.height() > room.height()):
            image = image.scaled(
                room, Qt.AspectRatioMode.KeepAspectRatio, Qt.TransformationMode.SmoothTransformation
            )
        pixmap = QPixmap.fromImage(image)
        pixmap.setDevicePixelRatio(ratio)
        self._label.setPixmap(pixmap)
        self._label.adjustSize()
        self._label.setAccessibleName(self.picture.title)

    @Slot()
    def _toggle(self) -> None:
        self._is_fitted = not self._is_fitted
        self._show()

    @Slot()
    def _save(self) -> None:
        stem, suffix = Path(self.picture.name).stem, Path(self.picture.file).suffix
        page = f"-{self.picture.page}" if self.picture.page else ""
        chosen, _ = ask_where_to_save(self, tr("Save image as…"), f"{stem}{page}{suffix}")
        if chosen:
            self._album.save_as(self.picture, Path(chosen))


RADIUS = 6


def paint_image(painter: QPainter, area: QRectF, image: QImage | None, note: str) -> None:
    """Paint an image with rounded corners, or `note` if there is none."""
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
    """Return an image's size when scaled down to fit a box; no side is less than a few pixels."""
    size = QSize(max(1, width), max(1, height))
    if size.width() > box.width() or size.height() > box.height():
        size = size.scaled(box, Qt.AspectRatioMode.KeepAspectRatio)
    least = px(24)
    return size.expandedTo(QSize(min(least, box.width()), min(least, box.height())))


class ImageCanvas(QWidget):
    """A small image with a fixed size."""

    def __init__(self, size: QSize, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.image: QImage | None = None
        self.setFixedSize(size)

    def set_image(self, image: QImage) -> None:
        self.image = image
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        paint_image(painter, QRectF(self.rect()), self.image, "")
        painter.end()
