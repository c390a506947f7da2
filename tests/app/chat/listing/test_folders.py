"""Folders and pins: changes, and their file, which several windows share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import QObject
from pytestqt.qtbot import QtBot

from app.chat.listing import folders as folders_module
from app.chat.listing.folders import Shelf, ShelfStore
from app.core.notice import Notice
from tests.helpers.odd_files import make_odd_file, odd_files

MakeStore = Callable[[], ShelfStore]


@pytest.fixture
def make_store(tmp_path: Path, qtbot: QtBot) -> Iterator[MakeStore]:
    parent, made = QObject(), []

    def make() -> ShelfStore:
        made.append(ShelfStore(tmp_path / "data" / "folders.json", parent))
        return made[-1]

    yield make
    for store in made:
        store.close()


def test_a_chat_is_in_one_folder() -> None:
    shelf = Shelf().moved(["a", "b"], "Work").moved(["b", "c"], "Home")
    assert shelf.names == ("Work", "Home")
    assert [shelf.folder_of(chat) for chat in "abcd"] == ["Work", "Home", "Home", ""]
    assert shelf.moved(["b"], "").folder_of("b") == ""


def test_a_deleted_folder_keeps_its_chats_and_comes_back() -> None:
    shelf = Shelf().moved(["a", "b"], "Work").opened("Work", is_open=False)
    (work,) = shelf.folders
    without = shelf.without_folder("Work")
    assert without.folder_of("a") == ""
    assert without.with_back(work) == shelf
    elsewhere = without.moved(["b"], "Home").with_back(work)
    assert [elsewhere.folder_of(chat) for chat in "ab"] == ["Work", "Home"]


@pytest.mark.parametrize("name", ["", "   ", "Home"])
def test_a_name_that_cannot_be_given_changes_nothing(name: str) -> None:
    shelf = Shelf().with_folder("Work").with_folder("Home")
    assert shelf.renamed("Work", name) == shelf
    assert shelf.with_folder(name) == shelf
    assert shelf.renamed("Work", "a\nb\x1b").names == ("a b\ufffd", "Home")


def test_folders_and_pins_survive_a_restart(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    store.change(lambda shelf: shelf.moved(["a"], "Work").opened("Work", is_open=False))
    store.change(lambda shelf: shelf.with_pins(["b", "c"], is_pinned=True))
    store.change(lambda shelf: shelf.with_pins(["c"], is_pinned=False))
    store.close()
    again = make_store().current
    assert again == store.current
    assert again.pinned == {"b"}
    assert [(f.name, set(f.chats), f.is_open) for f in again.folders] == [("Work", {"a"}, False)]


def test_windows_keep_each_others_changes(qtbot: QtBot, make_store: MakeStore) -> None:
    here, there = make_store(), make_store()
    here.change(lambda shelf: shelf.moved(["a"], "Work"))
    here.close()
    there.change(lambda shelf: shelf.moved(["b"], "Home"))
    there.close()
    assert there.current.names == ("Work", "Home"), "visible after it was written"
    assert make_store().current == there.current


def test_keys_of_other_versions_stay(make_store: MakeStore, tmp_path: Path) -> None:
    path = tmp_path / "data" / "folders.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"folders": [{"name": "Work"}, 3], "pinned": 4, "later": [1]}))
    store = make_store()
    assert store.current.names == ("Work",)
    store.change(lambda shelf: shelf.with_pins(["a"], is_pinned=True))
    store.close()
    assert json.loads(path.read_text())["later"] == [1]


def test_a_broken_file_is_set_aside(make_store: MakeStore, tmp_path: Path) -> None:
    path = tmp_path / "data" / "folders.json"
    path.parent.mkdir()
    path.write_text("{")
    store = make_store()
    assert store.current == Shelf()
    assert path.with_name("folders.json.broken").read_text() == "{"


@odd_files
def test_what_is_no_file_is_no_shelf(make_store: MakeStore, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data" / "folders.json"
    make_odd_file(path, kind)
    assert make_store().current == Shelf()
    assert os.path.lexists(path) == (kind == "link to itself"), "the broken file was set aside"


def test_a_file_that_cannot_be_read_is_not_replaced(
    qtbot: QtBot, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> Shelf:
        raise OSError(5, "Input/output error")

    written: list[object] = []
    monkeypatch.setattr(folders_module, "_read", fail)
    monkeypatch.setattr(folders_module, "replace_json", lambda *_, **__: written.append(1))
    store = make_store()
    notices: list[Notice] = []
    store.noticed.connect(notices.append)
    for name in ("Work", "Home"):
        store.change(lambda shelf, name=name: shelf.with_folder(name))  # type: ignore[misc]
        store.close()
    assert store.current.names == ("Work", "Home"), "they stay in memory until the window closes"
    assert not written
    (notice,) = notices
    assert "Input/output error" in notice.text


def test_a_full_disk_keeps_changes_until_it_has_room(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(folders_module, "replace_json", full)
        store.change(lambda shelf: shelf.with_folder("Work"))
        store.close()
    store.change(lambda shelf: shelf.with_folder("Home"))
    store.close()
    assert make_store().current.names == ("Work", "Home")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["folders", "pinned", "name", "chats", "is_open", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["folders", "pinned", "schema", "x"]), values, max_size=4))
def test_no_content_is_an_error_and_what_is_known_comes_back(data: dict[str, object]) -> None:
    shelf = Shelf.from_json(data)
    assert Shelf.from_json(json.loads(json.dumps(shelf.to_json()))) == shelf
