"""The index of the chats says the same as reading them, and never more than that."""

from __future__ import annotations

import json
import sqlite3
import stat
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.chat.chat_file import write_chat
from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.search import index as index_module
from app.chat.search.hits import TITLE, Hit, read_hits, texts_of
from app.chat.search.index import ChatIndex, IndexUnusableError
from app.chat.search.known import peek_chats
from app.chat.search.words import folded, parse_words
from app.chat.stored import read_stored, stamps_key

WORDS = [
    "split", "Card", "kärte", "ab", "a", "C++", "x OR y", '"', "*", "日本語", "二", "“", "ß", "-",
    "\0", "\ud800",
]  # fmt: skip


def chat(*texts: str, title: str = "", updated: float = 1.0) -> Conversation:
    messages = [
        Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)
    ]
    return Conversation.of(messages, title=title or "Untitled", updated=updated)


def write(folder: Path, *chats: Conversation) -> None:
    for one in chats:
        write_chat(folder / f"{one.id}.json", one)


def filled(path: Path, folder: Path) -> ChatIndex:
    """Return an index of the chats in a folder."""
    index = ChatIndex(path)
    for file in folder.glob("*.json"):
        stored = read_stored(file)
        index.put(stored.chat, stored.stamps)
    return index


def places(hits: list[Hit]) -> list[tuple[str, int]]:
    return [(hit.chat_id, hit.message_id) for hit in hits]


def test_a_hit_names_message_title_and_day(tmp_path: Path) -> None:
    one = chat("How are weights split?", "<think>split</think>By rows.", title="Rows", updated=7.0)
    write(tmp_path, one)
    (hit,) = filled(tmp_path / "index", tmp_path).find(parse_words("split weights"))
    ids = [text.message_id for text in texts_of(one)]
    assert (hit.chat_id, hit.message_id, hit.updated) == (one.id, ids[1], 7.0)
    assert hit.title.text == "Rows"
    assert [hit.text.text[a:b] for a, b in hit.text.marks] == ["weights", "split"]


def test_titles_are_found_and_come_first(tmp_path: Path) -> None:
    new, old = chat("rows", title="Rows", updated=2.0), chat("rows", title="x", updated=1.0)
    write(tmp_path, new, old)
    index = filled(tmp_path / "index", tmp_path)
    new.title = "Other rows"
    index.put(new, (None, None))
    hits = index.find(("rows",))
    assert [hit.chat_id for hit in hits] == [new.id, new.id, old.id]
    assert hits[0].message_id == TITLE
    assert hits[0].title.marks == ((6, 10),)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.sampled_from(WORDS), max_size=6), max_size=4), max_size=4),
    st.lists(st.sampled_from([*WORDS, "spl", "lit", "本"]), max_size=4),
    st.booleans(),
)
def test_the_index_finds_what_reading_finds(
    tmp_path_factory: pytest.TempPathFactory,
    contents: list[list[list[str]]],
    typed: list[str],
    has_trigrams: bool,
) -> None:
    folder = tmp_path_factory.mktemp("chats")
    chats = [
        chat(*(" ".join(text) for text in texts), updated=float(number))
        for number, texts in enumerate(contents)
    ]
    write(folder, *chats)
    words = parse_words(" ".join(typed))
    assume(words)
    with pytest.MonkeyPatch.context() as patch:
        if not has_trigrams:
            patch.setattr(index_module, "_has_trigrams", lambda: False)
        index = filled(folder / "index", folder)
        found = index.find(words)
        index.close()
    assert found == read_hits(folder, words)
    naive = set()
    for one in chats:
        bodies = {text.message_id: folded(text.body) for text in texts_of(one)}
        found_in = {n: {word for word in words if word in body} for n, body in bodies.items()}
        if set().union(*found_in.values()) == set(words):
            most = max(map(len, found_in.values()))
            naive |= {(one.id, n) for n, has in found_in.items() if len(has) == most}
    assert set(places(found)) == naive


def test_words_in_different_messages_find_the_chat(tmp_path: Path) -> None:
    apart, together = chat("about whales", "hello there"), chat("whales", "hello whales")
    write(tmp_path, apart, together, chat("whales alone"), chat("hello alone"))
    index = filled(tmp_path / "index", tmp_path)
    assert set(places(index.find(("whales", "hello")))) == {
        (apart.id, 1), (apart.id, 2), (together.id, 2),
    }  # fmt: skip


def test_nothing_that_is_typed_is_an_error(tmp_path: Path) -> None:
    index = ChatIndex(tmp_path / "index")
    texts = ("some words", "x OR y", 'a "quoted" (one)*')
    index.put(chat(*texts), (None, None))

    @given(st.one_of(st.text(max_size=60), st.text("abOR\"*()^:-+ {}'", max_size=12)))
    def check(typed: str) -> None:
        if words := parse_words(typed):
            has = [[word in folded(text) for word in words] for text in (*texts, "untitled")]
            is_found = all(map(any, zip(*has, strict=True)))
            most = max(map(sum, has))
            assert len(index.find(words)) == is_found * sum(sum(one) == most for one in has)

    check()
    index.close()


def test_only_what_has_changed_is_written(tmp_path: Path) -> None:
    one = chat("first", "second", "third")
    index = ChatIndex(tmp_path / "index")
    index.put(one, (None, None))
    with sqlite3.connect(tmp_path / "index") as file:
        before = dict(file.execute("SELECT body, id FROM texts"))
    one.messages[1].content = "changed"
    index.put(one, (None, None))
    with sqlite3.connect(tmp_path / "index") as file:
        after = dict(file.execute("SELECT body, id FROM texts"))
    file.close()
    assert set(after) == {"Untitled", "first", "changed", "third"}
    assert {body: after[body] for body in ("first", "third")} == {
        body: before[body] for body in ("first", "third")
    }
    assert index.find(("second",)) == []
    assert len(index.find(("changed",))) == 1


def test_a_deleted_chat_leaves_no_text_behind(tmp_path: Path) -> None:
    index = ChatIndex(tmp_path / "index")
    one = chat("an entirely private word: xylophone")
    index.put(one, (None, None))
    index.remove(one.id)
    assert index.find(("xylophone",)) == []
    assert index.chats() == {}
    index.close()
    assert b"xylophone" not in (tmp_path / "index").read_bytes()


def test_other_users_cannot_read_the_index(tmp_path: Path) -> None:
    index = ChatIndex(tmp_path / "index")
    index.put(chat("private"), (None, None))
    files = list(tmp_path.iterdir())
    assert len(files) == 3, "with the files in which SQLite keeps the latest changes"
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    index.close()


def test_the_list_is_read_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "index"
    assert peek_chats(path) == {}
    index = ChatIndex(path)
    one = chat("text", title="Rows", updated=5.0)
    stamps = ((1, 2, 3), None)
    index.put(one, stamps)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")  # another window that writes
    found = peek_chats(path)
    holder.execute("ROLLBACK")
    holder.close()
    assert found == index.chats()
    assert found[one.id].summary.title == "Rows"
    assert found[one.id].stamps == stamps_key(stamps) == json.dumps([[1, 2, 3], None])
    index.close()
    assert peek_chats(path) == found, "and after the last window has closed it"


@pytest.mark.parametrize("damage", ["garbage", "truncated", "tables", "older", "missing"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "index"
    index = ChatIndex(path)
    for number in range(200):
        index.put(chat(f"text {number} " * 50), (None, None))
    index.close()
    whole = path.read_bytes()
    if damage == "garbage":
        path.write_bytes(b"no database at all " * 100)
    elif damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "missing":
        path.unlink()
    else:
        with sqlite3.connect(path) as file:
            file.execute("DROP TABLE texts" if damage == "tables" else "PRAGMA user_version = 1")
        file.close()
    index = ChatIndex(path)
    assert len(peek_chats(path)) in (0, 200)
    if damage != "missing":
        with pytest.raises(IndexUnusableError):
            index.find(("text",))
    assert index.find(("text",)) == [], "it is empty now"
    index.put(chat("other text"), (None, None))
    assert len(index.find(("other",))) == 1
    index.close()


def test_a_window_goes_on_with_the_index_that_another_has_made_anew(tmp_path: Path) -> None:
    here, there = ChatIndex(tmp_path / "index"), ChatIndex(tmp_path / "index")
    here.put(chat("old"), (None, None))
    there.put(chat("text"), (None, None))
    there._discard()
    there.put(chat("new text"), (None, None))
    assert len(here.find(("new",))) == 1
    here.put(chat("new again"), (None, None))
    assert len(there.find(("new",))) == 2
    here.close()
    there.close()


def test_a_lock_of_another_window_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "BUSY_S", 0.05)
    index = ChatIndex(tmp_path / "index")
    index.put(chat("text"), (None, None))
    holder = sqlite3.connect(tmp_path / "index", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(IndexUnusableError):
        index.put(chat("more text"), (None, None))
    assert len(index.find(("text",))) == 1, "who reads does not wait"
    holder.execute("ROLLBACK")
    holder.close()
    index.put(chat("more text"), (None, None))
    assert len(index.find(("text",))) == 2
    index.close()


def test_a_folder_that_cannot_be_written_has_no_index(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IndexUnusableError):
        ChatIndex(tmp_path / "file" / "index").chats()
