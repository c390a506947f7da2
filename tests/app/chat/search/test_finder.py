"""The finder keeps the index up to date by itself, and answers without one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QObject, QTimer
from pytestqt.qtbot import QtBot

from app.chat.chat_file import write_chat
from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.search import finder as finder_module
from app.chat.search import hits as hits_module
from app.chat.search.finder import ChatFinder
from app.chat.search.hits import Hit
from app.chat.search.index import ChatIndex, IndexUnusableError


def write(folder: Path, text: str, chat_id: str = "") -> Conversation:
    chat = Conversation.of([Message("user", text)], title="Title")
    chat.id = chat_id or chat.id
    write_chat(folder / f"{chat.id}.json", chat)
    return chat


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "chats"
    made.mkdir()
    return made


@pytest.fixture
def finder(folder: Path, qtbot: QtBot) -> Iterator[ChatFinder]:
    parent = QObject()
    made = ChatFinder(folder, folder.parent / "cache" / "index", parent)
    yield made
    made.close()


def search(qtbot: QtBot, finder: ChatFinder, typed: str) -> list[str]:
    """Return the texts of the hits."""
    with qtbot.waitSignal(finder.found) as signal:
        finder.find(typed)
    assert signal.args is not None
    hits: list[Hit] = signal.args[1]
    return [hit.text.text for hit in hits]


def settle(qtbot: QtBot, finder: ChatFinder) -> None:
    """Wait until all chats are indexed."""
    finder.start()
    qtbot.waitUntil(lambda: not finder._is_reading and not finder._jobs._newest)


def test_chats_of_earlier_days_are_found(
    qtbot: QtBot, finder: ChatFinder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        write(folder, f"text {number}")
    seen: list[int] = []
    finder.progressed.connect(seen.append)
    settle(qtbot, finder)
    assert seen[0] == 50
    assert seen[-1] == 0
    monkeypatch.setattr(finder_module, "read_hits", None)  # by the index alone
    found = search(qtbot, finder, '"text 4"')
    assert sorted(found) == sorted(f"text {n}" for n in (4, *range(40, 50)))


def test_only_files_that_have_changed_are_read_again(
    qtbot: QtBot, finder: ChatFinder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = [write(folder, f"text {number}") for number in range(20)]
    settle(qtbot, finder)
    read: list[str] = []
    real = finder_module.read_stored
    monkeypatch.setattr(finder_module, "read_stored", lambda p: (read.append(p.stem), real(p))[1])
    write(folder, "changed", chats[3].id)
    (folder / f"{chats[5].id}.json").unlink()
    settle(qtbot, finder)
    assert sorted(read) == sorted([chats[3].id, chats[5].id])
    assert search(qtbot, finder, "changed") == ["changed"]
    assert search(qtbot, finder, '"text 5"') == []


def test_what_was_just_written_is_found_at_once(
    qtbot: QtBot, finder: ChatFinder, folder: Path
) -> None:
    settle(qtbot, finder)
    finder.note(write(folder, "a moment ago").id)
    assert search(qtbot, finder, "moment") == ["a moment ago"]


def test_what_a_search_was_to_index_is_found_by_the_one_in_its_place(
    qtbot: QtBot, finder: ChatFinder, folder: Path
) -> None:
    settle(qtbot, finder)
    gate = threading.Event()
    finder._jobs.run("gate", lambda: gate.wait(5) and None, lambda _: None)
    finder.note(write(folder, "a moment ago").id)
    finder.find("mom")  # it waits for the thread, where the next one takes its place
    QTimer.singleShot(0, gate.set)
    assert search(qtbot, finder, "moment") == ["a moment ago"]


def test_chats_are_indexed_when_no_more_is_written(
    qtbot: QtBot, finder: ChatFinder, folder: Path
) -> None:
    finder._settle.setInterval(1)
    chat = write(folder, "text")
    finder.note(chat.id)
    index = ChatIndex(folder.parent / "cache" / "index")
    qtbot.waitUntil(lambda: chat.id in index.chats())
    (folder / f"{chat.id}.json").unlink()
    finder.note(chat.id)
    qtbot.waitUntil(lambda: index.chats() == {})
    index.close()


@pytest.mark.parametrize("moment", ["before", "while open"])
def test_a_damaged_index_is_replaced_and_nobody_notices(
    qtbot: QtBot, finder: ChatFinder, folder: Path, moment: str
) -> None:
    write(folder, "text one")
    path = folder.parent / "cache" / "index"
    if moment == "while open":
        settle(qtbot, finder)
        finder._index.close()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"garbage" * 1000)
    assert search(qtbot, finder, "one") == ["text one"], "read from the files"
    qtbot.waitUntil(lambda: not finder._is_reading and not finder._jobs._newest)
    index = ChatIndex(path)
    assert len(index.find(("one",))) == 1
    index.close()


def test_without_an_index_chats_are_read(
    qtbot: QtBot, finder: ChatFinder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, where it is not tried for ever."""
    tries: list[int] = []

    def refuse(index: ChatIndex) -> None:
        tries.append(1)
        raise IndexUnusableError("no space left")

    monkeypatch.setattr(ChatIndex, "_connection", refuse)
    monkeypatch.setattr(ChatIndex, "chats", refuse)
    monkeypatch.setattr(ChatIndex, "find", lambda index, words: refuse(index))
    write(folder, "text one")
    (folder / "broken.json").write_text("{")
    finder.start()
    for _ in range(6):
        assert search(qtbot, finder, "one") == ["text one"]
    assert len(tries) <= 6 + finder_module.MOST_TRIES


def test_a_search_that_is_not_wanted_any_more_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        write(folder, f"text {number}")
    read: list[Path] = []
    real = hits_module.read_stored
    monkeypatch.setattr(hits_module, "read_stored", lambda p: (read.append(p), real(p))[1])
    hits_module.read_hits(folder, ("text",), lambda: len(read) < 3)
    assert len(read) == 3


def test_only_the_newest_search_is_answered(qtbot: QtBot, finder: ChatFinder, folder: Path) -> None:
    write(folder, "one two")
    answered: list[str] = []
    finder.found.connect(lambda typed, _: answered.append(typed))
    for typed in ("o", "on", "one"):
        finder.find(typed)
    qtbot.waitUntil(lambda: bool(answered))
    qtbot.waitUntil(lambda: not finder._jobs._newest)
    assert answered == ["one"]
