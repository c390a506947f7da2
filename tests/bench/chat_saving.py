"""What saving a chat costs the window while an answer grows, for a short and a long chat.

`QT_QPA_PLATFORM=offscreen python -m tests.bench.chat_saving`
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QObject

from app.chat.conversation import Conversation, Message
from app.chat.saving import ChatSaver
from app.chat.store import ChatStore
from tests.helpers.stall_watch import StallWatch

SECONDS = 10
WORDS = "Some words, ½ of them read. "


def run(app: QCoreApplication, folder: Path, n_bytes: int, how: str) -> tuple[list[float], float]:
    """Let an answer grow by some words every 40 ms.

    Returns:
        the times that each save took on this thread, and the longest time for which this thread did
        not respond, in ms.
    """
    parent = QObject()
    saver, watch = ChatSaver(ChatStore(folder), parent), StallWatch(parent)
    chat = Conversation(messages=[Message("user", WORDS * (n_bytes // len(WORDS) // 20))] * 20)
    chat.messages.append(Message("assistant", ""))
    saver.save(chat)
    watch.restart()
    ways = {"not saved": id, "this thread": saver.save, "another thread": saver.save_soon}
    times, began = list[float](), time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        chat.messages[-1].content += WORDS
        start = time.perf_counter()
        ways[how](chat)
        times.append((time.perf_counter() - start) * 1e3)
        until = time.perf_counter() + 0.04
        while time.perf_counter() < until:
            app.processEvents()
            time.sleep(0.001)
    saver.close()
    watch.stop()
    return times, watch.worst_s * 1e3


def main() -> None:
    app = QCoreApplication(sys.argv)
    for n_bytes in (10_000, 1_000_000):
        for how in ("not saved", "this thread", "another thread"):
            with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
                times, worst = run(app, Path(folder), n_bytes, how)
                (size,) = (path.stat().st_size for path in Path(folder).glob("*.json"))
            print(  # noqa: T201
                f"{size:>8} bytes, {how:14}: {statistics.median(times):6.3f} ms median, "
                f"{max(times):6.1f} ms worst, {worst:6.1f} ms without an answer at most"
            )


if __name__ == "__main__":
    main()
