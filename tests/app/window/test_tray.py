"""The tray icon and notifications, if enabled and supported by the desktop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtWidgets import QSystemTrayIcon
from pytestqt.qtbot import QtBot

from app.core.notice import Notice
from app.main import Shell
from app.widgets.text import TrayIcon
from tests.helpers.shell_driver import MODEL, MakeShell, ask


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the notifications of a desktop with a tray."""
    messages: list[str] = []
    monkeypatch.setattr(TrayIcon, "isSystemTrayAvailable", staticmethod(lambda: True))
    monkeypatch.setattr(
        TrayIcon, "showMessage", lambda self, title, text, icon: messages.append(text)
    )
    return messages


def choose(shell: Shell, **changes: bool) -> None:
    shell.keep(replace(shell.settings.current, **changes))


def test_nothing_is_in_the_tray_until_somebody_wants_it(
    qtbot: QtBot, make_shell: MakeShell, said: list[str]
) -> None:
    shell = make_shell(model=MODEL)
    assert shell.tray.icon is None
    shell.window.showMinimized()
    ask(qtbot, shell, "Hi")
    assert said == []


def test_a_finished_answer_is_told_while_the_window_is_not_in_front(
    qtbot: QtBot, make_shell: MakeShell, said: list[str]
) -> None:
    shell = make_shell(model=MODEL)
    choose(shell, notifications=True)
    shell.window.activateWindow()
    qtbot.waitUntil(shell.window.isActiveWindow)
    ask(qtbot, shell, "Hi")
    assert said == []
    shell.window.showMinimized()
    ask(qtbot, shell, "Again")
    assert said == ["The answer is finished."]


def test_news_are_told_without_markup_and_other_notices_are_not(
    make_shell: MakeShell, said: list[str]
) -> None:
    shell = make_shell()
    choose(shell, notifications=True)
    shell.window.hide()
    shell._notify(Notice("The settings cannot be saved."))
    shell._notify(Notice("<b>tiny</b> & small.gguf is there.", is_news=True))
    assert said == ["‹b›tiny‹/b› + small.gguf is there."]


def test_an_icon_alone_says_nothing_and_brings_the_window_back(
    qtbot: QtBot, make_shell: MakeShell, said: list[str]
) -> None:
    shell = make_shell(model=MODEL)
    choose(shell, tray=True)
    icon = shell.tray.icon
    assert icon is not None
    assert icon.isVisible()
    shell.window.showMinimized()
    ask(qtbot, shell, "Hi")
    assert said == []
    icon.activated.emit(QSystemTrayIcon.ActivationReason.Trigger)
    assert not shell.window.isMinimized()
    new_chat = next(a for a in icon.contextMenu().actions() if a.text() == "New chat")
    new_chat.trigger()
    assert shell.session.current.is_empty
    choose(shell, tray=False)
    assert shell.tray.icon is None


def test_a_desktop_without_a_tray_is_named_on_the_settings_page(
    make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrayIcon, "isSystemTrayAvailable", staticmethod(lambda: False))
    shell = make_shell()
    choose(shell, tray=True, notifications=True)
    assert shell.tray.icon is None
    shell.settings_page.toggle()
    rows = shell.settings_page.view.rows
    for name in ("tray", "notifications"):
        assert rows[name]._problem.isVisible()
        assert "no tray" in rows[name]._problem.text()
    assert not rows["theme"]._problem.isVisible()
