"""The list of chats in the real window: search, folders, multiple selection, keyboard."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QModelIndex, Qt
from PySide6.QtWidgets import QApplication, QFileDialog, QLineEdit, QMenu, QStyle, QStyleOptionFrame
from pytestqt.qtbot import QtBot

from app.chat import search as search_module
from app.chat.conversation import Conversation
from app.chat.listing.folders import RowKind
from app.chat.message import Message
from app.chat.store import ChatStore
from app.chat.views.chat_rows import ChatRowsView
from app.core import paths
from app.main import Shell
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, click_row, shown

CTRL = Qt.KeyboardModifier.ControlModifier


def store_chats(*titles: str, n_messages: int = 2) -> list[str]:
    """Store chats, the first one as the latest; return their ids."""
    store, ids = ChatStore(paths.chats_dir()), []
    for number, title in enumerate(titles):
        chat = Conversation(title=title)
        for n in range(n_messages):
            role = "assistant" if n % 2 else "user"
            chat.add(Message(role, f"{title} says number {n} of {n_messages}"))
        chat.updated = 1e9 - number
        store.save(chat)
        ids.append(chat.id)
    return ids


def titles(shell: Shell) -> list[str]:
    return shell.window.chat_list.shown_titles()


def row_of(rows: ChatRowsView, text: str) -> int:
    return next(n for n, row in enumerate(rows.row_model.rows) if row.text == text)


def act(rows: ChatRowsView, row: str, *path: str) -> None:
    """Choose an entry of a row's menu or its submenus."""
    menu = rows.menu_for(rows.row_model.rows[row_of(rows, row)])
    for name in path:
        action = next(a for a in menu.actions() if a.text() == name)
        menu = action.menu() if isinstance(action.menu(), QMenu) else menu
    action.trigger()


def search(qtbot: QtBot, shell: Shell, words: str) -> list[str]:
    """Type in the search field; return the titles of the hits."""
    chats = shell.window.chat_list
    chats.search.clear()
    qtbot.keyClicks(chats.search, words)
    qtbot.waitUntil(lambda: chats._searched == words)
    return [hit.title.text for hit in chats.hits.hits]


def test_a_hit_opens_the_chat_at_the_message(qtbot: QtBot, make_shell: MakeShell) -> None:
    long, _ = store_chats("Whales", "Birds", n_messages=120)
    shell = make_shell()
    chats = shell.window.chat_list
    assert search(qtbot, shell, '"whales says number 7 of"') == ["Whales"]
    qtbot.keyClick(chats.search, Qt.Key.Key_Return)
    assert shell.session.current.id == long
    assert chats.search.text(), "the search stays for the next hit"
    view = shell.window.chat_view
    qtbot.waitUntil(lambda: "Whales says number 7 of 120" in shown(shell))
    wanted = next(v for v in view.shown if v.message.content == "Whales says number 7 of 120")

    def is_seen() -> bool:
        top = wanted.mapTo(view.viewport(), wanted.rect().topLeft()).y()
        return 0 <= top < view.viewport().height()

    qtbot.waitUntil(is_seen)


def test_a_message_is_found_while_it_is_being_written(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk, Enter opens the hit when it arrives."""
    shell = make_shell(model=MODEL)
    gate, save = threading.Event(), ChatStore.save

    def save_late(store: ChatStore, chat: Conversation) -> None:
        gate.wait(10)
        save(store, chat)

    monkeypatch.setattr(ChatStore, "save", save_late)
    shell.chat_presenter.send("apples")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    wanted = shell.session.current
    shell.window.new_chat_requested.emit()
    assert search(qtbot, shell, "apples") == []
    qtbot.keyClick(shell.window.chat_list.search, Qt.Key.Key_Return)
    gate.set()
    qtbot.waitUntil(lambda: shell.session.current is wanted)


def test_a_search_right_after_the_start_opens_what_it_finds_once_chats_are_read(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = store_chats("Whales", "Birds")
    gate, index_some = threading.Event(), search_module.index_some

    def index_late(file: sqlite3.Connection) -> int:
        gate.wait(10)
        return index_some(file)

    monkeypatch.setattr(search_module, "index_some", index_late)
    shell = make_shell()
    field = shell.window.chat_list.search
    qtbot.keyClicks(field, "whales")
    qtbot.keyClick(field, Qt.Key.Key_Return)
    gate.set()
    qtbot.waitUntil(lambda: shell.session.current.id == wanted)


def test_enter_opens_nothing_that_comes_later(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    finder = shell.chat_listing.finder
    assert finder is not None
    qtbot.waitUntil(lambda: finder.is_current)
    assert search(qtbot, shell, "apples") == []
    qtbot.keyClick(shell.window.chat_list.search, Qt.Key.Key_Return)
    assert shell.session.current.is_empty
    store_chats("Apples")
    finder.start()
    qtbot.waitUntil(lambda: len(shell.window.chat_list.hits.hits) > 0)
    assert shell.session.current.is_empty


def test_a_hit_in_another_version_shows_that_version(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    script.answer = "Elephants instead."
    shell.session.regenerate()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell)[-1] == "Elephants instead."
    assert search(qtbot, shell, "hello fake model") == ["Hi"]
    qtbot.keyClick(shell.window.chat_list.search, Qt.Key.Key_Return)
    assert shown(shell)[-1] == "Hello from the fake model."


def test_keys_go_through_the_hits_from_the_search_field(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    ids = store_chats("Whales one", "Whales two", "Birds", n_messages=0)
    shell = make_shell()
    field = shell.window.chat_list.search
    assert search(qtbot, shell, "wha") == ["Whales one", "Whales two"]
    for key, chat in ((Qt.Key.Key_Down, 1), (Qt.Key.Key_Up, 0), (Qt.Key.Key_PageDown, 1)):
        qtbot.keyClick(field, key)
        qtbot.keyClick(field, Qt.Key.Key_Return)
        assert shell.session.current.id == ids[chat]
    qtbot.keyClick(field, Qt.Key.Key_Escape)
    assert shell.window.chat_list.list.isVisible()
    assert search(qtbot, shell, "zebra") == []
    assert shell.window.chat_list._status.text() == "No chats match."


def test_a_title_is_found_as_soon_as_it_is_given_and_gone_with_its_chat(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    shell.session.rename(shell.session.current.id, "Zanzibar")
    shell.session.flush()
    assert search(qtbot, shell, "zanz") == ["Zanzibar"]
    shell.chat_presenter.delete_chats([shell.session.current.id])
    assert search(qtbot, shell, "zanzi") == []


def test_folders_and_pins_are_there_after_a_restart(qtbot: QtBot, make_shell: MakeShell) -> None:
    store_chats("A", "B", "C", "D")
    shell = make_shell()
    rows = shell.window.chat_list.list
    act(rows, "A", "Pin")
    act(rows, "C", "Move to folder", "New folder")
    editor = rows.findChild(QLineEdit)
    assert isinstance(editor, QLineEdit)
    editor.setText("Work")
    qtbot.keyClick(editor, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: "Work" in titles(shell))
    act(rows, "D", "Move to folder", "Work")
    wanted = ["PINNED", "A", "FOLDERS", "Work", "C", "D", "EARLIER", "B"]
    assert titles(shell) == wanted
    click_row(qtbot, rows, row_of(rows, "Work"))
    assert titles(shell) == ["PINNED", "A", "FOLDERS", "Work", "EARLIER", "B"]
    shell.window.close()
    again = make_shell()
    assert titles(again) == ["PINNED", "A", "FOLDERS", "Work", "EARLIER", "B"]
    rows = again.window.chat_list.list
    rows.setCurrentIndex(rows.row_model.index_of(RowKind.FOLDER, "Work"))
    qtbot.keyClick(rows, Qt.Key.Key_Right)
    assert titles(again) == wanted
    act(rows, "Work", "Delete folder, keep its chats")
    assert titles(again) == ["PINNED", "A", "EARLIER", "B", "C", "D"]
    again.window.banner._action.click()
    assert titles(again) == wanted


def test_a_chat_dropped_on_a_folder_moves_there_and_back(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    store_chats("A", "B", "C")
    shell = make_shell()
    rows = shell.window.chat_list.list
    act(rows, "C", "Move to folder", "New folder")
    rows.setCurrentIndex(QModelIndex())
    model = rows.row_model
    drag = model.mimeData([model.index(row_of(rows, "A"))])
    folder = model.index(row_of(rows, "New folder"))
    assert model.dropMimeData(drag, Qt.DropAction.MoveAction, -1, -1, folder)
    qtbot.waitUntil(lambda: titles(shell)[:4] == ["FOLDERS", "New folder", "A", "C"])
    day = model.index(row_of(rows, "EARLIER"))
    assert model.dropMimeData(drag, Qt.DropAction.MoveAction, -1, -1, day)
    assert titles(shell) == ["FOLDERS", "New folder", "C", "EARLIER", "A", "B"]


def test_several_chats_are_deleted_and_come_back_together(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    """Chats that were never opened are exported too."""
    store_chats("A", "B", "C")
    make_shell().window.close()  # so that only their summaries are loaded
    shell = make_shell()
    rows = shell.window.chat_list.list
    before = ChatStore(paths.chats_dir()).load()
    click_row(qtbot, rows, row_of(rows, "A"))
    click_row(qtbot, rows, row_of(rows, "C"), CTRL)
    assert [row.text for row in rows.selected_rows] == ["A", "C"]
    qtbot.keyClick(rows, Qt.Key.Key_Delete)
    assert titles(shell) == ["EARLIER", "B"]
    assert banner(shell) == "2 chats were deleted."
    shell.session.flush()
    assert len(ChatStore(paths.chats_dir()).load()) == 1
    shell.window.banner._action.click()
    assert titles(shell) == ["EARLIER", "A", "B", "C"]
    shell.session.flush()
    assert ChatStore(paths.chats_dir()).load() == before


def test_several_chats_are_exported_and_imported(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_chats("A", "B", "C")
    shell = make_shell()
    rows = shell.window.chat_list.list
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(folder))
    rows.selectAll()
    for kind in ("JSON (*.json)", "PDF (*.pdf)"):
        act(rows, "A", "Export 3 chats", kind)
        qtbot.waitUntil(lambda: banner(shell) == f"3 chats saved in {folder}.")
        qtbot.waitUntil(lambda: not shell.chat_listing.exchange._jobs._newest)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["A.json", "A.pdf", "B.json", "B.pdf", "C.json", "C.pdf"]
    (folder / "no.json").write_text("{")
    chosen = [str(path) for path in sorted(folder.glob("*.json"))]
    monkeypatch.setattr(QFileDialog, "getOpenFileNames", lambda *_: (chosen, ""))
    act(rows, "A", "Import chats…")
    qtbot.waitUntil(lambda: len(shell.session.library.summaries) == 6)
    assert banner(shell) == "no.json is not a chat exported by Tandem."


def test_the_chat_that_is_being_answered_is_marked(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.hold = True
    shell.chat_presenter.send("Long one")
    qtbot.waitUntil(lambda: shell.session.is_busy)
    shell.chat_presenter.new_chat()
    model = shell.window.chat_list.list.row_model
    index = model.index_of(RowKind.CHAT, shell.session.answers[0].chat.id)
    spoken = Qt.ItemDataRole.AccessibleTextRole
    assert model.data(index, spoken) == "Long one, answer in progress"
    assert model.data(index, Qt.ItemDataRole.DecorationRole) is not None
    script.hold = False
    shell.session.stop_all()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert model.data(model.index_of(RowKind.CHAT, model.rows[1].key), spoken) == "Long one"


def test_a_title_that_is_being_typed_is_not_lost(qtbot: QtBot, make_shell: MakeShell) -> None:
    first, second = store_chats("A", "B")
    shell = make_shell()
    rows = shell.window.chat_list.list
    rows.setCurrentIndex(rows.row_model.index_of(RowKind.CHAT, first))
    qtbot.keyClick(rows, Qt.Key.Key_F2)
    editor = rows.findChild(QLineEdit)
    assert isinstance(editor, QLineEdit)
    editor.setText("New name")
    shell.session.rename(second, "Changed meanwhile")
    qtbot.keyClick(editor, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: titles(shell) == ["EARLIER", "New name", "Changed meanwhile"])


@pytest.mark.parametrize("zoom", [100, 175])
def test_the_field_of_a_new_name_has_room_for_its_text(
    zoom: int, qtbot: QtBot, make_shell: MakeShell
) -> None:
    store_chats("A")
    shell = make_shell()
    shell.keep(replace(shell.settings.current, zoom=zoom))
    rows = shell.window.chat_list.list
    act(rows, "A", "Move to folder", "New folder")
    QApplication.processEvents()
    for kind in (RowKind.FOLDER, RowKind.CHAT):
        index = next(
            rows.row_model.index(n) for n, row in enumerate(rows.row_model.rows) if row.kind is kind
        )
        rows.setCurrentIndex(index)
        if kind is RowKind.CHAT:
            qtbot.keyClick(rows, Qt.Key.Key_F2)
        editor = rows.findChild(QLineEdit)
        assert isinstance(editor, QLineEdit)
        option = QStyleOptionFrame()
        editor.initStyleOption(option)
        text = editor.style().subElementRect(QStyle.SubElement.SE_LineEditContents, option, editor)
        assert text.height() >= editor.fontMetrics().height(), kind
        assert rows.visualRect(index).contains(editor.geometry())
        qtbot.keyClick(editor, Qt.Key.Key_Escape)
        qtbot.waitUntil(lambda: rows.findChild(QLineEdit) is None)
