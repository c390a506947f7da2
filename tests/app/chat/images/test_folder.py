"""The image files of chats: stored once, linked, hidden, restored and deleted."""

import json
import os
import time
from pathlib import Path

import pytest
from PySide6.QtCore import QObject
from PySide6.QtWidgets import QApplication

from app.chat.conversation import Conversation
from app.chat.export import exported, imported
from app.chat.images import files as folder_module
from app.chat.images.child import ChatImageReader
from app.chat.message import ChatImage, Message
from app.chat.store import ChatConflict, ChatStore
from engine import IMAGE_PLACEHOLDER, ChatMessage, EngineError, ImageFile
from tests.helpers.pictures import as_file, random_picture

FIRST, SECOND = (as_file(random_picture(40, 30, seed)) for seed in (1, 2))


def kept(store: ChatStore, chat: Conversation, data: bytes = FIRST) -> ChatImage:
    """Return an image stored for a chat."""
    return ChatImage("spots.png", store.images.put(chat.id, data)[0], 40, 30)


def asked(store: ChatStore) -> Conversation:
    """Return a saved chat whose only question has an image."""
    chat = Conversation()
    chat.add(Message("user", "What is it?", pictures=(kept(store, chat),)))
    store.save(chat)
    return chat


def files(folder: Path) -> list[str]:
    """Return the names of all image files below a folder."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.png"))


def data_of(store: ChatStore, chat: Conversation) -> bytes:
    return store.images.path(chat, chat.messages[0].pictures[0]).read_bytes()


def test_a_picture_is_kept_once_and_is_there_after_a_restart(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    chat = asked(store)
    assert kept(store, chat) == chat.messages[0].pictures[0]
    assert len(files(tmp_path)) == 1
    again = ChatStore(tmp_path)
    (found,) = again.load()
    assert found == chat
    assert data_of(again, found) == FIRST


def test_a_fork_has_files_of_its_own_that_take_no_room(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    chat = asked(store)
    fork = chat.fork(1)
    assert data_of(store, fork) == FIRST, "before it is saved"
    store.save(fork)
    one, other = (tmp_path / name for name in files(tmp_path))
    assert os.path.samefile(one, other)
    store.delete(chat.id)
    store.tidy()
    assert len(files(tmp_path)) == 1
    assert data_of(store, fork) == FIRST


def test_pictures_go_with_their_chat_and_come_back(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    chat = asked(store)
    deleted = store.delete(chat.id)
    store.restore(deleted)
    assert data_of(store, chat) == FIRST
    store.read(chat.id)
    store.delete(chat.id)
    store.save(chat)  # as a window does that still has it in memory
    assert data_of(store, chat) == FIRST
    assert list(tmp_path.glob(f"*{folder_module.HIDDEN}")) == []
    store.delete(chat.id)
    store.tidy()
    assert list(tmp_path.glob("*pictures")) == []


def test_words_are_kept_where_pictures_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = ChatStore(tmp_path)
    chat = asked(store)
    fork = chat.fork(1)
    with monkeypatch.context() as without:
        without.setattr(folder_module, "_link", fail)
        store.save(fork)
    assert store.read(fork.id).messages == fork.messages
    with monkeypatch.context() as without:
        without.setattr(Path, "rename", fail)
        deleted = store.delete(chat.id)
    assert chat.id not in [found.id for found in store.load()]
    store.restore(deleted)
    assert data_of(store, chat) == FIRST


def test_a_picture_that_a_message_has_stays_though_it_is_refused_later(
    tmp_path: Path, qapp: QApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("It takes too long.")

    store, parent = ChatStore(tmp_path), QObject()
    chat = asked(store)
    reader = ChatImageReader(store.images, parent)
    monkeypatch.setattr(reader._child, "size", fail)
    for data in (FIRST, SECOND):
        with pytest.raises(EngineError):
            reader._put(chat.id, data, "spots.png")
    assert len(files(tmp_path)) == 1
    assert data_of(store, chat) == FIRST
    reader.close()


def test_a_chat_that_another_window_has_changed_keeps_its_pictures(tmp_path: Path) -> None:
    store, other = ChatStore(tmp_path), ChatStore(tmp_path)
    chat = asked(store)
    (theirs,) = other.load()
    theirs.title = "theirs"
    other.save(theirs)
    chat.title = "ours"
    with pytest.raises(ChatConflict):
        store.save(chat)
    chat.renew_id()
    store.save(chat)
    assert len(files(tmp_path)) == 2
    assert data_of(store, chat) == FIRST


def test_what_no_message_names_goes_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ChatStore(tmp_path)
    chat = asked(store)
    chat.draft_pictures = (kept(store, chat, SECOND),)
    store.save(chat)
    store.tidy()
    assert len(files(tmp_path)) == 2, "the draft refers to it"
    chat.draft_pictures = ()
    store.save(chat)
    store.tidy()
    assert len(files(tmp_path)) == 2, "it is too new"
    now = time.time()
    monkeypatch.setattr(folder_module.time, "time", lambda: now + 2 * folder_module.UNUSED_S)
    store.tidy()
    assert files(tmp_path) == [f"{chat.id}.pictures/{chat.messages[0].pictures[0].file}"]
    kept(store, Conversation())
    store.tidy()
    assert len(files(tmp_path)) == 1, "of a chat that was never saved"


def test_an_exported_chat_has_its_pictures(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats")
    chat = asked(store)
    path_of = lambda picture: store.images.path(chat, picture)  # noqa: E731
    path = tmp_path / "chat.json"
    path.write_text(exported(chat, ".json", path_of))
    other = ChatStore(tmp_path / "others")
    found = imported(path, other.images)
    other.save(found)
    assert data_of(other, found) == FIRST
    assert 'src="data:image/png;base64,iVBOR' in exported(chat, ".html", path_of)
    assert "img-src data:" in exported(chat, ".html", path_of)
    file = chat.messages[0].pictures[0].file
    assert f"![spots.png](my%20pictures/{file})" in exported(chat, ".md", beside="my pictures")
    assert "[spots.png]" in exported(chat, ".md")
    assert "[spots.png]" in exported(chat, ".html")


@pytest.mark.parametrize("file", ["../../secret.png", "a" * 40 + ".exe", "", "/etc/passwd"])
def test_an_imported_chat_names_no_files_elsewhere(tmp_path: Path, file: str) -> None:
    store = ChatStore(tmp_path / "chats")
    chat = asked(store)
    data = json.loads(exported(chat, ".json"))
    data["messages"][0]["pictures"][0]["file"] = file
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(data))
    found = imported(path, store.images)
    assert not found.messages[0].pictures
    assert found.messages[0].content == chat.messages[0].content


def test_false_files_of_an_imported_chat_are_left_out(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats")
    chat = asked(store)
    path = tmp_path / "chat.json"
    name = chat.messages[0].pictures[0].file
    for files_of in ({name: "AAAA"}, {name: 1}, {"x": "AAAA"}, [name], "x"):
        data = json.loads(exported(chat, ".json")) | {"picture_files": files_of}
        path.write_text(json.dumps(data))
        found = imported(path, store.images)
        assert not store.images.path(found, found.messages[0].pictures[0]).is_file()


def test_pictures_stand_before_the_text_of_their_question() -> None:
    spots = ChatImage("spots.png", "0" * 40 + ".png", 40, 30)
    page = ChatImage("paper.pdf", "1" * 40 + ".png", 40, 30, page=2)
    chat = Conversation.of(
        [
            Message("user", f"One {IMAGE_PLACEHOLDER}picture", pictures=(spots,)),
            Message("user", "and a page", pictures=(page,)),
        ]
    )
    by_file = lambda picture: ImageFile(picture.file)  # noqa: E731
    text = f"{IMAGE_PLACEHOLDER}One picture\n\n{IMAGE_PLACEHOLDER}and a page"
    pictures = ImageFile(spots.file), ImageFile(page.file)
    assert chat.prompt(pictures=by_file) == (ChatMessage("user", text, pictures=pictures),)
    text = "[spots.png]\nOne picture\n\n[paper.pdf, page 2]\nand a page"
    assert chat.prompt() == (ChatMessage("user", text),)


@pytest.mark.parametrize(
    "odd", [{"file": "../x.png"}, {"width": 0}, {"width": "40"}, {"name": None}], ids=str
)
def test_a_picture_that_is_none_takes_no_chat_with_it(odd: dict[str, object]) -> None:
    good = ChatImage("spots.png", "0" * 40 + ".png", 40, 30)
    chat = Conversation(draft_pictures=(good,))
    chat.add(Message("user", "Look.", pictures=(good, good)))
    stored = json.loads(json.dumps(chat.to_json()))
    stored["messages"][0]["pictures"][0] |= odd
    stored["draft_pictures"] += ["no picture", odd]
    read = Conversation.from_json(stored)
    assert [message.content for message in read.messages] == ["Look."]
    assert read.messages[0].pictures == (good,)
    assert read.draft_pictures == (good,)
