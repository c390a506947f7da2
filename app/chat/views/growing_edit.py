"""A text field as high as its text; Enter submits it, Shift+Enter starts a line."""

from __future__ import annotations

from PySide6.QtCore import QMimeData, QSize, Qt, Signal, Slot
from PySide6.QtGui import QFocusEvent, QImage, QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QSizePolicy, QWidget

from app.widgets.shortcuts import is_pressed
from app.widgets.theme import theme_signals

MAX_LINES = 12

PICTURE_KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
"""Types of pictures that are taken as they come, and read elsewhere."""


class GrowingEdit(QPlainTextEdit):
    """Text field that grows from one line to twelve, then scrolls.

    Args:
        has_lines: whether Enter starts a line and Ctrl+Enter submits.
    """

    submitted = Signal()
    focus_changed = Signal()
    files_given = Signal(list)  # paths of files that were pasted, if `takes_files`
    picture_pasted = Signal(object)  # bytes of a file, or a QImage, if `takes_files`

    def __init__(self, parent: QWidget | None = None, *, has_lines: bool = False) -> None:
        super().__init__(parent)
        self._has_lines = has_lines
        self.takes_files = False
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setTabChangesFocus(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setProperty("role", "message")
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self._fit)
        theme_signals().changed.connect(self._fit)
        self._fit()

    @Slot()
    def _fit(self) -> None:
        n_lines = max(1, int(self.document().size().height()))  # a plain text layout counts lines
        height = min(n_lines, MAX_LINES) * self.fontMetrics().lineSpacing() + 6
        is_scrolling = n_lines > MAX_LINES
        policy = Qt.ScrollBarPolicy
        self.setVerticalScrollBarPolicy(
            policy.ScrollBarAsNeeded if is_scrolling else policy.ScrollBarAlwaysOff
        )
        if height != self.height():
            self.setFixedHeight(height)

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self.height())

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("new-line", event):
            super().keyPressEvent(event)
        elif is_pressed("submit-lines" if self._has_lines else "send", event):
            self.submitted.emit()
        elif is_pressed("stop", event):
            event.ignore()
        else:
            super().keyPressEvent(event)

    def canInsertFromMimeData(self, source: QMimeData) -> bool:  # noqa: N802 Qt
        """Refuse files, which the window opens instead."""
        if self.takes_files and has_picture(source) and not source.hasUrls():
            return True
        return not source.hasUrls() and super().canInsertFromMimeData(source)

    def insertFromMimeData(self, source: QMimeData) -> None:  # noqa: N802 Qt
        """Take pasted files and pictures, where these are wanted."""
        paths = local_files(source) if self.takes_files else []
        picture = pasted_picture(source) if self.takes_files and not paths else None
        if paths:
            self.files_given.emit(paths)
        elif picture is not None:
            self.picture_pasted.emit(picture)
        else:
            super().insertFromMimeData(source)

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.focus_changed.emit()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.focus_changed.emit()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()


def local_files(data: QMimeData) -> list[str]:
    """Return the paths of files that are pasted or dropped."""
    return [url.toLocalFile() for url in data.urls() if url.isLocalFile()]


def has_picture(data: QMimeData) -> bool:
    """Return whether something is a picture, and no text."""
    is_picture = data.hasImage() or any(map(data.hasFormat, PICTURE_KINDS))
    return is_picture and not data.hasFormat("text/plain")


def pasted_picture(data: QMimeData) -> bytes | QImage | None:
    """Return a picture that is pasted or dropped: the bytes of its file, where it has these."""
    if not has_picture(data):
        return None
    kind = next((kind for kind in PICTURE_KINDS if data.hasFormat(kind)), None)
    if kind is not None:
        return bytes(data.data(kind).data())
    image = data.imageData()
    return image if isinstance(image, QImage) and not image.isNull() else None
