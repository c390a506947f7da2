"""What a chat template makes of a short conversation, rendered on a thread."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QObject, Signal, Slot

import engine
from app.core.background import LatestJob
from app.core.translation import tr
from engine import EngineError


@dataclass(frozen=True, slots=True)
class TemplatePreview:
    """A chat template and its text.

    Attributes:
        source: the template's source: the file's, where no other was given.
        text: prompt of the sample conversation; "" if there is a problem.
        problem: why it cannot be rendered, as a sentence; "" if it can.
    """

    source: str
    text: str = ""
    problem: str = ""


class TemplatePreviewer(QObject):
    """Renderer of previews; of several that are asked for, the newest counts.

    Templates are rendered in a child process with limits of time and memory.
    """

    made = Signal(object)  # TemplatePreview

    def __init__(self, path: str, parent: QObject) -> None:
        super().__init__(parent)
        self._path = path
        self._job = LatestJob("tandem-preview", self)
        self._job.done.connect(self.made)
        self._job.failed.connect(self._on_failed)

    def ask(self, source: str) -> None:
        """Render a template, the file's own if `source` is empty; `made` follows."""
        self._source, turns = source, sample()
        path = self._path
        self._job.run(lambda: _rendered(path, source, turns))

    def close(self) -> None:
        """Wait for the thread."""
        self._job.close()

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self.made.emit(TemplatePreview(self._source, problem=str(error)))


def sample() -> list[dict[str, str]]:
    """Return the conversation of the preview."""
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
        return TemplatePreview(template.source, problem=str(error))
