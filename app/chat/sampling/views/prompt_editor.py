"""Editor of the open chat's system prompt."""

from __future__ import annotations

from PySide6.QtCore import QSignalBlocker, QTimer, Signal, Slot
from PySide6.QtWidgets import QHBoxLayout, QPlainTextEdit, QVBoxLayout, QWidget

from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.sizes import scaled
from app.widgets.text import label

PROMPT_MS = 250
"""Milliseconds after the first key since the last report until a prompt is reported."""


class PromptEditor(QWidget):
    """Field for a system prompt, with a button that makes it the one of new chats.

    Attributes:
        edit: the field.
        keep: the button.
    """

    changed = Signal(str)
    default_requested = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.edit = QPlainTextEdit()
        self.edit.setPlaceholderText(tr("You are a helpful assistant."))
        self.edit.setAccessibleName(tr("System prompt"))
        self.edit.setTabChangesFocus(True)
        scaled(self.edit, self.edit.setFixedHeight, 88)
        self._timer = QTimer(self, singleShot=True, interval=PROMPT_MS)
        self._timer.timeout.connect(self._report)
        self.edit.textChanged.connect(self._on_typed)
        self.keep = button(tr("Use for new chats"), "quiet")
        self.keep.clicked.connect(self._keep)
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(self.keep)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        layout.addWidget(label(tr("System prompt of this chat"), "heading"))
        layout.addWidget(self.edit)
        layout.addLayout(row)

    def set_text(self, text: str) -> None:
        """Show a prompt without a signal."""
        self._timer.stop()
        if text != self.edit.toPlainText():
            with QSignalBlocker(self.edit):
                self.edit.setPlainText(text)

    def flush(self) -> None:
        """Report the prompt now, before a chat is opened or a message sent."""
        if self._timer.isActive():
            self._timer.stop()
            self._report()

    @Slot()
    def _on_typed(self) -> None:
        if not self._timer.isActive():  # typing on and on must not put it off
            self._timer.start()

    @Slot()
    def _report(self) -> None:
        self.changed.emit(self.edit.toPlainText())

    @Slot()
    def _keep(self) -> None:
        self.flush()
        self.default_requested.emit(self.edit.toPlainText())
