"""Longest times for which the window does not answer, from its start to a change of the split.

    python -m tests.bench.window_stalls [--model demo] [--seconds 60]

A person's session in a real window, on whatever platform Qt is told to use: the start until the
devices are shown, a load, a chat of so many seconds, a change of the split in the middle of an
answer, and long chats that are opened. For each part it prints the longest time between two turns
of the event loop, by the clock (which counts what other programs and other threads took) and of the
GUI thread's own processor time (which does not).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.bench.window_speed import PROMPT

N_TOKENS = 400
TICK_MS = 5
N_OLD_CHATS, N_OLD_MESSAGES = 30, 100
OLD_ANSWER = (
    "Some *words*.\n\n```python\nx = [1, 2]\n```\n\n- an item\n\n| a | b |\n|-|-|\n| 1 | 2 |\n\n"
)
WAIT_S = 300.0

SCHEDULER = Path("/proc/thread-self/schedstat")
"""Where Linux tells what a thread has run and waited for a processor, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A time between two turns of the event loop beyond what was asked for, in milliseconds.

    Attributes:
        clock_ms: by the clock.
        busy_ms: processor time of the GUI thread.
        queued_ms: time in which the GUI thread could have run, but no processor was free; 0 where
            the system does not tell.
        others_ms: processor time of the process's other threads, for which the GUI thread may
            have waited, as for the interpreter's lock.
    """

    clock_ms: float
    busy_ms: float
    queued_ms: float = 0.0
    others_ms: float = 0.0

    @property
    def own_ms(self) -> float:
        """What the process itself has caused: its GUI thread's work, and waits for its others."""
        blocked = self.clock_ms - self.busy_ms - self.queued_ms
        return self.busy_ms + min(max(blocked, 0.0), self.others_ms)


class Watch:
    """A timer of the GUI thread that notes by how much it is late."""

    def __init__(self) -> None:
        from PySide6.QtCore import Qt, QTimer

        self.pauses: list[Pause] = []
        self._last = _times()
        self._timer = QTimer(interval=TICK_MS, timerType=Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._tick)
        self._timer.start()

    def take(self) -> list[Pause]:
        """Return the pauses since the last call, the present one as well."""
        self._tick()
        taken, self.pauses = self.pauses, []
        return taken

    def _tick(self) -> None:
        now = _times()
        clock, busy, all_threads, queued = (
            1000 * (new - old) for new, old in zip(now, self._last, strict=True)
        )
        self.pauses.append(Pause(clock - TICK_MS, busy, queued, all_threads - busy))
        self._last = now


def _times() -> tuple[float, float, float, float]:
    """Return clock, processor time of this thread and of all, and its wait for one, in seconds."""
    queued = 0.0
    with suppress(OSError):
        queued = int(SCHEDULER.read_text().split()[1]) / 1e9
    return time.perf_counter(), time.thread_time(), time.process_time(), queued


class Session:
    """Somebody at the window who waits for what was asked for, and notes its pauses."""

    def __init__(self) -> None:
        from PySide6.QtWidgets import QApplication

        from app.core.process.environment import start_host
        from app.main import Shell
        from engine import SamplingParams

        self._app = QApplication(sys.argv[:1])
        self.watch = Watch()
        self.shell = Shell(self._app, start_host)
        self.shell.window.painted.connect(self.watch.take)
        self.shell.start()
        params = SamplingParams(
            temperature=0, max_tokens=N_TOKENS, ignore_eos=True, on_overflow="stop"
        )
        self.shell.window.sampling.set_params(params)

    def until(self, is_done: Callable[[], bool]) -> None:
        """Let the window live until something holds."""
        end = time.perf_counter() + WAIT_S
        while not is_done():
            assert time.perf_counter() < end, "the window waits in vain"
            self._app.processEvents()
            time.sleep(0.0005)

    def open(self, model: str) -> None:
        """Load a model by its path, or the one that comes with Tandem as "demo"."""
        from app.core.paths import demo_model

        self.shell.models.open(str(demo_model()) if model == "demo" else model)
        self.until(lambda: self.shell.client.model is not None)

    def turn(self) -> None:
        """Let the event loop do what there is to do, once."""
        n = len(self.watch.pauses)
        self.until(lambda: len(self.watch.pauses) > n)

    def report(self, part: str) -> None:
        """Print the pauses of a part of the session."""
        pauses = self.watch.take()
        clock = max(pauses, key=lambda pause: pause.clock_ms)
        n_long = sum(pause.clock_ms > 30 for pause in pauses)
        print_line(
            f"{part:23} by the clock {clock.clock_ms:4.0f} ms, of its processor time "
            f"{max(pause.busy_ms for pause in pauses):4.0f} ms, {n_long} pauses above 30 ms"
        )

    def chat(self, seconds: float) -> None:
        """Ask again and again, in one chat after another."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.shell.chat_presenter.new_chat()
            self.turn()  # nobody opens a chat and asks within one turn
            self.ask()
            self.until(lambda: not self.shell.session.is_busy or time.perf_counter() > end)
        self.shell.session.stop()
        self.until(lambda: not self.shell.session.is_busy)

    def ask(self) -> None:
        """Ask, and wait for the answer's first words."""
        self.shell.chat_presenter.send(PROMPT)
        self.until(lambda: len(self.shell.session.current.messages[-1].content) > 20)

    def change_split(self) -> None:
        """Change the shares of two ranks in the middle of an answer."""
        shell = self.shell
        self.ask()
        params = shell.client.model.params if shell.client.model else None
        assert params is not None
        done: list[Any] = []
        shell.client.resplit_done.connect(done.append)
        shell.client.resplit_failed.connect(done.append)
        shell.models.apply(replace(params, devices=("cpu", "cpu"), split=(0.6, 0.4)))
        self.until(lambda: bool(done))
        shell.session.stop()
        self.until(lambda: not shell.session.is_busy)

    def open_chats(self) -> None:
        """Open long chats one after another."""
        for chat in self.shell.session.library.summaries[-5:]:
            self.shell.chat_presenter.open_chat(chat.id)
            end = time.perf_counter() + 0.3
            self.until(lambda end=end: time.perf_counter() > end)  # type: ignore[misc]


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_old_chats(n_chats: int = N_OLD_CHATS) -> None:
    """Fill the folder of the chats; the last one is open at the next start."""
    from app.chat.conversation import Conversation
    from app.chat.message import Message
    from app.chat.store import ChatStore
    from app.core import paths
    from app.core.settings import SettingsStore

    paths.chats_dir().mkdir(parents=True)
    store = ChatStore(paths.chats_dir())
    for n in range(n_chats):
        chat = Conversation(title=f"Old chat {n}")
        for at in range(N_OLD_MESSAGES):
            role = "assistant" if at % 2 else "user"
            chat.add(Message(role, OLD_ANSWER * 4 if at % 2 else f"Question {at}?"))
        store.save(chat)
    settings = SettingsStore(paths.settings_file())
    settings.put(replace(settings.current, last_chat=chat.id))
    settings.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["TANDEM_HOME"] = home
        write_old_chats()
        play(args)


def play(args: argparse.Namespace) -> None:
    session = Session()
    shell = session.shell
    session.until(lambda: shell.start_up.is_ready)
    session.report("start, from its picture")
    session.open(args.model)
    session.report("load")
    session.chat(args.seconds)
    session.report("chat")
    session.change_split()
    session.report("change of the split")
    session.open_chats()
    session.report("opening chats")
    shell.window.close()


if __name__ == "__main__":
    main()
