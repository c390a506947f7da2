"""What saving a chat costs the window's thread and the disk: a step, and a second of an answer.

`QT_QPA_PLATFORM=offscreen python -m tests.bench.chat_saving`
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from PySide6.QtCore import QCoreApplication, QObject

from app.chat.conversation import Conversation
from app.chat.library import ChatLibrary
from app.chat.message import Message
from app.chat.store import ChatStore
from tests.helpers.stall_watch import StallWatch

SECONDS = 10
N_SENDS = 10
N_MESSAGES = 200
WORDS = "Some words, ½ of them read. "

Save = Callable[[Conversation], None]


def chat_of(n_bytes: int) -> Conversation:
    text = WORDS * (n_bytes // N_MESSAGES // len(WORDS.encode()))
    roles = ["user", "assistant"] * (N_MESSAGES // 2)
    return Conversation.of(Message(role, text) for role in roles)


def turn(app: QCoreApplication, seconds: float) -> None:
    """Let the window's thread respond for a while."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        app.processEvents()
        time.sleep(0.001)


def sends(app: QCoreApplication, chat: Conversation, save: Save) -> str:
    """Add messages and save the chat at once, as sending does."""
    times = []
    for _ in range(N_SENDS):
        chat.add(Message("user", WORDS))
        start = time.perf_counter()
        save(chat)
        times.append((time.perf_counter() - start) * 1e3)
        turn(app, 0.5)
    return f"{statistics.median(times):7.2f} ms median, {max(times):7.1f} worst"


def streaming(app: QCoreApplication, chat: Conversation, save: Save) -> str:
    """Let an answer grow by some words every 40 ms, and save that soon."""
    chat.add(Message("assistant", ""))
    before, thread_before = psutil.Process().io_counters().write_bytes, time.thread_time()
    for _ in range(SECONDS * 25):
        chat.messages[-1].content += WORDS
        save(chat)
        turn(app, 0.04)
    used = (time.thread_time() - thread_before) / SECONDS * 1e3
    written = psutil.Process().io_counters().write_bytes - before
    return f"{used:6.1f} ms of each s of this thread, {written / SECONDS / 1e3:8.1f} kB/s to disk"


def main() -> None:
    app = QCoreApplication(sys.argv)
    for n_bytes in (20_000, 1_000_000, 10_000_000):
        with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
            parent = QObject()
            saver, chat = ChatLibrary(ChatStore(Path(folder)), parent), chat_of(n_bytes)
            cases: list[tuple[str, Callable[[QCoreApplication, Conversation, Save], str], Save]] = [
                ("send", sends, saver.save),
                ("answer, not saved", streaming, lambda chat: None),
                ("answer, saved", streaming, saver.save_soon),
            ]
            for name, run, save in cases:
                watch = StallWatch(parent)
                found = run(app, chat, save)
                watch.stop()
                stall = f"{watch.worst_s * 1e3:6.1f} ms without response at most"
                print(f"{n_bytes:>9} bytes, {name:17}: {found}, {stall}")  # noqa: T201
            saver.close()


if __name__ == "__main__":
    main()
