"""Check of the form of answers that somebody is writing, such as a JSON schema."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QObject, QTimer, Signal, Slot

import engine
from app.core.background import LatestJob
from app.core.engine_sentences import translated
from engine import EngineError, SamplingParams

PAUSE_MS = 400
"""Milliseconds without a change after which a form is checked."""


class FormCheck(QObject):
    """Says what is wrong with the form that settings ask for, once it is not changed any more."""

    checked = Signal(str)  # a sentence; "" if nothing is wrong

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._form: tuple[str, str, str] = ("", "", "")
        self._job = LatestJob("tandem-form", self)
        self._pause = QTimer(self, interval=PAUSE_MS, singleShot=True)
        self._pause.timeout.connect(self._check)
        self._job.done.connect(lambda _: self.checked.emit(""))
        self._job.failed.connect(self._on_failed)

    def look_at(self, params: SamplingParams) -> None:
        """Check the form of settings soon, if it is another one."""
        form = params.json_schema, params.grammar, params.regex
        if form == self._form:
            return
        self._form = form
        self._job.drop()
        self.checked.emit("")
        if any(form):
            self._pause.start()
        else:
            self._pause.stop()

    def close(self) -> None:
        """Wait for the thread."""
        self._pause.stop()
        self._job.close()

    @Slot()
    def _check(self) -> None:
        self._job.run(partial(_check, *self._form))

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self.checked.emit(translated(str(error)))


def _check(json_schema: str, grammar: str, regex: str) -> None:
    form = engine.form_of(json_schema, grammar, regex)
    if form is not None:
        engine.check_grammar(form)
