"""The finder keeps the index up to date automatically."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QObject, QTimer
from pytestqt.qtbot import QtBot

from app.chat import search as search_module
from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.search import ChatFinder, Hit
from app.chat.store import ChatStore


def write(store: ChatStore, text: str, chat_id: str = "") -> Conversation:
    chat = Conversation.of([Message("user", text)], title="Title")
    chat.id = chat_id or chat.id
    store.save(chat)
    return chat


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChatStore]:
    made = ChatStore(tmp_path / "chats")
    yield made
    made.database.close()


@pytest.fixture
def finder(store: ChatStore, qtbot: QtBot) -> Iterator[ChatFinder]:
    parent = QObject()
    made = ChatFinder(store.database, parent)
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
    qtbot.waitUntil(lambda: not finder._jobs._newest)


def n_unindexed(store: ChatStore) -> int:
    query = "SELECT count(*) FROM unindexed"
    return int(store.database.read(lambda file: file.execute(query).fetchone()[0]))


def test_chats_of_earlier_days_are_found(
    qtbot: QtBot, finder: ChatFinder, store: ChatStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "MAX_MESSAGES", 8)
    for number in range(50):
        write(store, f"text {number}")
    assert n_unindexed(store) == 100
    settle(qtbot, finder)
    assert finder.is_current
    assert n_unindexed(store) == 0
    found = search(qtbot, finder, '"text 4"')
    assert sorted(found) == sorted(f"text {n}" for n in (4, *range(40, 50)))


def test_only_texts_that_have_changed_are_indexed_again(
    qtbot: QtBot, finder: ChatFinder, store: ChatStore
) -> None:
    chats = [write(store, f"text {number}") for number in range(20)]
    settle(qtbot, finder)
    write(store, "changed", chats[3].id)
    store.delete(chats[5].id)
    assert n_unindexed(store) == 2, "the title and the message"
    settle(qtbot, finder)
    assert search(qtbot, finder, "changed") == ["changed"]
    assert search(qtbot, finder, '"text 3"') == []
    assert search(qtbot, finder, '"text 5"') == []


def test_what_was_just_written_is_found_at_once(
    qtbot: QtBot, finder: ChatFinder, store: ChatStore
) -> None:
    settle(qtbot, finder)
    write(store, "a moment ago")
    assert search(qtbot, finder, "moment") == ["a moment ago"]


def test_what_a_search_was_to_index_is_found_by_the_one_in_its_place(
    qtbot: QtBot, finder: ChatFinder, store: ChatStore
) -> None:
    settle(qtbot, finder)
    gate = threading.Event()
    finder._jobs.run("gate", lambda: gate.wait(5) and None, lambda _: None)
    write(store, "a moment ago")
    finder.find("mom")  # while it waits for the thread, the next search replaces it
    QTimer.singleShot(0, gate.set)
    assert search(qtbot, finder, "moment") == ["a moment ago"]


def test_chats_are_indexed_when_no_more_is_written(
    qtbot: QtBot, finder: ChatFinder, store: ChatStore
) -> None:
    finder._settle.setInterval(1)
    write(store, "text")
    finder.note()
    qtbot.waitUntil(lambda: n_unindexed(store) == 0)


def test_what_cannot_be_indexed_keeps_nothing_else_from_being_found(
    qtbot: QtBot, finder: ChatFinder, store: ChatStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk; it is indexed when there is space."""
    write(store, "text one")
    settle(qtbot, finder)
    write(store, "text two")

    def refuse(file: sqlite3.Connection) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(search_module, "index_some", refuse)
        settle(qtbot, finder)
        assert search(qtbot, finder, "text") == ["text one"]
    assert sorted(search(qtbot, finder, "text")) == ["text one", "text two"]


def test_only_the_newest_search_is_answered(
    qtbot: QtBot, finder: ChatFinder, store: ChatStore
) -> None:
    write(store, "one two")
    answered: list[str] = []
    finder.found.connect(lambda typed, _: answered.append(typed))
    for typed in ("o", "on", "one"):
        finder.find(typed)
    qtbot.waitUntil(lambda: bool(answered))
    qtbot.waitUntil(lambda: not finder._jobs._newest)
    assert answered == ["one"]
