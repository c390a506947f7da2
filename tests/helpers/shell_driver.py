"""Actions of tests in the running window, and what they read from it."""

from collections.abc import Callable
from functools import reduce
from operator import or_

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QListView
from pytestqt.qtbot import QtBot

from app.chat.views.answer_view import AnswerView
from app.chat.views.message_view import UserView
from app.core.engine_client import RunningAnswer
from app.main import Shell
from app.remote.client.switch import HostSwitch
from engine import AnswerRequest, EngineHost
from tests.helpers.fake_host import FakeHost

MODEL = "/models/tiny.gguf"
WAIT_MS = 60_000
"""Longest wait for an answer, in milliseconds; other programs may be busy."""

MakeShell = Callable[..., Shell]


def engine_of(shell: Shell) -> EngineHost | None:
    """Return the engine of this machine; None before it has started."""
    switch = shell.client._host
    assert switch is None or isinstance(switch, HostSwitch)
    return switch and switch.engine


def host_of(shell: Shell) -> FakeHost:
    host = engine_of(shell)
    assert isinstance(host, FakeHost)
    return host


def running(shell: Shell) -> list[RunningAnswer]:
    """Return the answers that the engine has not ended, the oldest first."""
    return list(shell.client.answers)


def answered(shell: Shell) -> list[str]:
    """Return the titles of the chats that are being answered, the oldest answer first."""
    return [written.chat.title for written in shell.session.answers]


def ask(qtbot: QtBot, shell: Shell, text: str) -> None:
    """Type, press Enter and wait until the whole answer is there and saved."""
    shell.window.composer.edit.setPlainText(text)
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: not shell.session.is_busy, timeout=WAIT_MS)
    shell.session.flush()


def until_idle(qtbot: QtBot, shell: Shell) -> None:
    """Wait until the engine has nothing to do: after a load or an answer, tokens are counted, and
    a new chat gets a title.
    """
    counter, client = shell.chat_presenter._context.counter, shell.client

    def is_idle() -> bool:
        titler = shell.chat_listing._titler
        is_named = titler is None or not titler._waiting
        return counter.is_current and client.is_idle and is_named

    qtbot.waitUntil(is_idle, timeout=WAIT_MS)


def shown(shell: Shell) -> list[str]:
    """Return the texts in the chat, from the top."""
    texts = []
    for view in shell.window.chat_view.shown:
        if isinstance(view, AnswerView):
            texts.append("\n".join(view.body.pieces_shown()))
        elif isinstance(view, UserView):
            texts.append("\n".join(sheet.document().toPlainText() for sheet in view._sheets))
    return texts


def click_row(qtbot: QtBot, rows: QListView, number: int, *modifiers: Qt.KeyboardModifier) -> None:
    """Click a row of a list."""
    place = rows.visualRect(rows.model().index(number, 0)).center()
    held = reduce(or_, modifiers, Qt.KeyboardModifier.NoModifier)
    qtbot.mouseClick(rows.viewport(), Qt.MouseButton.LeftButton, held, place)


def banner(shell: Shell) -> str:
    notice = shell.window.banner.notice
    return notice.text if notice else ""


def prompts(shell: Shell) -> list[list[tuple[str, str]]]:
    """Return the messages of every requested generation."""
    commands = [c for c in host_of(shell).commands if isinstance(c, AnswerRequest)]
    return [[(m.role, m.content) for m in command.messages] for command in commands]
