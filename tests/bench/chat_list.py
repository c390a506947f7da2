"""What a thousand chats cost: the window's start, the list, the index, and a search.

    python -m tests.bench.chat_list [--chats 1000] [--rounds 6] [--before FOLDER]

Starts the window with one chat and with many, by turns, until its first picture; `--before` names
a checkout of another commit that does the same. The index is made before, as by an earlier start.
Then it measures in this process how long the window's thread takes for the index of all chats and
for each change of the list, and another thread for searches.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from tests.bench.first_picture import Start, start
from tests.bench.window_stalls import print_line

N_MESSAGES = 20
SENTENCE = "Some *words* about {topic}, the weights of block {n} and what a card does with them. "
TOPICS = ("splits", "links", "Rust", "birthdays", "whales", "SQL", "Bern", "trains")
SEARCHES = ("weights", "wh", "block 7 whales", '"what a card does"', "zebra")


def write_chats(n_chats: int) -> None:
    """Fill the folder of the chats, and open the last one at the next start."""
    from app.chat.conversation import Conversation
    from app.chat.message import Message
    from app.chat.store import ChatStore
    from app.core import paths
    from app.core.settings import SettingsStore

    store = ChatStore(paths.chats_dir())
    for n in range(n_chats):
        topic = TOPICS[n % len(TOPICS)]
        chat = Conversation(title=f"Chat {n} about {topic}")
        for at in range(N_MESSAGES):
            text = SENTENCE.format(topic=topic, n=at) * (8 if at % 2 else 1)
            chat.add(Message("assistant" if at % 2 else "user", text))
        chat.updated -= 3600.0 * n
        store.save(chat)
    settings = SettingsStore(paths.settings_file())
    settings.put(replace(settings.current, last_chat=chat.id))
    settings.save()


def make_index() -> float:
    """Read all chats into the index; return the seconds."""
    from app.chat.search import index_some
    from app.chat.store import ChatStore
    from app.core import paths

    store, begin = ChatStore(paths.chats_dir()), time.perf_counter()
    while store.database.write(index_some):
        pass
    store.database.close()
    return time.perf_counter() - begin


def compare_starts(homes: dict[int, str], folders: dict[str, Path], rounds: int) -> None:
    found: dict[tuple[str, int], list[Start]] = {}
    for _ in range(rounds):
        for name, folder in folders.items():
            for n_chats, home in homes.items():
                found.setdefault((name, n_chats), []).append(start(folder, home))
    for (name, n_chats), starts in found.items():
        clock, cpu = [one.clock_s for one in starts], [one.cpu_s for one in starts]
        print_line(
            f"{name:6} {n_chats:5} chats: clock {median(clock):.3f} s (least {min(clock):.3f}),"
            f" processor time {median(cpu):.3f} s (least {min(cpu):.3f})"
        )


def measure_list(n_chats: int) -> None:
    """Print how long changes of the list and searches take."""
    from PySide6.QtWidgets import QApplication

    from app.chat.listing.folders import ListContents, Shelf
    from app.chat.search import Hit, find_hits, parse_words
    from app.chat.store import ChatStore
    from app.chat.views.chat_list import ChatList
    from app.core import paths
    from app.widgets.theme import apply_theme

    app = QApplication.instance() or QApplication([])
    assert isinstance(app, QApplication)
    apply_theme(app, "light")
    store = ChatStore(paths.chats_dir())
    timed("titles of all chats", store.survey)
    chats = store.summaries()
    ids = [chat.id for chat in chats]
    view = ChatList()
    view.resize(260, 800)
    view.show()
    closed = Shelf().moved(ids[: n_chats // 2], "Half").opened("Half", is_open=False)
    opened = closed.opened("Half", is_open=True)
    shelves = [Shelf(), opened, closed, opened.with_pins(ids[:50], is_pinned=True)]

    def show(number: int) -> None:
        shelf = shelves[number % len(shelves)]
        view.show_contents(ListContents(chats, shelf, current=ids[number % n_chats]))
        view.repaint()

    for number, name in enumerate(("by day", "open folder", "closed folder", "50 pinned")):
        timed(f"the list, {name}", lambda n=number: show(n))  # type: ignore[misc]

    def find(typed: str) -> list[Hit]:
        return store.database.read(lambda file: find_hits(file, parse_words(typed)))

    for typed in SEARCHES:
        timed(f"search {typed}", lambda t=typed: find(t))  # type: ignore[misc]
    view.show_hits("weights", find("weights"))
    store.database.close()


def timed(name: str, act: Callable[[], object]) -> None:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        act()
        times.append(1000 * (time.perf_counter() - begin))
    print_line(f"{name:32} {median(times):6.1f} ms (least {min(times):.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--before", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    folders = {"now": Path(__file__).resolve().parents[2]}
    if args.before:
        folders = {"before": args.before.resolve(), **folders}
    with tempfile.TemporaryDirectory() as few, tempfile.TemporaryDirectory() as many:
        homes = {1: few, args.chats: many}
        for n_chats, home in homes.items():
            os.environ["TANDEM_HOME"] = home
            write_chats(n_chats)
            print_line(f"index of {n_chats} chats: {make_index():.2f} s")
        compare_starts(homes, folders, args.rounds)
        measure_list(args.chats)


if __name__ == "__main__":
    main()
