"""What is added to a chat's journal is there again after a crash at any moment, and only once."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat import chat_file, store
from app.chat.attachments.attachment import Attachment
from app.chat.branches.tree import ROOT, MessageTree
from app.chat.conversation import EFFORTS, Conversation
from app.chat.journal import change_between, changed
from app.chat.message import AnswerStats, Message
from app.chat.pictures.picture import ChatPicture
from app.chat.store import ChatConflict, ChatStore, ChatStoreError
from app.chat.tools.tool_use import STATES, ToolUse
from engine import process_mark

WORDS = ("Once", " upon", " a ½ time", "\nthere", " was", " a \ud83d", " dragon 🐉", ".")
STATS = AnswerStats("stop", 8, 61.8, 0.3, 20)

texts = st.text(st.characters(codec=None), max_size=8)
extras = st.dictionaries(st.sampled_from(["colour", "gone", "n_kept", "head"]), texts, max_size=2)
states = st.sampled_from(sorted(set(STATES) - {"running"}))
calls = st.builds(ToolUse, *[texts] * 5, states, texts, extra=extras)
pictures = st.lists(
    st.builds(
        ChatPicture, texts, st.just(f"{'0f' * 20}.png"), *[st.integers(1, 9)] * 2, st.integers(0, 2)
    ),
    max_size=2,
).map(tuple)
messages = st.builds(
    Message,
    st.sampled_from(["user", "assistant"]),
    texts,
    st.none() | st.just(STATS),
    st.none() | st.floats(0, 100),
    texts,
    attachments=st.tuples() | st.tuples(st.builds(Attachment, texts, texts)),
    edited=st.booleans(),
    thought_tokens=st.none() | st.integers(0, 9),
    calls=st.lists(calls, max_size=2).map(tuple),
    pictures=pictures,
    extra=extras,
)


@st.composite
def trees(draw: st.DrawFn) -> MessageTree[Message]:
    """Return messages in versions, of which some are gone."""
    tree = MessageTree[Message]()
    for message in draw(st.lists(messages, max_size=6)):
        tree.add(message, draw(st.sampled_from([ROOT, *(m.id for m in tree)])))
    for place in draw(st.lists(st.integers(0, 5), max_size=3)):
        if place < len(tree):
            tree.remove(list(tree)[place].id)
    if len(tree):
        tree.choose(draw(st.sampled_from([m.id for m in tree])))
    return tree


chats = st.builds(
    Conversation,
    id=st.just("c"),
    title=texts,
    created=st.just(1.0),
    updated=st.floats(0, 1e10),
    system_prompt=texts,
    draft=texts,
    drops_oldest=st.booleans(),
    draft_files=st.lists(texts, max_size=2).map(tuple),
    draft_pictures=pictures,
    thinks=st.none() | st.booleans(),
    effort=st.sampled_from(["", *EFFORTS]),
    uses_tools=st.booleans(),
    servers_off=st.lists(texts, max_size=2).map(tuple),
    sampling=st.none() | st.dictionaries(st.sampled_from(["top_k", "stop"]), st.just([]) | texts),
    has_own_title=st.booleans(),
    tree=trees(),
    extra=extras,
)


def growing(chats: ChatStore) -> Iterator[Conversation]:
    """Save a chat, then its answer as it grows; yield a copy of each state on the disk."""
    chat = Conversation(draft="later")
    chat.add(Message("user", "Tell me a story."))
    chats.save(chat)
    yield chat.copy()
    chat.add(Message("assistant", ""))
    for word in WORDS:
        chat.messages[-1].content += word
        chat.draft += "!"
        chats.save(chat, may_append=True)
        yield chat.copy()
    chat.messages[-1].stats, chat.draft, chat.title = STATS, "new", "Dragons"
    chats.save(chat, may_append=True)
    yield chat.copy()


def loaded(folder: Path) -> Conversation:
    chats = ChatStore(folder)
    (chat,) = chats.load()
    assert not chats.damaged
    return chat


def journal_of(folder: Path) -> Path:
    (path,) = folder.glob("*.journal")
    return path


def disown(path: Path) -> None:
    """Make a journal one of a process that has ended: of this one's number, with another start."""
    pid, _, machine = process_mark().split("-")
    first, _, others = path.read_bytes().partition(b"\n")
    header = json.loads(first.partition(b" ")[2]) | {"owner": f"{pid}-1-{machine}"}
    path.write_bytes(store.journal._line(header) + others)


def test_every_field_of_a_chat_is_tried() -> None:
    """A new field belongs into the changes, and into `chats` here."""
    of_chat = (
        "id title created updated system_prompt draft drops_oldest sampling thinks has_own_title"
        " tree extra draft_files draft_pictures effort uses_tools servers_off"
    )  # and `origin`, which no file has
    of_message = "role content stats thought_s problem id parent edited extra"
    of_message += " attachments thought_tokens calls pictures"
    assert {field.name for field in fields(Conversation)} - {"origin"} == set(of_chat.split())
    assert {field.name for field in fields(Message)} == set(of_message.split())


@given(chats, chats)
def test_a_change_leads_from_one_state_to_the_other(old: Conversation, new: Conversation) -> None:
    change = json.loads(json.dumps(change_between(old, new)))
    assert changed(old, change) == new


def test_a_journal_of_messages_in_a_row_still_counts() -> None:
    """A window of an older version was killed, and this one finds what it has left."""
    file = {
        "schema": 1, "id": "c", "title": "Hi", "created": 1.0, "updated": 2.0, "draft": "mo",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}],
    }  # fmt: skip
    line = {
        "updated": 3.0, "drops_oldest": True, "draft": [2, "re"], "n_kept": 1,
        "messages": [{"role": "assistant", "content": [3, "lo"], "stats": None, "problem": ""}],
    }  # fmt: skip
    chat = changed(Conversation.from_json(file), line)
    assert [(m.id, m.parent, m.content) for m in chat.messages] == [(1, 0, "Hi"), (2, 1, "Hello")]
    assert (chat.updated, chat.draft, chat.drops_oldest, chat.extra) == (3.0, "more", True, {})


@given(chats)
def test_a_copy_is_equal_and_stays_so(chat: Conversation) -> None:
    copy, before = chat.copy(), chat.to_json()
    assert copy == chat
    for message in chat.tree:
        message.content += "more"
    assert copy.to_json() == before


@given(chats)
def test_the_file_of_a_chat_is_its_json(chat: Conversation) -> None:
    """As every version reads it, however it is cut into pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_file, "SLICE", 3)
        pieces = [p.encode(errors="surrogatepass") for p in chat_file._pieces(chat.to_json())]
    assert json.loads(b"".join(pieces).decode(errors="surrogatepass")) == chat.to_json()


def test_a_growing_answer_is_not_written_again(tmp_path: Path) -> None:
    states = growing(ChatStore(tmp_path))
    next(states)
    (file,) = tmp_path.iterdir()
    before = file.stat()
    for state in states:
        assert loaded(tmp_path) == state
    assert file.stat() == before
    assert journal_of(tmp_path).read_bytes().count(WORDS[0].encode()) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_other_users_cannot_read_a_chat(tmp_path: Path) -> None:
    list(growing(ChatStore(tmp_path)))
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600, 0o600]


def test_a_journal_cut_at_any_byte_loses_only_its_last_line(tmp_path: Path) -> None:
    states = list(growing(ChatStore(tmp_path)))
    path = journal_of(tmp_path)
    data = path.read_bytes()
    assert data.count(b"\n") == len(states)  # a header, and a line for each state after the first
    for end in range(len(data)):
        path.unlink()  # to write over a file takes 20 times as long on ext4
        path.write_bytes(data[:end])
        assert loaded(tmp_path) == states[max(0, data[:end].count(b"\n") - 1)]


def test_a_journal_damaged_at_any_byte_keeps_what_is_before(tmp_path: Path) -> None:
    states = list(growing(ChatStore(tmp_path)))
    path = journal_of(tmp_path)
    data = path.read_bytes()
    for place in range(len(data)):
        path.unlink()
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert loaded(tmp_path) == states[max(0, data[:place].count(b"\n") - 1)]


@given(st.binary(max_size=200), st.lists(st.dictionaries(st.text(), st.integers()), max_size=3))
def test_no_journal_keeps_a_chat_from_being_read(noise: bytes, lines: list[dict[str, int]]) -> None:
    chat = Conversation(id="c")
    for change in [*lines, {"updated": 1, "n_kept": 9, "messages": []}, {"n_kept": 0}]:
        with pytest.raises(ValueError, match=r"no change|missing"):
            changed(chat, change)
    started, changes = store.read_journal(noise)
    assert started is None
    assert list(changes) == []


class Killed(BaseException):
    """The end of the process: nothing that follows is done."""


@pytest.mark.parametrize("name", ["fsync", "replace", "unlink"])
def test_a_crash_at_any_step_leaves_a_whole_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before or after each call of the system that changes a file."""
    owner = os if name == "fsync" else Path
    real: Callable[..., object] = getattr(owner, name)

    def run(folder: Path, last: int, *, is_done: bool) -> tuple[list[Conversation], bool]:
        """Save until the call with the number `last`; return the states, and if it came."""
        n_calls, kept = 0, list[Conversation]()

        def call(*args: object, **options: object) -> object:
            nonlocal n_calls
            n_calls += 1
            if n_calls > last and not is_done:
                raise Killed
            result = real(*args, **options)
            if n_calls > last:
                raise Killed
            return result

        monkeypatch.setattr(owner, name, call)
        try:
            chats = ChatStore(folder)
            kept.extend(growing(chats))
            final = kept[-1].copy()
            final.add(Message("user", "Thanks"))
            chats.save(final)
            kept.append(final)
        except Killed:
            return kept, True
        finally:
            monkeypatch.setattr(owner, name, real)
        return kept, False

    for is_done in (False, True):
        number, was_killed = 0, True
        while was_killed:
            folder = tmp_path / f"{is_done}-{number}"
            kept, was_killed = run(folder, number, is_done=is_done)
            if kept:
                found = loaded(folder)
                assert found.messages[0] == kept[-1].messages[0]
                shown = "".join(message.content for message in found.messages)
                assert shown.startswith("".join(m.content for m in kept[-1].messages))
            number += 1
        assert number > 1, "there are such calls"


def test_a_journal_of_another_content_is_not_applied(tmp_path: Path) -> None:
    """As after a crash between the new file of a chat and the end of its journal."""
    chats = ChatStore(tmp_path)
    *_, last = growing(chats)
    path = journal_of(tmp_path)
    old = path.read_bytes()
    last.add(Message("user", "And then?"))
    chats.save(last)
    assert not path.exists()
    path.write_bytes(old)
    assert loaded(tmp_path) == last
    disown(path)
    again = ChatStore(tmp_path)
    (chat,) = again.load()
    again.tidy()
    assert not path.exists()
    chat.draft = "more"
    again.save(chat, may_append=True)
    assert loaded(tmp_path) == chat


def test_the_next_window_merges_what_a_killed_one_left(tmp_path: Path) -> None:
    *_, last = growing(ChatStore(tmp_path))
    disown(journal_of(tmp_path))
    chats = ChatStore(tmp_path)
    assert chats.load() == [last]
    chats.tidy()
    (file,) = tmp_path.iterdir()
    assert (
        Conversation.from_json(json.loads(file.read_bytes().decode(errors="surrogatepass"))) == last
    )


def test_journals_of_living_windows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ChatStore(tmp_path)
    *_, last = growing(first)
    path = journal_of(tmp_path)
    second = ChatStore(tmp_path)
    (chat,) = second.load()
    with monkeypatch.context() as patch:
        patch.setattr(store, "process_mark", lambda: "another window's")
        second.tidy()
    assert path.exists()
    last.draft = "still typing"
    first.save(last, may_append=True)
    assert loaded(tmp_path) == last
    chat.draft = "here, too"
    with pytest.raises(ChatConflict, match="another window"):
        second.save(chat, may_append=True)


def test_a_journal_without_its_chat_goes_and_one_of_a_damaged_chat_stays(tmp_path: Path) -> None:
    list(growing(ChatStore(tmp_path)))
    path = journal_of(tmp_path)
    disown(path)
    file = path.with_suffix(".json")
    file.write_text("{")
    chats = ChatStore(tmp_path)
    assert chats.load() == []
    chats.tidy()
    assert path.exists()
    file.unlink()
    chats.tidy()
    assert list(tmp_path.iterdir()) == []


def test_after_half_a_line_the_whole_chat_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk becomes full in the middle of a line; nothing may follow that."""
    chats = ChatStore(tmp_path)
    states = list(growing(chats))

    def half(path: Path, change: object) -> None:
        with path.open("ab") as file:
            file.write(b'01234567 {"upda')
        raise OSError(28, "No space left on device")

    last = states[-1].copy()
    last.draft = "one more"
    with monkeypatch.context() as patch:
        patch.setattr(store, "add_change", half)
        with pytest.raises(ChatStoreError, match="No space left"):
            chats.save(last, may_append=True)
    assert loaded(tmp_path) == states[-1]
    chats.save(last, may_append=True)
    assert loaded(tmp_path) == last
    assert len(list(tmp_path.iterdir())) == 1


def test_a_long_journal_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LONG_JOURNAL", 400)
    chats, chat, sizes = ChatStore(tmp_path), Conversation(), []
    for _ in range(100):
        chat.draft += "typed "
        chats.save(chat, may_append=True)
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob("*.journal")))
    assert max(sizes) < 2000
    assert sizes.count(0) > 1
    assert loaded(tmp_path) == chat


def test_a_deleted_chat_leaves_no_journal(tmp_path: Path) -> None:
    chats = ChatStore(tmp_path)
    *_, last = growing(chats)
    chats.delete(last.id)
    assert list(tmp_path.iterdir()) == []
