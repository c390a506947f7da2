"""A text field as high as its text; Enter submits it, Shift+Enter starts a line."""

from __future__ import annotations

from PySide6.QtCore import QMimeData, QSize, Qt, Signal, Slot
from PySide6.QtGui import QFocusEvent, QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QSizePolicy, QWidget

from app.theme import theme_signals
from app.widgets.shortcuts import is_pressed

MAX_LINES = 12


class GrowingEdit(QPlainTextEdit):
    """Text field that grows from one line to twelve, then scrolls.

    Args:
        has_lines: whether Enter starts a line and Ctrl+Enter submits.
    """

    submitted = Signal()
    focus_changed = Signal()
    files_given = Signal(list)  # paths of files that were pasted, if `takes_files`
    picture_pasted = Signal()  # if `takes_files`

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
        return not source.hasUrls() and super().canInsertFromMimeData(source)

    def insertFromMimeData(self, source: QMimeData) -> None:  # noqa: N802 Qt
        """Take pasted files, and no pictures, where these are wanted."""
        paths = local_files(source) if self.takes_files else []
        if paths:
            self.files_given.emit(paths)
        elif self.takes_files and source.hasImage() and not source.hasText():
            self.picture_pasted.emit()
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
