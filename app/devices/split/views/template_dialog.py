"""Dialog to use another chat template than the file's, with a preview of the prompt."""

from __future__ import annotations

from PySide6.QtCore import QSignalBlocker, QTimer, Signal, Slot
from PySide6.QtGui import QFontDatabase
from PySide6.QtWidgets import QDialog, QHBoxLayout, QPlainTextEdit, QVBoxLayout, QWidget

from app.core.translation import tr
from app.devices.split.template_preview import TemplatePreview
from app.widgets.buttons import button
from app.widgets.text import label
from app.widgets.theme import set_role

TYPED_MS = 400
"""Milliseconds after the last key until a template is rendered."""


class TemplateDialog(QDialog):
    """Editor of a template's source above the prompt that it makes.

    Attributes:
        source: editor of the source.
        preview: the prompt, or why there is none.
        use: button that takes the template.
        reset: button that takes the file's template again.
    """

    typed = Signal(str)  # source, a moment after the last key
    chosen = Signal(str)  # source; "" for the file's

    def __init__(self, parent: QWidget, source: str) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Chat template"))
        self.resize(720, 640)
        self._own, self._of_the_file = source, ""
        self.source, self.preview = QPlainTextEdit(), QPlainTextEdit()
        self.use = button(tr("Use this template"), "primary")
        self.reset = button(tr("Use the file's"))
        self._note = label(tr("The prompt of a short conversation"), "muted")
        self._timer = QTimer(self, singleShot=True, interval=TYPED_MS)
        self._timer.timeout.connect(self.flush)
        self._build()
        self.source.textChanged.connect(self._timer.start)
        self.use.clicked.connect(self._on_use)
        self.reset.clicked.connect(self._on_reset)

    @Slot()
    def flush(self) -> None:
        """Ask for the preview of what is typed now."""
        self._timer.stop()
        self.typed.emit(self.source.toPlainText())

    @Slot(object)
    def show_preview(self, made: TemplatePreview) -> None:
        """Show what a template makes; the first one also brings the file's source."""
        if not self.source.toPlainText():
            self._of_the_file = made.source
            with QSignalBlocker(self.source):
                self.source.setPlainText(made.source)
        self.preview.setPlainText(made.problem or made.text)
        self._note.setText((made.problem and tr("This template does not work:")) or self._caption())
        set_role(self._note, "warn" if made.problem else "muted")
        self.use.setEnabled(not made.problem)

    def _caption(self) -> str:
        return tr("The prompt of a short conversation")

    @Slot()
    def _on_use(self) -> None:
        text = self.source.toPlainText()
        self.chosen.emit("" if text == self._of_the_file else text)
        self.accept()

    @Slot()
    def _on_reset(self) -> None:
        self.chosen.emit("")
        self.accept()

    def _build(self) -> None:
        font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
        for edit, name in ((self.source, tr("Template source")), (self.preview, tr("Prompt"))):
            edit.setFont(font)
            edit.setAccessibleName(name)
            edit.setTabChangesFocus(True)
        self.preview.setReadOnly(True)
        self.source.setPlainText(self._own)
        cancel = button(tr("Cancel"))
        cancel.clicked.connect(self.reject)
        row = QHBoxLayout()
        row.addWidget(self.reset)
        row.addStretch()
        row.addWidget(cancel)
        row.addWidget(self.use)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(16, 16, 16, 16)
        layout.setSpacing(8)
        layout.addWidget(label(tr("Template (Jinja)"), "heading"))
        layout.addWidget(self.source, 3)
        layout.addWidget(self._note)
        layout.addWidget(self.preview, 2)
        layout.addLayout(row)
