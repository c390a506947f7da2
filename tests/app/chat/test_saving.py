"""Typed text and answers are saved automatically, and retried when a full disk has space again."""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMenu
from pytestqt.qtbot import QtBot

from app.chat import library, store
from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.store import ChatStore
from app.core.paths import chats_dir
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, click_row


class Disk:
    """A disk that can be full and slow.

    Attributes:
        calls: names of the functions that wrote.
        problem: error of each write; None for none.
        gate: called before each write.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.problem: OSError | None = None
        self.gate: Callable[[], None] = lambda: None
        self._monkeypatch = monkeypatch
        self._guard(store.put_chat)

    def _guard(self, write: Callable[..., object]) -> None:
        def guarded(*args: object) -> object:
            self.gate()
            self.calls.append(write.__name__)
            if self.problem is not None:
                raise self.problem
            return write(*args)

        self._monkeypatch.setattr(store, write.__name__, guarded)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def stored() -> list[Conversation]:
    return ChatStore(chats_dir()).load()


def test_a_draft_is_saved_while_it_is_typed(qtbot: QtBot, make_shell: MakeShell) -> None:
    """Even if the user never pauses typing."""
    shell, began = make_shell(), time.monotonic()
    while not stored():
        assert time.monotonic() - began < 10
        shell.window.composer.edit.insertPlainText("x")
        qtbot.wait(20)
    assert set(stored()[0].draft) == {"x"}
    assert stored()[0].id == shell.session.current.id


def test_a_system_prompt_is_saved_while_it_is_typed(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    shell.window.sampling.prompt.edit.setPlainText("Be brief")
    qtbot.waitUntil(lambda: stored()[0].system_prompt == "Be brief")


def test_a_full_disk_is_said_once_and_everything_is_saved_later(
    qtbot: QtBot, make_shell: MakeShell, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "RETRY_MS", 20)
    shell = make_shell(model=MODEL)
    disk.problem = OSError(28, "No space left on device")
    ask(qtbot, shell, "First")
    assert "No space left on device" in banner(shell)
    shell.window.banner.dismiss()
    ask(qtbot, shell, "Second")
    qtbot.wait(100)
    assert banner(shell) == "", "one notice is enough"
    assert stored() == []
    disk.problem = None
    qtbot.waitUntil(lambda: banner(shell) == "All chats are now saved.")
    assert [m.content for m in stored()[0].messages][::2] == ["First", "Second"]


def test_a_disk_that_fills_up_during_an_answer_is_said(
    qtbot: QtBot, make_shell: MakeShell, disk: Disk, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 2
    disk.gate = lambda: setattr(disk, "problem", _full() if shell.session.is_busy else None)
    shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: "No space left on device" in banner(shell))
    disk.gate, disk.problem = (lambda: None), None
    shell.session.stop()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    shell.session.flush()
    assert stored()[0].messages[-1].content == "Hello fr"


def _full() -> OSError:
    return OSError(28, "No space left on device")


def test_an_old_copy_is_never_written_over_a_newer_one(
    qtbot: QtBot, make_shell: MakeShell, disk: Disk
) -> None:
    """A slow write of a draft is running when the chat is saved with more in it."""
    shell, began = make_shell(), []

    def wait() -> None:
        if not began:
            began.append(True)
            time.sleep(0.3)

    disk.gate = wait
    shell.session.set_draft("old")
    qtbot.waitUntil(lambda: bool(began))
    shell.session.set_draft("new")
    shell.session.save_all()
    shell.session.flush()
    assert [chat.draft for chat in stored()] == ["new"]
    qtbot.wait(library.SOON_MS + 200)
    assert [chat.draft for chat in stored()] == ["new"]


def test_saving_does_not_hold_up_the_window(
    qtbot: QtBot, make_shell: MakeShell, disk: Disk
) -> None:
    """A disk that takes a second for a draft does not block the window."""
    shell = make_shell()
    disk.gate = lambda: time.sleep(1)
    shell.session.set_draft("typed")
    longest, last, began = 0.0, time.monotonic(), time.monotonic()
    while time.monotonic() - began < 1.2:
        qtbot.wait(5)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    disk.gate = lambda: None
    assert longest < 0.5


def test_sending_a_message_does_not_wait_for_the_disk(
    qtbot: QtBot, make_shell: MakeShell, disk: Disk
) -> None:
    """Neither do renaming, opening another chat and deleting one; all is done in the end."""
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    first = shell.session.current
    disk.gate = lambda: time.sleep(0.4)
    began = time.monotonic()
    shell.session.new_chat("")
    shell.session.send("Second")
    second = shell.session.current
    shell.session.rename(second.id, "Another")
    shell.session.open_chat(first.id)
    shell.session.delete([first.id], "")
    assert time.monotonic() - began < 0.4
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    shell.session.flush()
    assert stored() == [second]
    assert second.title == "Another"


def test_closing_waits_for_a_slow_disk(
    qtbot: QtBot, make_shell: MakeShell, disk: Disk, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 2
    disk.gate = lambda: time.sleep(0.3)
    shell.session.send("Hi")
    qtbot.waitUntil(lambda: shell.session.current.messages[-1].content == "Hello fr")
    shell.window.close()
    assert [path.name for path in chats_dir().iterdir()] == [store.FILE]
    assert stored() == [shell.session.current]


def test_a_growing_answer_is_written_again_and_again(
    qtbot: QtBot, make_shell: MakeShell, disk: Disk, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.answer, script.chunk, script.pause_s = "word " * 300, 5, 0.005
    shell.session.library._soon.setInterval(20)
    shell.session.send("Hi")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    shell.session.flush()
    assert disk.calls.count("put_chat") > 10
    shell.window.close()
    assert [path.name for path in chats_dir().iterdir()] == [store.FILE]


def test_a_chat_that_cannot_be_deleted_comes_back(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")

    def refuse(file: sqlite3.Connection, chat_id: str) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(store, "remove_chat", refuse)
        shell.session.delete([shell.session.current.id], "")
        shell.session.flush()
    assert banner(shell) == "The chat could not be deleted (Permission denied)."
    assert shell.window.chat_list.shown_titles() == ["TODAY", "Hi"]
    assert len(stored()) == 1


def test_a_chat_that_changed_elsewhere_during_a_draft_is_kept_twice(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    other = ChatStore(chats_dir())
    (theirs,) = other.load()
    theirs.add(Message("user", "from the other window"))
    other.save(theirs)
    shell.session.set_draft("typed here")
    qtbot.waitUntil(lambda: "Both versions are kept" in banner(shell))
    shell.session.flush()
    assert sorted(chat.draft for chat in stored()) == ["", "typed here"]


def test_a_deleted_chat_does_not_come_back_with_its_draft(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    shell.window.composer.edit.setPlainText("typed")
    shell.chat_presenter.delete_chats([shell.session.current.id])
    qtbot.wait(library.SOON_MS + 200)
    assert stored() == []


def test_damaged_chats_are_listed_explained_and_shown_in_their_folder(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(
        "app.widgets.text.QDesktopServices.openUrl", lambda url: opened.append(url.toLocalFile())
    )
    chats_dir().mkdir(parents=True)
    content = '{"id": "broken", "title": '
    (chats_dir() / "broken.json").write_text(content)
    (chats_dir() / "folder.json").mkdir()
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    chats = shell.window.chat_list
    assert chats.shown_titles() == ["TODAY", "Hi", "DAMAGED", "broken.json", "folder.json"]
    rows, model = chats.list, chats.list.row_model
    click_row(qtbot, rows, 3)
    assert banner(shell) == "broken.json cannot be opened: it contains no intact chat."
    shell.window.banner._action.click()
    assert opened == [str(chats_dir())]

    qtbot.keyClick(rows, Qt.Key.Key_Delete)
    rows._open_menu(rows.visualRect(model.index(4)).center())
    (menu,) = rows.findChildren(QMenu)
    (show,) = menu.actions()
    show.trigger()
    assert opened == [str(chats_dir())] * 2
    menu.close()
    shell.window.close()
    assert (chats_dir() / "broken.json").read_text() == content
    assert (chats_dir() / "folder.json").is_dir()


def test_a_search_hides_damaged_chats(qtbot: QtBot, make_shell: MakeShell) -> None:
    chats_dir().mkdir(parents=True)
    (chats_dir() / "broken.json").write_text("{")
    chats = make_shell().window.chat_list
    chats.search.setText("broken")
    qtbot.waitUntil(chats.hits.isVisible)
    assert not chats.list.isVisible()
    assert chats.hits.hits == []
    chats.search.clear()
    assert chats.list.isVisible()
    assert chats.shown_titles() == ["DAMAGED", "broken.json"]


def test_a_home_that_cannot_be_written_is_said_and_the_chat_goes_on(
    qtbot: QtBot, make_shell: MakeShell, home: Path
) -> None:
    """A file instead of the folder fails for every user, including root."""
    home.write_text("no folder")
    shell = make_shell(model=MODEL)
    qtbot.waitUntil(lambda: banner(shell).startswith("The settings cannot be saved ("))
    ask(qtbot, shell, "Hi")
    assert banner(shell).startswith("The chat could not be saved (")
    assert shell.session.current.messages[-1].content == "Hello from the **fake** model."
    home.unlink()
    shell.session.flush()
    assert banner(shell) == "All chats are now saved."
    assert len(stored()[0].messages) == 2
