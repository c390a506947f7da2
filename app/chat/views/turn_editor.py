"""The editor that takes the place of a message while its text is changed."""

from __future__ import annotations

from PySide6.QtCore import Signal, Slot
from PySide6.QtGui import QKeyEvent, QTextCursor
from PySide6.QtWidgets import QFrame, QHBoxLayout, QVBoxLayout, QWidget

from app.chat.views.composer import GrowingEdit
from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.shortcuts import is_pressed


class TurnEditor(QFrame):
    """Editor of a message: Esc cancels; Enter sends a question again, Ctrl+Enter saves an answer.

    In an answer, which has many lines, Enter starts another one.
    """

    accepted = Signal(str)
    cancelled = Signal()

    def __init__(self, text: str, parent: QWidget, *, is_answer: bool = False) -> None:
        super().__init__(parent)
        self.setProperty("role", "composer")
        self.edit = GrowingEdit(self, has_lines=is_answer)
        name = tr("Edit the answer") if is_answer else tr("Edit your message")
        self.edit.setAccessibleName(name)
        self.edit.setPlainText(text)
        self.edit.moveCursor(QTextCursor.MoveOperation.End)
        self.edit.submitted.connect(self._accept)
        self.edit.focus_changed.connect(self.update)
        self.setFocusProxy(self.edit)  # the frame shows the focus
        cancel = button(tr("Cancel"), "quiet", tr("Cancel editing"))
        cancel.clicked.connect(self.cancelled)
        accept = button(tr("Save") if is_answer else tr("Send again"), "primary")
        accept.clicked.connect(self._accept)
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(cancel)
        row.addWidget(accept)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(14, 10, 10, 10)
        layout.addWidget(self.edit)
        layout.addLayout(row)

    @Slot()
    def _accept(self) -> None:
        self.accepted.emit(self.edit.toPlainText())

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("leave-edit", event):
            self.cancelled.emit()
        else:
            super().keyPressEvent(event)
