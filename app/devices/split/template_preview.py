"""Chat template editor with a preview, which is rendered on a thread."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QObject, QSignalBlocker, QTimer, Signal, Slot
from PySide6.QtGui import QFontDatabase
from PySide6.QtWidgets import QDialog, QHBoxLayout, QPlainTextEdit, QVBoxLayout, QWidget

import engine
from app.core.background import LatestJob
from app.core.translation import tr, translated
from app.widgets.buttons import button
from app.widgets.layout import fill
from app.widgets.text import label
from app.widgets.theme import set_role
from engine import EngineError


@dataclass(frozen=True, slots=True)
class TemplatePreview:
    """A chat template's source, with the prompt that it renders or an error."""

    source: str
    text: str = ""
    problem: str = ""


class TemplatePreviewer(QObject):
    """Renders previews in a child process with time and memory limits; the newest request wins."""

    made = Signal(object)  # TemplatePreview

    def __init__(self, path: str, parent: QObject) -> None:
        super().__init__(parent)
        self._path = path
        self._job = LatestJob("tandem-preview", self)
        self._job.done.connect(self.made)
        self._job.failed.connect(self._on_failed)

    def ask(self, source: str) -> None:
        """Render `source`, or the file's template if it is empty; emit `made` with the result."""
        self._source, turns = source, sample()
        path = self._path
        self._job.run(lambda: _rendered(path, source, turns))

    def close(self) -> None:
        """Wait for the thread."""
        self._job.close()

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self.made.emit(TemplatePreview(self._source, problem=translated(error.message)))


def sample() -> list[dict[str, str]]:
    """Return the conversation that previews render."""
    return [
        {"role": "system", "content": tr("You are a helpful assistant.")},
        {"role": "user", "content": tr("Hello!")},
        {"role": "assistant", "content": tr("Hi, what can I do for you?")},
        {"role": "user", "content": tr("Tell me about whales.")},
    ]


def _rendered(path: str, source: str, turns: list[dict[str, str]]) -> TemplatePreview:
    template = engine.load_chat_template(path, source)
    try:
        return TemplatePreview(template.source, template.render(turns))
    except EngineError as error:
        return TemplatePreview(template.source, problem=translated(error.message))


TYPED_MS = 400  # milliseconds from the last keystroke to the preview


class TemplateDialog(QDialog):
    """Editor for a template's source, above the prompt that it renders."""

    typed = Signal(str)  # source, shortly after the last keystroke
    chosen = Signal(str)  # source; "" for the file's template

    def __init__(self, parent: QWidget, source: str) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Chat template"))
        self.resize(720, 640)
        self._own, self._of_the_file = source, ""
        self.source, self.preview = QPlainTextEdit(), QPlainTextEdit()
        self.use = button(tr("Use this template"), "primary")
        self.reset = button(tr("Use the file's"))
        self._note = label(tr("The prompt for a short conversation"), "muted")
        self._timer = QTimer(self, singleShot=True, interval=TYPED_MS)
        self._timer.timeout.connect(self.flush)
        self._build()
        self.source.textChanged.connect(self._timer.start)
        self.use.clicked.connect(self._on_use)
        self.reset.clicked.connect(self._on_reset)

    @Slot()
    def flush(self) -> None:
        """Request the preview immediately."""
        self._timer.stop()
        self.typed.emit(self.source.toPlainText())

    @Slot(object)
    def show_preview(self, made: TemplatePreview) -> None:
        """Show a preview; if the editor is empty, put the previewed template into it."""
        if not self.source.toPlainText():
            self._of_the_file = made.source
            with QSignalBlocker(self.source):
                self.source.setPlainText(made.source)
        self.preview.setPlainText(made.problem or made.text)
        caption = tr("The prompt for a short conversation")
        self._note.setText(tr("This template does not work:") if made.problem else caption)
        set_role(self._note, "warn" if made.problem else "muted")
        self.use.setEnabled(not made.problem)

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
        row = fill(QHBoxLayout(), self.reset, None, cancel, self.use)
        heading = label(tr("Template (Jinja)"), "heading")
        fill(
            QVBoxLayout(self), heading, (self.source, 3), self._note, (self.preview, 2), row,
            margins=(16, 16, 16, 16), spacing=8,
        )  # fmt: skip
