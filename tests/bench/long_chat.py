"""How long a window with a long chat takes to open it, and how long it does not answer meanwhile.

    python -m tests.bench.long_chat [--messages 2000] [--seconds 20]

The real window with a scripted engine, on whatever platform Qt is told to use. Short chats and long
ones take turns. Five of each are opened from the disk: the time until the end is painted. Then, for
each part, the longest time between two turns of the event loop: by the clock, and of the window's
thread's own processor time, which other programs do not lengthen.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from PySide6.QtCore import QEvent, QObject
from PySide6.QtWidgets import QApplication

from app import main as program
from app.chat.conversation import Conversation
from app.chat.message import AnswerStats, Message
from app.chat.store import ChatStore
from app.core import paths
from app.core.settings import SettingsStore
from tests.bench.window_stalls import OLD_ANSWER, Watch, print_line
from tests.helpers.fake_host import FakeHost, Script

SHORT = 20
N_TIMES = 5
STATS = AnswerStats("stop", 412, 61.8, 0.31, 900)
WORDS = "Some *words* of an answer that `grows`, as they come.\n\n"


def chat_of(n_messages: int) -> Conversation:
    """Return a chat with code and a table in each answer, and two versions of the first one."""
    chat = Conversation(title=f"{n_messages} messages")
    chat.add(Message("user", "Question?"))
    chat.add(Message("assistant", "Another answer.", STATS))
    for at in range(1, n_messages):
        text = OLD_ANSWER * 2 if at % 2 else f"Question {at}?"
        message = Message("assistant" if at % 2 else "user", text, STATS if at % 2 else None)
        chat.add(message, 1 if at == 1 else None)
    return chat


class Painted(QObject):
    """A watch for the moment at which the conversation has been painted."""

    def __init__(self, view: QObject) -> None:
        super().__init__(view)
        self.at = 0.0
        view.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Paint:
            self.at = time.perf_counter()
        return False


class LongChats:
    """Somebody at a window with short and long chats."""

    def __init__(self) -> None:
        self._app = QApplication(sys.argv[:1])
        self.watch = Watch()
        script = Script(answer=WORDS * 10_000, chunk=5, pause_s=0.012)
        self.shell = program.Shell(self._app, lambda on_event: FakeHost(on_event, script))
        self.shell.start()
        self._until(lambda: self.shell.start_up.is_ready)
        self.shell.models.open(str(paths.demo_model()))
        self._until(lambda: self.shell.client.model is not None)
        self._view = self.shell.window.chat_view
        self._painted = Painted(self._view.viewport())

    def run(self, chat_ids: Sequence[str], seconds: float) -> None:
        """Open chats from the disk, and do everything in the last one."""
        chats, times = self.shell.chat_presenter, []
        for chat_id in chat_ids:
            chats.new_chat()
            self._rest(0.3)
            self.watch.take()
            times.append(self._timed(lambda number=chat_id: chats.open_chat(number)))  # type: ignore[misc]
            self._rest(1.5)
        chat = self.shell.session.current
        name = chat.title
        print_line(f"{name:14} opened in {' '.join(f'{t:.0f}' for t in times)} ms")
        self._report(name, "opened")
        self._stream(chat, seconds)
        self._report(name, "streams")
        for _ in range(100):
            bar = self._view.verticalScrollBar()
            bar.setValue(bar.value() - self._view.height() // 2)
            self._rest(0.03)
        self._report(name, "scrolls up")
        middle = list(chat.tree)[len(chat.tree) // 2].id
        jump = self._timed(lambda: self.shell.session.open_at(chat.id, middle))
        self._rest(1.0)
        self._report(name, f"jumps, {jump:.0f} ms")
        for version in (2, 3):
            chosen = self._timed(lambda n=version: self.shell.session.choose(n))  # type: ignore[misc]
            self._rest(1.0)
            self._report(name, f"switches, {chosen:.0f} ms")

    def close(self) -> None:
        """Close the window."""
        self.shell.window.close()

    def _stream(self, chat: Conversation, seconds: float) -> None:
        """Have an answer written at the end of a chat for a while."""
        self.shell.chat_presenter.send("Go on")
        self._rest(seconds)
        assert chat.messages[-1].content
        self.shell.session.stop()
        self._until(lambda: not self.shell.session.is_busy)
        self._rest(0.3)

    def _timed(self, step: Callable[[], None]) -> float:
        """Return the milliseconds from a step until what it shows is painted."""
        self._painted.at, begin = 0.0, time.perf_counter()
        step()
        self._until(lambda: self._painted.at > 0.0)
        return 1000 * (self._painted.at - begin)

    def _report(self, name: str, part: str) -> None:
        pauses = self.watch.take()
        print_line(
            f"{name:14} {part:20} by the clock {max(p.clock_ms for p in pauses):4.0f} ms, of its"
            f" processor time {max(p.busy_ms for p in pauses):4.0f} ms,"
            f" {sum(p.clock_ms > 30 for p in pauses)} pauses above 30 ms"
        )

    def _rest(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        self._until(lambda: time.perf_counter() > end)

    def _until(self, is_done: Callable[[], bool]) -> None:
        end = time.perf_counter() + 60
        while not is_done():
            assert time.perf_counter() < end, "the window waits in vain"
            self._app.processEvents()
            time.sleep(0.0005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["TANDEM_HOME"] = home
        store = ChatStore(paths.chats_dir())
        sets = [[chat_of(n) for _ in range(N_TIMES)] for n in (SHORT, args.messages) * 2]
        for chat in chain(*sets):
            store.save(chat)
        settings = SettingsStore(paths.settings_file())
        settings.put(replace(settings.current, last_chat="none"))
        settings.save()
        window = LongChats()
        for chats in sets:
            window.run([chat.id for chat in chats], args.seconds)
        window.close()


if __name__ == "__main__":
    main()
