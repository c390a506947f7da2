"""The search index returns the same as reading all chats."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.chat import database
from app.chat import search as search_module
from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.search import TITLE, Hit, find_hits, folded, index_some, parse_words, searched_text
from app.chat.store import FILE, ChatStore

WORDS = [
    "split", "Card", "kärte", "ab", "a", "C++", "x OR y", '"', "*", "日本語", "二", "“", "ß", "-",
    "\0", "\ud800",
]  # fmt: skip


def chat(*texts: str, title: str = "", updated: float = 1.0) -> Conversation:
    messages = [
        Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)
    ]
    return Conversation.of(messages, title=title or "Untitled", updated=updated)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChatStore]:
    made = ChatStore(tmp_path)
    yield made
    made.database.close()


def put(store: ChatStore, *chats: Conversation) -> None:
    """Save chats and index them."""
    for one in chats:
        store.save(one)
    while store.database.write(index_some):
        pass


def find(store: ChatStore, *words: str) -> list[Hit]:
    return store.database.read(lambda file: find_hits(file, words))


def places(hits: list[Hit]) -> list[tuple[str, int]]:
    return [(hit.chat_id, hit.message_id) for hit in hits]


def texts_of(chat: Conversation) -> dict[int, str]:
    """Return the searchable texts of a chat by message."""
    texts = {message.id: searched_text(message) for message in chat.tree}
    whole = database.whole_text
    return {n: folded(whole(text)) for n, text in (texts | {TITLE: chat.title}).items()}


def test_a_hit_names_message_title_and_day(store: ChatStore) -> None:
    one = chat("How are weights split?", "<think>split</think>By rows.", title="Rows", updated=7.0)
    put(store, one)
    (hit,) = find(store, *parse_words("split weights"))
    assert (hit.chat_id, hit.message_id, hit.updated) == (one.id, one.messages[0].id, 7.0)
    assert hit.title.text == "Rows"
    assert [hit.text.text[a:b] for a, b in hit.text.marks] == ["weights", "split"]


def test_titles_are_found_and_come_first(store: ChatStore) -> None:
    new, old = chat("rows", title="Rows", updated=2.0), chat("rows", title="x", updated=1.0)
    put(store, new, old)
    new.title = "Other rows"
    put(store, new)
    hits = find(store, "rows")
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
    store = ChatStore(tmp_path_factory.mktemp("chats"))
    chats = [
        chat(*(" ".join(text) for text in texts), updated=float(number))
        for number, texts in enumerate(contents)
    ]
    words = parse_words(" ".join(typed))
    assume(words)
    with pytest.MonkeyPatch.context() as patch:
        if not has_trigrams:
            patch.setattr(database, "has_trigrams", lambda: False)
            patch.setattr(search_module, "has_trigrams", lambda: False)
        put(store, *chats)
        found = find(store, *words)
    store.database.close()
    naive = set()
    for one in chats:
        bodies = texts_of(one)
        found_in = {n: {word for word in words if word in body} for n, body in bodies.items()}
        if set().union(*found_in.values()) == set(words):
            most = max(map(len, found_in.values()))
            naive |= {(one.id, n) for n, has in found_in.items() if len(has) == most}
    assert set(places(found)) == naive
    order = [(-hit.updated, hit.chat_id, hit.message_id) for hit in found]
    assert order == sorted(order)


def test_words_in_different_messages_find_the_chat(store: ChatStore) -> None:
    apart, together = chat("about whales", "hello there"), chat("whales", "hello whales")
    put(store, apart, together, chat("whales alone"), chat("hello alone"))
    assert set(places(find(store, "whales", "hello"))) == {
        (apart.id, 1), (apart.id, 2), (together.id, 2),
    }  # fmt: skip


def test_nothing_that_is_typed_is_an_error(store: ChatStore) -> None:
    texts = ("some words", "x OR y", 'a "quoted" (one)*')
    put(store, chat(*texts))

    @given(st.one_of(st.text(max_size=60), st.text("abOR\"*()^:-+ {}'", max_size=12)))
    def check(typed: str) -> None:
        if words := parse_words(typed):
            has = [[word in folded(text) for word in words] for text in (*texts, "untitled")]
            is_found = all(map(any, zip(*has, strict=True)))
            most = max(map(sum, has))
            assert len(find(store, *words)) == is_found * sum(sum(one) == most for one in has)

    check()


def test_only_what_has_changed_is_written(store: ChatStore) -> None:
    one = chat("first", "second", "third")
    put(store, one)

    def rows() -> dict[str, int]:
        query = "SELECT body, number FROM texts WHERE message > 0"
        return dict(store.database.read(lambda file: file.execute(query).fetchall()))

    before = rows()
    one.messages[1].content = "changed"
    put(store, one)
    after = rows()
    assert set(after) == {"first", "changed", "third"}
    assert {body: after[body] for body in ("first", "third")} == {
        body: before[body] for body in ("first", "third")
    }
    assert find(store, "second") == []
    assert len(find(store, "changed")) == 1


def test_a_deleted_chat_leaves_no_text_behind(store: ChatStore, tmp_path: Path) -> None:
    one = chat("an entirely private word: xylophone")
    put(store, one)
    store.delete(one.id)
    assert find(store, "xylophone") == []
    for path in tmp_path.iterdir():
        assert b"xylophone" not in path.read_bytes()


def test_a_deleted_chat_that_comes_back_is_found(store: ChatStore) -> None:
    one = chat("an entirely private word: xylophone")
    put(store, one)
    store.restore(store.delete(one.id))
    put(store)
    assert len(find(store, "xylophone")) == 1
    assert store.read(one.id) == one


@pytest.mark.parametrize(("rows", "n_set_aside"), [("id > 10", 0), ("true", 1)])
def test_a_damaged_index_is_made_anew_and_no_chat_is_touched(
    store: ChatStore, tmp_path: Path, rows: str, n_set_aside: int
) -> None:
    """The chats move to a new file if the index cannot be rebuilt in place."""
    chats = [chat(f"text {number} " * 50) for number in range(50)]
    put(store, *chats)
    store.database.close()
    with sqlite3.connect(tmp_path / FILE) as file:
        file.execute(f"DELETE FROM trigrams_data WHERE {rows}")
    file.close()
    find(store, "text", "7")
    put(store)
    assert len(find(store, "text", "7")) > 0
    assert store.read(chats[0].id) == chats[0]
    store.delete(chats[0].id)
    put(store, chat("new text"))
    assert len(find(store, "new")) == 1
    assert len(store.database.set_aside) == n_set_aside


def test_there_is_nothing_to_find_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ChatStore(tmp_path / "file" / "chats")
    assert find(store, "words") == []
    store.database.close()
