"""Chats as data and as files."""

import json
import os
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat.conversation import Conversation, title_from
from app.chat.message import AnswerStats, Message, Thought, split_thought, with_answer
from app.chat.store import ChatConflict, ChatStore, ChatStoreError
from engine import ChatMessage
from tests.helpers.odd_files import make_odd_file, odd_files
from tests.helpers.old_chats import write_chat

STATS = AnswerStats("stop", 412, 61.8, 0.31, 900)


def a_chat() -> Conversation:
    chat = Conversation(system_prompt="Be kind.")
    chat.add(Message("user", "Why?\nTell me."))
    chat.add(Message("assistant", "<think>hm</think>\n\nBecause.", STATS, 2.4))
    return chat


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", Thought(None, "plain")),
        ("<thi", Thought(None, "")),
        ("<", Thought(None, "<")),
        ("<think>a", Thought("a", "", is_open=True)),
        ("\n<think>\na\n</think>\n\nb", Thought("a", "b")),
        ("opened by the template</think>b", Thought("opened by the template", "b")),
        ("<thing> is no thought", Thought(None, "<thing> is no thought")),
        ("<think></think>b", Thought("", "b")),
    ],
)
def test_thoughts_are_told_from_answers(text: str, expected: Thought) -> None:
    assert split_thought(text) == expected


def test_the_prompt_has_the_system_prompt_and_no_thoughts() -> None:
    assert a_chat().prompt() == (
        ChatMessage("system", "Be kind."),
        ChatMessage("user", "Why?\nTell me."),
        ChatMessage("assistant", "Because."),
    )


def test_a_continued_answer_keeps_its_thought_in_the_prompt() -> None:
    assert a_chat().prompt(continue_last=True)[-1].content == "<think>hm</think>\n\nBecause."


def test_an_answer_that_is_only_a_thought_is_left_out() -> None:
    chat = Conversation()
    chat.add(Message("user", "a"))
    chat.add(Message("assistant", "<think>never ended"))
    assert chat.prompt() == (ChatMessage("user", "a"),)


def test_questions_that_were_not_answered_become_one_turn() -> None:
    """Templates that require alternating turns would reject all later questions."""
    chat = Conversation()
    for role, text in [("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "")]:
        chat.add(Message(role, text))
    assert chat.prompt() == (ChatMessage("user", "a\n\nb"),)


def test_the_first_question_names_the_chat() -> None:
    assert a_chat().title == "Why?"
    assert title_from("word " * 30) == "word word word word word word word word word…"


def test_a_chat_survives_the_disk(tmp_path: Path) -> None:
    store, chat = ChatStore(tmp_path), a_chat()
    chat.draft = "half a thought"
    store.save(chat)
    assert ChatStore(tmp_path).load() == [chat]
    store.delete(chat.id)
    assert store.load() == []


@given(st.text())
def test_any_text_survives_json(text: str) -> None:
    chat = Conversation()
    chat.add(Message("user", text))
    assert Conversation.from_json(json.loads(json.dumps(chat.to_json()))) == chat


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", '{"id": 3}', '{"id": "x", "title": "", "created": 0, "updated": 0}',
        '{"id": "x", "title": "", "created": 0, "updated": 0, "messages": [{"role": "user"}]}',
        '{"id": "../x", "title": "", "created": 0, "updated": 0, "messages": []}', "[" * 100_000,
        '{"schema": 2, "id": "x", "title": "", "created": 0, "updated": 0, "messages": '
        '[{"role": "user", "content": "", "id": 2, "parent": 2}]}',
        '{"schema": 2, "id": "x", "title": "", "created": 0, "updated": 0, "messages": '
        '[{"role": "user", "content": "", "id": 0, "parent": 0}]}',
        '{"schema": true, "id": "x", "title": "", "created": 0, "updated": 0, "messages": []}',
        '{"id": "x", "title": "", "created": 0, "updated": NaN, "messages": []}',
        '{"id": "x", "title": "", "created": 0, "updated": 1e300, "messages": []}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_chat_is_skipped_and_stays(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    store = ChatStore(tmp_path)
    store.save(good := a_chat())
    survey = store.survey()
    assert [summary.id for summary in survey.summaries] == [good.id]
    assert len(survey.damaged) == 1
    assert (tmp_path / "x.json").read_text() == content


@odd_files
def test_an_odd_entry_in_the_folder_is_skipped(tmp_path: Path, kind: str) -> None:
    make_odd_file(tmp_path / "x.json", kind)
    store = ChatStore(tmp_path)
    store.save(good := a_chat())
    write_chat(tmp_path / f"{(other := a_chat()).id}.json", other)
    make_odd_file(tmp_path / f"{other.id}.journal", kind)
    survey = store.survey()
    assert [summary.id for summary in survey.summaries] == [good.id]
    found = {one.path.stem for one in [*survey.damaged, *store.bring_in(survey.unread).damaged]}
    assert found == {"x", other.id}
    store.tidy()
    assert os.path.lexists(tmp_path / "x.json")


OLD = {
    "schema": 1, "id": "old", "title": "Why?", "created": 1.0, "updated": 2.0, "system_prompt": "",
    "draft": "", "drops_oldest": False, "colour": "blue",
    "messages": [
        {"role": "user", "content": "Why?", "stats": None, "thought_s": None, "problem": ""},
        {"role": "assistant", "content": "So.", "stats": None, "thought_s": None, "mood": "good"},
    ],
}  # fmt: skip


def test_an_old_chat_is_read_as_a_tree_and_its_file_kept(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps(OLD))
    store = ChatStore(tmp_path)
    store.survey()
    (chat,) = store.load()
    assert [(m.id, m.parent, m.content) for m in chat.messages] == [(1, 0, "Why?"), (2, 1, "So.")]
    chat.add(Message("user", "Really?"), 0)
    store.save(chat)
    assert json.loads((tmp_path / "json" / "old.json").read_text()) == OLD
    assert [(m.id, m.parent) for m in store.read("old").tree] == [(1, 0), (2, 1), (3, 0)]
    assert ChatStore(tmp_path).load() == [chat]


def test_what_this_version_does_not_know_is_written_again(tmp_path: Path) -> None:
    stats = {"reason": "stop", "n_tokens": 1, "tokens_per_s": 1, "first_token_s": 1}
    old = json.loads(json.dumps(OLD))
    old["messages"][1]["stats"] = stats | {"context_tokens": 3, "watts": 300}
    (tmp_path / "old.json").write_text(json.dumps(old))
    store = ChatStore(tmp_path)
    store.survey()
    (chat,) = store.load()
    chat.add(Message("user", "Really?"))
    store.save(chat)
    stored = ChatStore(tmp_path).read("old").to_json()
    assert stored["colour"] == "blue"
    assert stored["messages"][1]["mood"] == "good"
    assert stored["messages"][1]["stats"]["watts"] == 300
    assert Conversation.from_json(stored) == chat


def test_a_chat_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    newer = json.dumps(OLD | {"schema": 99})
    (tmp_path / "old.json").write_text(newer)
    store = ChatStore(tmp_path)
    assert [found.why for found in store.survey().damaged] == [
        "it was written by a newer version of Tandem"
    ]
    assert store.load() == []
    store.tidy()
    assert (tmp_path / "old.json").read_text() == newer


def test_a_fork_has_the_messages_up_to_one_and_nothing_else() -> None:
    chat = a_chat()
    other = chat.add(Message("assistant", "No."), 1)
    chat.add(Message("user", "Sure?"))
    made = chat.fork(other.id)
    assert [m.content for m in made.messages] == ["Why?\nTell me.", "No."]
    assert [(m.id, m.parent) for m in made.tree] == [(1, 0), (2, 1)]
    assert made.id != chat.id
    assert made.system_prompt == chat.system_prompt
    made.messages[0].content = "changed"
    assert chat.messages[0].content == "Why?\nTell me."


@pytest.mark.parametrize(
    ("content", "after"),
    [
        ("old", "new"),
        ("<think>hm</think>\n\nold", "<think>hm</think>\n\nnew"),
        ("<think>hm", "<think>hm</think>\n\nnew"),
        ("", "new"),
    ],
)
def test_another_answer_keeps_the_thought_before_it(content: str, after: str) -> None:
    assert with_answer(content, "new") == after
    assert split_thought(after).answer == "new"


def test_a_failed_save_keeps_what_is_there_and_says_why(tmp_path: Path) -> None:
    store, chat = ChatStore(tmp_path), a_chat()
    store.save(chat)
    chat.add(Message("user", "more"))

    def limit(file: sqlite3.Connection) -> None:
        file.execute(f"PRAGMA max_page_count = {file.execute('PRAGMA page_count').fetchone()[0]}")

    store.database.read(limit)  # a full disk
    chat.messages[-1].content = "words " * 2000
    with pytest.raises(ChatStoreError, match="No space left on device"):
        store.save(chat)
    assert [len(c.messages) for c in ChatStore(tmp_path).load()] == [2]
    store.database.read(lambda file: file.execute("PRAGMA max_page_count = 1000000"))
    store.save(chat)
    assert ChatStore(tmp_path).load() == [chat]


def test_a_chat_that_did_not_change_is_not_written(tmp_path: Path) -> None:
    """So a second window that only shows the chat cannot undo the first one's changes."""
    first, chat = ChatStore(tmp_path), a_chat()
    first.save(chat)
    second = ChatStore(tmp_path)
    (shown,) = second.load()
    chat.add(Message("user", "more"))
    first.save(chat)
    second.save(shown)
    assert ChatStore(tmp_path).load() == [chat]
    first.delete(chat.id)
    second.save(shown)
    assert first.load() == []


def test_what_another_window_wrote_is_not_written_over(tmp_path: Path) -> None:
    first, chat = ChatStore(tmp_path), a_chat()
    first.save(chat)
    second = ChatStore(tmp_path)
    (other,) = second.load()
    chat.add(Message("user", "more"))
    first.save(chat)
    other.add(Message("user", "something else"))
    with pytest.raises(ChatConflict, match="another window"):
        second.save(other)
    assert ChatStore(tmp_path).load() == [chat]


def test_an_id_cannot_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a chat id"):
        ChatStore(tmp_path).delete("../settings")
