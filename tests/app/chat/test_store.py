"""Saved chats survive a crash at any moment, including those of older versions."""

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.chat import chat_file, database
from app.chat.chat_file import changed, read_journal
from app.chat.conversation import EFFORTS, ChatSummary, Conversation
from app.chat.message import AnswerStats, Attachment, ChatImage, Message
from app.chat.store import FILE, OLD_FOLDER, ChatConflict, ChatStore, ChatStoreError
from app.chat.tool_use import STATES, ToolUse
from app.chat.tree import ROOT, MessageTree
from tests.helpers.old_chats import change_between, journal_line, write_chat, write_with_journal

WORDS = ("Once", " upon", " a ½ time", "\nthere", " was", " a \ud83d", " dragon 🐉", ".")
STATS = AnswerStats("stop", 8, 61.8, 0.3, 20)

texts = st.text(st.characters(codec=None), max_size=8)
extras = st.dictionaries(st.sampled_from(["colour", "gone", "n_kept", "head"]), texts, max_size=2)
states = st.sampled_from(sorted(set(STATES) - {"running"}))
calls = st.builds(ToolUse, *[texts] * 5, states, texts, extra=extras)
pictures = st.lists(
    st.builds(
        ChatImage, texts, st.just(f"{'0f' * 20}.png"), *[st.integers(1, 9)] * 2, st.integers(0, 2)
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
def trees(draw: st.DrawFn) -> MessageTree:
    """Return messages in versions, some of them deleted."""
    tree = MessageTree()
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


def growing(store: ChatStore) -> Iterator[Conversation]:
    """Save a chat, then its growing answer; yield a copy of each state on disk."""
    chat = Conversation(draft="later")
    chat.add(Message("user", "Tell me a story."))
    store.save(chat)
    yield chat.copy()
    chat.add(Message("assistant", ""))
    for word in WORDS:
        chat.messages[-1].content += word
        chat.draft += "!"
        store.save(chat)
        yield chat.copy()
    chat.messages[-1].stats, chat.draft, chat.title = STATS, "new", "Dragons"
    store.save(chat)
    yield chat.copy()


def loaded(folder: Path) -> Conversation:
    store = ChatStore(folder)
    (chat,) = store.load()
    store.database.close()
    return chat


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def put_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_every_field_of_a_chat_is_tried() -> None:
    """Add new fields to `chats` here."""
    of_chat = (
        "id title created updated system_prompt draft drops_oldest sampling thinks has_own_title"
        " tree extra draft_files draft_pictures effort uses_tools servers_off"
    )  # and `origin`, which is not stored
    of_message = "role content stats thought_s problem id parent edited extra"
    of_message += " attachments thought_tokens calls pictures"
    assert {field.name for field in fields(Conversation)} - {"origin"} == set(of_chat.split())
    assert {field.name for field in fields(Message)} == set(of_message.split())


@given(chats)
def test_a_copy_is_equal_and_stays_so(chat: Conversation) -> None:
    copy, before = chat.copy(), chat.to_json()
    assert copy == chat
    for message in chat.tree:
        message.content += "more"
    assert copy.to_json() == before


@given(chats)
def test_the_file_of_a_chat_is_its_json(chat: Conversation) -> None:
    """Like every version reads it, however it is sliced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_file, "SLICE", 3)
        data = b"".join(chat_file.encoded(chat.to_json()))
    assert chat_file.decoded(data) == chat.to_json()


@settings(max_examples=40, deadline=None)
@given(st.lists(chats, min_size=1, max_size=4))
def test_any_states_of_a_chat_are_written_one_after_another(
    tmp_path_factory: pytest.TempPathFactory, states: list[Conversation]
) -> None:
    folder = tmp_path_factory.mktemp("chats")
    here, there = ChatStore(folder), ChatStore(folder)
    for state in states:
        here.save(state)
        found = there.read("c")
        assert found == state
        assert found.to_json() == state.to_json()
    for store in (here, there):
        store.database.close()


def test_a_growing_answer_writes_only_its_own_message(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    states = growing(store)
    next(states)
    query = "SELECT number, data FROM messages WHERE id = 1"
    before = store.database.read(lambda file: file.execute(query).fetchall())
    for state in states:
        assert loaded(tmp_path) == state
    assert store.database.read(lambda file: file.execute(query).fetchall()) == before


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_other_users_cannot_read_a_chat(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    list(growing(store))
    files = list(tmp_path.iterdir())
    assert len(files) == 3, "with SQLite's files of the latest changes"
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def cuts(data: bytes) -> Iterator[int]:
    """Yield positions in a write-ahead log: all near frame boundaries, some in between."""
    frame = 24 + 4096
    for start in range(32, len(data) + 1, frame):
        yield from range(start - 2, min(start + 26, len(data)))
        yield start + 2000


def states_and_files(folder: Path) -> tuple[list[Conversation], dict[str, bytes]]:
    """Return states of a chat and the files after a kill, with all changes in the log."""
    store = ChatStore(folder)
    store.database.write(lambda _: None)  # tables
    store.database.read(lambda file: None)
    store.database.clean()
    states = list(growing(store))
    files = files_of(folder)
    store.database.close()
    return states, {name: files[name] for name in (FILE, f"{FILE}-wal")}


def test_a_log_cut_at_any_place_loses_only_its_last_changes(tmp_path: Path) -> None:
    """As after a power cut; earlier commits are intact."""
    states, files = states_and_files(tmp_path / "chats")
    log, found = files[f"{FILE}-wal"], list[int]()
    for number, end in enumerate(cuts(log)):
        folder = tmp_path / str(number)
        put_files(folder, files | {f"{FILE}-wal": log[:end]})
        store = ChatStore(folder)
        read = store.load()
        assert not read or read[0] in states
        found.append(states.index(read[0]) if read else -1)
        store.database.close()
    assert found == sorted(found), "more of the log never gives less"
    assert found[-1] >= len(states) - 2
    assert set(found) >= set(range(len(states) - 1))


def test_a_log_damaged_at_any_place_keeps_what_is_before(tmp_path: Path) -> None:
    states, files = states_and_files(tmp_path / "chats")
    log, found = files[f"{FILE}-wal"], list[int]()
    for number, place in enumerate(p for p in cuts(log) if 32 <= p < len(log)):
        folder = tmp_path / str(number)
        data = log[:place] + bytes([log[place] ^ 1]) + log[place + 1 :]
        put_files(folder, files | {f"{FILE}-wal": data})
        store = ChatStore(folder)
        read = store.load()
        assert not read or read[0] in states
        found.append(states.index(read[0]) if read else -1)
        store.database.close()
    assert found == sorted(found)


WRITER = """
    import sys
    from pathlib import Path
    from app.chat.conversation import Conversation
    from app.chat.message import Message
    from app.chat.store import ChatStore
    store = ChatStore(Path(sys.argv[1]))
    chat = Conversation(id="c")
    chat.add(Message("user", "Tell me."))
    chat.add(Message("assistant", ""))
    for number in range(100000):
        chat.messages[-1].content += f"{number} "
        store.save(chat)
        print(number, flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
@pytest.mark.parametrize("n_saved", [1, 2, 7, 60])
def test_what_was_saved_before_a_kill_is_there(tmp_path: Path, n_saved: int) -> None:
    """A kill at any moment during the next save."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = -1
        for _ in range(n_saved):
            last = int(process.stdout.readline())
        time.sleep(n_saved % 5 / 1000)
        process.send_signal(signal.SIGKILL)
        last = max([last, *(int(line) for line in process.stdout if line.endswith("\n"))])
    numbers = loaded(tmp_path).messages[-1].content.split()
    assert numbers == [str(number) for number in range(len(numbers))]
    assert len(numbers) - 1 in (last, last + 1)


def test_what_another_window_wrote_or_deleted_is_a_conflict(tmp_path: Path) -> None:
    first = ChatStore(tmp_path)
    *_, last = growing(first)
    second = ChatStore(tmp_path)
    (chat,) = second.load()
    last.draft = "still typing"
    first.save(last)
    assert loaded(tmp_path) == last
    chat.draft = "here, too"
    with pytest.raises(ChatConflict, match="another window"):
        second.save(chat)
    (chat,) = second.load()
    first.delete(chat.id)
    chat.draft = "gone there"
    with pytest.raises(ChatConflict, match="another window"):
        second.save(chat)


def test_two_windows_write_at_once(tmp_path: Path) -> None:
    """They do not deadlock, and nothing is lost."""
    folder = tmp_path / "both"
    texts = [textwrap.dedent(WRITER).replace('id="c"', f'id="{name}"') for name in "ab"]
    texts = [text.replace("100000", "150") for text in texts]
    running = [
        subprocess.Popen([sys.executable, "-c", text, str(folder)], stdout=subprocess.DEVNULL)
        for text in texts
    ]
    assert [process.wait(60) for process in running] == [0, 0]
    store = ChatStore(folder)
    assert sorted(chat.id for chat in store.load()) == ["a", "b"]
    for chat in store.load():
        assert chat.messages[-1].content.split() == [str(number) for number in range(150)]
    store.database.close()


def test_a_deleted_chat_leaves_no_text_behind(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    chat = Conversation.of([Message("user", "an entirely private word: xylophone")])
    (tmp_path / OLD_FOLDER).mkdir()
    write_chat(tmp_path / OLD_FOLDER / f"{chat.id}.json", chat)
    store.save(chat)
    store.delete(chat.id)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"xylophone" not in path.read_bytes()
    store.database.close()


def filled(folder: Path, n_chats: int = 60) -> list[Conversation]:
    """Return the chats stored in a folder."""
    store, stored = ChatStore(folder), []
    for number in range(n_chats):
        chat = Conversation.of([Message("user", f"question {number} " * 100)], title=str(number))
        chat.add(Message("assistant", f"answer {number} " * 200))
        store.save(chat)
        stored.append(chat)
    store.database.close()
    return stored


@pytest.mark.parametrize("page", range(12))
def test_a_damaged_page_costs_no_other(tmp_path: Path, page: int) -> None:
    stored = {chat.id: chat for chat in filled(tmp_path)}
    path = tmp_path / FILE
    whole = bytearray(path.read_bytes())
    whole[page * 4096 : (page + 1) * 4096] = b"\xff" * 4096
    path.write_bytes(whole)
    store = ChatStore(tmp_path)
    found = [store.read(summary.id) for summary in store.survey().summaries]
    assert {chat.id: chat for chat in found} == stored, "only interior pages"
    store.database.close()


def test_a_damaged_database_is_read_with_its_latest_changes(tmp_path: Path) -> None:
    """They are only in the log, and the header is gone."""
    states, files = states_and_files(tmp_path / "chats")
    files[FILE] = b"\xff" * 100 + files[FILE][100:]
    put_files(tmp_path / "killed", files)
    assert loaded(tmp_path / "killed") == states[-1]


@pytest.mark.parametrize("damage", ["garbage", "truncated", "header", "one page", "zeros"])
def test_what_can_be_read_of_a_damaged_database_is_kept(tmp_path: Path, damage: str) -> None:
    stored = {chat.id: chat for chat in filled(tmp_path)}
    path = tmp_path / FILE
    whole = bytearray(path.read_bytes())
    half = len(whole) // 2 // 4096 * 4096
    if damage == "garbage":
        whole[:] = b"no database at all " * 1000
    elif damage == "truncated":
        del whole[half:]
    elif damage == "header":
        whole[:100] = b"\xff" * 100
    elif damage == "zeros":
        whole[half:] = bytes(len(whole) - half)
    else:
        place = whole.index(b"answer 30 ") // 4096 * 4096
        whole[place : place + 4096] = b"\xff" * 4096
    path.write_bytes(whole)
    store = ChatStore(tmp_path)
    found = [store.read(summary.id) for summary in store.survey().summaries]
    n_whole = sum(chat == stored.get(chat.id) for chat in found)
    assert n_whole >= {"garbage": 0, "truncated": 25, "zeros": 25, "one page": 59}.get(damage, 60)
    assert len(found) - n_whole <= 1
    store.save(new := Conversation.of([Message("user", "after that")]))
    assert store.read(new.id) == new
    (aside,) = tmp_path.glob("chats-damaged-*.db")
    assert aside.read_bytes()[:4096] == bytes(whole)[:4096]
    assert [one.path for one in ChatStore(tmp_path).survey().damaged] == [aside]
    store.database.close()


def test_a_window_that_has_a_chat_open_saves_it_though_the_database_is_damaged(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    store = ChatStore(tmp_path)
    chat = store.load()[0]
    store.database.close()
    path = tmp_path / FILE
    path.write_bytes(b"garbage " * 1000)
    chat.draft = "typed"
    store.save(chat)
    assert loaded(tmp_path) == chat
    store.database.close()


def test_a_kill_between_the_names_of_a_recovered_database_loses_nothing(tmp_path: Path) -> None:
    stored = filled(tmp_path, 3)
    (tmp_path / FILE).rename(tmp_path / "chats.recovered")
    store = ChatStore(tmp_path)
    assert sorted(chat.id for chat in store.load()) == sorted(chat.id for chat in stored)
    store.database.close()


def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    (chat,) = filled(tmp_path, 1)
    with sqlite3.connect(tmp_path / FILE) as file:
        file.execute(f"PRAGMA user_version = {database.VERSION + 1}")
    file.close()
    before = (tmp_path / FILE).read_bytes()
    store = ChatStore(tmp_path)
    (damaged,) = store.survey().damaged
    assert damaged.why == "it was written by a newer version of Tandem"
    with pytest.raises(ChatStoreError, match="it was written by a newer version of Tandem"):
        store.save(chat)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_lock_of_another_window_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    (chat,) = filled(tmp_path, 1)
    store = ChatStore(tmp_path)
    holder = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    assert store.read(chat.id) == chat, "readers do not wait"
    chat.draft = "more"
    with pytest.raises(ChatStoreError, match="busy"):
        store.save(chat)
    holder.execute("ROLLBACK")
    holder.close()
    store.save(chat)
    assert loaded(tmp_path) == chat
    assert len(list(tmp_path.glob("*.db"))) == 1
    store.database.close()


def test_a_window_goes_on_with_the_database_that_another_has_made_anew(tmp_path: Path) -> None:
    here, there = ChatStore(tmp_path), ChatStore(tmp_path)
    *_, last = growing(here)
    assert there.load() == [last]
    here.database._replace_damaged()
    there.save(new := Conversation.of([Message("user", "new")]))
    assert here.read(new.id) == new
    assert here.read(last.id) == last
    for store in (here, there):
        store.database.close()


# files of older versions


@given(chats, chats)
def test_a_change_leads_from_one_state_to_the_other(old: Conversation, new: Conversation) -> None:
    change = json.loads(json.dumps(change_between(old, new)))
    assert changed(old, change) == new


def test_a_journal_of_messages_in_a_row_still_counts() -> None:
    """A window of an older version was killed, and this one finds its leftovers."""
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


def brought_in(folder: Path) -> Conversation:
    store = ChatStore(folder)
    (summary,) = store.survey().summaries
    chat = store.read(summary.id)
    assert summary == ChatSummary(chat.id, database.whole_text(chat.title), chat.updated)
    store.database.close()
    return chat


def old_states(folder: Path) -> tuple[list[Conversation], Path]:
    """Return states of a chat, and the journal of the last ones."""
    states = list(growing(ChatStore(folder / "new")))
    return states, write_with_journal(folder / f"{states[0].id}.json", states)


def test_old_chats_are_brought_in_once_and_their_files_are_kept(tmp_path: Path) -> None:
    states, journal = old_states(tmp_path)
    before = files_of(tmp_path)
    assert brought_in(tmp_path) == states[-1]
    assert not journal.exists()
    assert files_of(tmp_path / OLD_FOLDER) == before
    put_back = tmp_path / f"{states[0].id}.json"
    put_back.write_bytes(before[put_back.name])  # an older backup
    store = ChatStore(tmp_path)
    assert len(store.survey().summaries) == 2, "both are kept"
    assert states[-1] in store.load()
    store.database.close()


def test_a_file_that_cannot_be_moved_is_brought_in_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, journal = old_states(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    chat = brought_in(tmp_path)
    assert journal.exists()
    store = ChatStore(tmp_path)
    store.read(chat.id)
    chat.draft = "more"
    store.save(chat)
    store.database.close()
    assert brought_in(tmp_path) == chat


def test_an_old_journal_cut_at_any_byte_loses_only_its_last_line(tmp_path: Path) -> None:
    states, path = old_states(tmp_path)
    data, file = path.read_bytes(), path.with_suffix(".json").read_bytes()
    for number, end in enumerate(range(0, len(data), 7)):
        folder = tmp_path / str(number)
        put_files(folder, {path.with_suffix(".json").name: file, path.name: data[:end]})
        assert brought_in(folder) == states[max(0, data[:end].count(b"\n") - 1)]


def test_an_old_journal_damaged_at_any_byte_keeps_what_is_before(tmp_path: Path) -> None:
    states, path = old_states(tmp_path)
    data, file = path.read_bytes(), path.with_suffix(".json").read_bytes()
    for number, place in enumerate(range(0, len(data), 7)):
        folder = tmp_path / str(number)
        wrong = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        put_files(folder, {path.with_suffix(".json").name: file, path.name: wrong})
        assert brought_in(folder) == states[max(0, data[:place].count(b"\n") - 1)]


@given(st.binary(max_size=200), st.lists(st.dictionaries(st.text(), st.integers()), max_size=3))
def test_no_journal_keeps_a_chat_from_being_read(noise: bytes, lines: list[dict[str, int]]) -> None:
    chat = Conversation(id="c")
    for change in [*lines, {"updated": 1, "n_kept": 9, "messages": []}, {"n_kept": 0}]:
        with pytest.raises(ValueError, match=r"not a change|missing"):
            changed(chat, change)
    base, changes = read_journal(noise)
    assert base == ""
    assert list(changes) == []


def test_an_old_journal_of_another_content_is_not_applied(tmp_path: Path) -> None:
    """As after a crash between the new file of a chat and the end of its journal."""
    states, path = old_states(tmp_path)
    old = path.read_bytes()
    last = states[-1]
    last.add(Message("user", "And then?"))
    write_chat(path.with_suffix(".json"), last)
    path.write_bytes(old)
    assert brought_in(tmp_path) == last


def test_after_half_a_line_of_an_old_journal_nothing_is_read(tmp_path: Path) -> None:
    states, path = old_states(tmp_path)
    with path.open("ab") as file:
        file.write(b'01234567 {"upda')
        file.write(journal_line(change_between(states[-1], states[0])))
    assert brought_in(tmp_path) == states[-1]


def test_a_damaged_old_chat_and_its_journal_stay(tmp_path: Path) -> None:
    _, path = old_states(tmp_path)
    file = path.with_suffix(".json")
    file.write_text("{")
    store = ChatStore(tmp_path)
    survey = store.survey()
    assert [damaged.path for damaged in survey.damaged] == [file]
    assert survey.summaries == []
    store.tidy()
    assert path.exists()
    assert file.read_text() == "{"


def test_many_old_chats_are_read_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.chat.store.READ_AT_ONCE", 2000)
    stored = []
    for number in range(20):
        chat = Conversation.of([Message("user", "words " * 50)])
        stored.append(chat)
        path = tmp_path / f"{chat.id}.json"
        write_chat(path, chat)
        os.utime(path, (number, number))
    store = ChatStore(tmp_path)
    survey = store.survey()
    assert 0 < len(survey.summaries) < 5
    assert {summary.id for summary in survey.summaries} <= {chat.id for chat in stored[-5:]}
    assert len(survey.unread) == 20 - len(survey.summaries)
    unread = next(chat for chat in stored if chat.id in survey.unread)
    assert store.read(unread.id) == unread, "although it is not in the database"
    assert len(store.bring_in(survey.unread).summaries) == len(survey.unread)
    assert len(store.load()) == 20
    assert store.survey().unread == set()
    store.database.close()
