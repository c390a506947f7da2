"""The window as a process of its own that asks, answers and types without end, to be killed.

`python -m tests.helpers.window_process LOG SEED` writes into the file LOG, at once, what a person
has seen in the window: lines of JSON with the time, see `_note`.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from PySide6.QtCore import QTimer, Slot
from PySide6.QtWidgets import QApplication

import engine
from app.main import Shell
from app.run import run_window
from engine import Rig
from tests.helpers.fake_host import FakeHost, Script, model_info

WORDS = "All work and no play makes Jack a dull boy; ½ of it would do. "
ANSWER = WORDS * 200
TYPE_MS = 30


class DrivenShell(Shell):
    """The running application with a scripted engine, and somebody who never rests."""

    def __init__(self, app: QApplication, make_host: object, rig: Rig | None = None) -> None:
        self._log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._chance = random.Random(int(sys.argv[2]))
        self._script = Script(chunk=5, pause_s=0.004)
        super().__init__(app, lambda on_event: FakeHost(on_event, self._script), rig)
        self.session.answer_text.connect(self._on_text)
        self.session.busy_changed.connect(self._on_busy)
        self.client.loaded.connect(self._ask)
        self._typing = QTimer(self, interval=TYPE_MS)
        self._typing.timeout.connect(self._type)

    def start(self) -> None:
        super().start()
        chats = [chat.id for chat in self.session.library.summaries]
        self._note(started=chats, damaged=len(self.session.library.damaged))
        self.models.open("/models/tiny.gguf")

    def _note(self, **facts: Any) -> None:
        os.write(self._log, (json.dumps({"at": time.time(), **facts}) + "\n").encode())

    @Slot()
    def _ask(self) -> None:
        if self._chance.random() < 0.3:
            self.chat_presenter.new_chat()
        self._script.answer = ANSWER[: self._chance.randint(100, len(ANSWER))]
        self.chat_presenter.send("Go on")
        self._note(draft=0, chat=self.session.current.id)
        self._typing.start()

    @Slot()
    def _type(self) -> None:
        edit = self.window.composer.edit
        edit.moveCursor(edit.textCursor().MoveOperation.End)
        edit.insertPlainText("x")
        self._note(draft=len(edit.toPlainText()), chat=self.session.current.id)

    @Slot(str)
    def _on_text(self, text: str) -> None:
        messages = self.session.current.messages
        n_characters = len(messages[-1].content)
        chat, index = self.session.current.id, len(messages) - 1
        self._note(text=n_characters, chat=chat, index=index)

    @Slot(bool)
    def _on_busy(self, is_busy: bool) -> None:
        if not is_busy and not self._is_closed:
            QTimer.singleShot(self._chance.randint(0, 300), self, self._ask)

    def close(self) -> None:
        self._typing.stop()
        super().close()


def read_notes(path: Path) -> list[dict[str, Any]]:
    """Return the notes in a log; the last line of a killed window may be cut."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    engine.read_model_info = lambda path: model_info(str(path))
    sys.exit(run_window(make_shell=DrivenShell))
