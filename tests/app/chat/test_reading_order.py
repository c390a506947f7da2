"""Screen readers read a chat from the top, whatever was created first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from PySide6.QtGui import QAccessible, QAccessibleInterface
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.store import ChatStore
from app.core import paths
from app.main import Shell
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask

N_MESSAGES = 24
ANSWER = "First words.\n\n```\ncode\n```\n\nMore words.\n\n|a|b|\n|-|-|\n|1|2|\n\nLast words."


def _children(of: QAccessibleInterface) -> list[QAccessibleInterface]:
    found = [of.child(number) for number in range(of.childCount())]
    return [one for one in found if one is not None and not one.state().invisible]


def _walk(of: QAccessibleInterface) -> Iterator[QAccessibleInterface]:
    yield of
    for child in _children(of):
        yield from _walk(child)


def _out_of_order(shell: Shell) -> list[str]:
    """Return the widget read after one that is wholly below it."""
    column = shell.window.chat_view._column
    found = []
    for place in _walk(QAccessible.queryAccessibleInterface(column)):
        children = [one for one in _children(place) if isinstance(one.object(), QWidget)]
        for before, after in pairwise(children):
            if after.rect().bottom() < before.rect().top():
                found.append(f"{after.object()} behind {before.object()}")
    return found


def test_a_reopened_chat_is_read_from_the_top(qtbot: QtBot, make_shell: MakeShell) -> None:
    chat = Conversation(title="Long")
    for n in range(N_MESSAGES):
        chat.add(Message("assistant" if n % 2 else "user", f"Number {n}. {ANSWER}"))
    ChatStore(paths.chats_dir()).save(chat)
    shell = make_shell()
    shell.chat_presenter.open_chat(chat.id)
    view = shell.window.chat_view
    qtbot.waitUntil(lambda: view._column.is_complete and len(view.shown) == N_MESSAGES)
    column = QAccessible.queryAccessibleInterface(view._column)
    shown = [one.object() for one in _children(column)]
    assert shown == view.shown
    assert not _out_of_order(shell)


def test_a_growing_chat_with_versions_is_read_from_the_top(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.answer = ANSWER
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    ask(qtbot, shell, "Second")
    shell.session.regenerate()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    shell.session.edit(shell.session.current.messages[2].id, "Second, in other words")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert any(one.versions.text for one in shell.window.chat_view.shown)
    qtbot.waitUntil(lambda: not _out_of_order(shell))


def test_choices_have_the_names_of_their_captions(make_shell: MakeShell) -> None:
    """On Linux, Qt reports the selected entry instead of a combo box's name."""
    options = make_shell().split_panel.options
    for box, name in ((options.kv_type, "KV cache"), (options.p2p, "GPU to GPU")):
        relations = QAccessible.queryAccessibleInterface(box).relations()
        assert [one.text(QAccessible.Text.Name) for one, _ in relations] == [name]
