"""A model file that is dropped on the window."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QMimeData, Qt
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QWidget

from app.core.scale import px
from app.core.translation import tr
from app.widgets.text import PlainLabel
from app.widgets.theme import theme
from engine import one_line

SUFFIX = ".gguf"


def dropped_model(data: QMimeData) -> str:
    """Return the first local .gguf among dropped files; "" if there is none."""
    paths = (url.toLocalFile() for url in data.urls() if url.isLocalFile())
    return next((path for path in paths if path.lower().endswith(SUFFIX)), "")


def accept_copy(event: QDropEvent) -> None:
    """Accept a drop as a copy: after a move, a file manager would delete the model's file."""
    event.setDropAction(Qt.DropAction.CopyAction)
    event.accept()


class DropHint(PlainLabel):
    """Cover of the window while a model file is dragged over it."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent=parent)
        self.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.hide()

    def show_for(self, path: str) -> None:
        colours = theme()
        room = max(200, self.width() * 2 // 3)
        text = one_line(tr("Drop to load {name}").format(name=Path(path).name))
        self.setText(self.fontMetrics().elidedText(text, Qt.TextElideMode.ElideMiddle, room))
        self.setStyleSheet(
            f"background: {colours.window}; color: {colours.text}; font-size: {px(18)}px;"
            f" border: 2px dashed {colours.accent};"
        )
        self.raise_()
        self.show()
