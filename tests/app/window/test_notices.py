"""Notices lie over the window's pages, move nothing, and disappear with their cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, QPoint, QPointF
from PySide6.QtGui import QEnterEvent
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.core.notice import Notice
from app.main import Shell
from app.widgets.banner import FloatingBanner
from engine import EngineError
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner

LONG = Notice("Words of a sentence. " * 12, "Words of a hint. " * 9, "error", "Undo")


def places(shell: Shell) -> dict[str, tuple[int, int, int, int]]:
    """Return the positions of everything in the middle of the window except the notice."""
    QApplication.sendPostedEvents()
    QApplication.processEvents()
    centre, notice = shell.window._centre, shell.window.banner
    shown = [one for one in centre.findChildren(QWidget) if one.isVisible()]
    return {
        repr(one): (*one.mapTo(centre, QPoint()).toTuple(), one.width(), one.height())
        for one in shown
        if one is not notice and not notice.isAncestorOf(one)
    }


@pytest.mark.parametrize("page", ["chat", "settings"])
def test_a_notice_moves_nothing(page: str, qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    if page == "settings":
        shell.settings_page.toggle()
    before = places(shell)
    shell._notify(LONG)
    assert places(shell) == before
    over, notice = shell.window._middle.geometry(), shell.window.banner
    assert notice.isVisible()
    assert over.contains(notice.geometry())
    for text in (notice._text, notice._hint):
        assert text.height() >= text.heightForWidth(text.width())
    assert (notice.geometry().center().y() > over.center().y()) == (page == "settings")
    notice.dismiss()
    assert places(shell) == before


def move_over(notice: FloatingBanner) -> None:
    at = QPointF(4, 4)
    QApplication.sendEvent(notice, QEnterEvent(at, at, at))


def test_a_notice_under_the_mouse_stays(make_shell: MakeShell) -> None:
    """Or a click on its button would hit another notice's button, or a widget below."""
    shell, pressed = make_shell(), list[str]()
    notice = shell.window.banner
    for name in ("first", "second", "third"):
        told = Notice(name, action="Undo", on_action=lambda name=name: pressed.append(name))
        shell._notify(told)
        if name == "first":
            move_over(notice)
    notice.dismiss()
    assert (banner(shell), notice.isVisible()) == ("first", True)
    notice._action.click()
    assert pressed == ["first"]
    assert banner(shell) == "third"
    move_over(notice)
    notice._timer.timeout.emit()
    assert banner(shell) == "third"
    QApplication.sendEvent(notice, QEvent(QEvent.Type.Leave))
    assert (banner(shell), notice.isVisible()) == ("", False)


def test_an_error_of_a_page_goes_with_it(make_shell: MakeShell) -> None:
    shell = make_shell()
    shell.library.toggle()
    shell.library.noticed.emit(Notice("The hub cannot be reached.", kind="error"))
    assert banner(shell)
    shell.library.toggle()
    assert not banner(shell)
    shell.library.toggle()
    shell.library.noticed.emit(Notice("It is there.", is_news=True))
    shell.library.toggle()
    assert banner(shell) == "It is there."


def test_an_error_of_a_chats_file_goes_with_the_chat(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(range(256)) * 9)
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    shell.window.composer.files_given.emit([str(tmp_path / "x.bin")])
    qtbot.waitUntil(lambda: "x.bin" in banner(shell))
    shell.chat_presenter.new_chat()
    assert not banner(shell)


def test_an_error_of_a_load_goes_when_another_begins(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell()
    script.load_error = EngineError("Too large.")
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: banner(shell) == "Too large.")
    script.load_error, script.hold = None, True
    shell.models.load()
    assert not banner(shell)
    script.hold = False
    shell.models.cancel()
    qtbot.waitUntil(lambda: shell.client.model is None and not shell.client.is_loading)
