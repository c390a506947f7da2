"""The window's state is up to date: during a load, while text streams, after a success."""

import threading

import pytest
from PySide6.QtCore import QMimeData, QPointF, Qt, QUrl
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QDockWidget
from pytestqt.qtbot import QtBot

from app.chat.views.message_view import UserView
from app.core.engine_client import EngineState
from app.main import Shell
from engine import EngineError, PrefillProgress
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of, running


def page(shell: Shell) -> str:
    return shell.window.start_view._title.text()


def test_the_start_page_follows_a_load(qtbot: QtBot, make_shell: MakeShell, script: Script) -> None:
    script.hold = True
    shell = make_shell()
    assert page(shell) == "Welcome to Tandem"
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.state is EngineState.LOADING)
    assert page(shell) == "Loading Tiny Chat …"
    assert not shell.window.start_view._open.isVisible()
    shell.models.cancel()
    qtbot.waitUntil(lambda: page(shell) == "Welcome to Tandem")
    script.hold = False
    shell.models.load()
    qtbot.waitUntil(lambda: page(shell) == "Tiny Chat is ready")


def test_an_error_goes_once_the_same_thing_has_succeeded(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.answer_error = EngineError("The card has fallen off the bus.")
    ask(qtbot, shell, "Hi")
    assert banner(shell) == "The card has fallen off the bus."
    script.answer_error = None
    ask(qtbot, shell, "Again?")
    assert banner(shell) == ""
    script.load_error = EngineError("GPU 1 is full.")
    shell.models.load()
    qtbot.waitUntil(lambda: banner(shell) == "GPU 1 is full.")
    script.load_error, script.warnings = None, ("The pre-tokenizer is unknown.",)
    shell.models.load()
    qtbot.waitUntil(lambda: banner(shell) == "The pre-tokenizer is unknown.")
    ask(qtbot, shell, "And now?")
    assert banner(shell) == "The pre-tokenizer is unknown.", "a warning stays"
    shell.models.load()
    assert banner(shell) == "", "it was about the load before"
    qtbot.waitUntil(lambda: banner(shell) == "The pre-tokenizer is unknown.")


def test_a_prompt_that_was_read_is_no_longer_counted(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 1
    shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: shell.session.current.messages[-1].content != "")
    (answer,) = running(shell)
    said = shell.window.chat_view.last_answer()
    assert said is not None
    seen = []
    for done in (1, 2):
        thread = threading.Thread(
            target=host_of(shell).send, args=(answer.number, PrefillProgress(done, 2))
        )
        thread.start()
        thread.join()
        shell.client._inbox.drain()
        seen.append(said.footer.figures.accessibleName())
    assert seen == ["Reading the prompt · 1 of 2 tokens", "…"]


@pytest.mark.parametrize("offered", [Qt.DropAction.MoveAction, Qt.DropAction.LinkAction])
def test_a_dropped_model_is_never_moved(
    qtbot: QtBot, make_shell: MakeShell, offered: Qt.DropAction
) -> None:
    """A file manager deletes moved files."""
    shell = make_shell()
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(MODEL)])
    every = offered | Qt.DropAction.CopyAction
    drop = QDropEvent(
        QPointF(9, 9), every, data, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    )
    drop.setDropAction(offered)
    shell.window.dropEvent(drop)
    assert drop.isAccepted()
    assert drop.dropAction() is Qt.DropAction.CopyAction
    qtbot.waitUntil(lambda: shell.client.model is not None)


def is_framed(dock: QDockWidget) -> bool:
    flags = dock.windowFlags()
    return not flags & Qt.WindowType.FramelessWindowHint and bool(flags & Qt.WindowType.Window)


def test_a_detached_panel_has_a_frame_and_can_be_put_back(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell()
    dock = shell.window.monitor_dock
    dock._toggle_floating()
    assert dock.isFloating()
    assert dock.isVisible()
    assert is_framed(dock)
    dock._toggle_floating()
    assert not dock.isWindow()
    dock._toggle_floating()
    shell.window.close()
    again = make_shell().window.monitor_dock
    assert again.isFloating()
    assert is_framed(again)


def test_an_edited_message_is_changed_at_its_end(qtbot: QtBot, make_shell: MakeShell) -> None:
    """Nothing is selected, so that the first key does not replace everything."""
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "A long question")
    message = shell.window.chat_view.shown[0]
    assert isinstance(message, UserView)
    message.start_editing()
    assert message._editor is not None
    qtbot.keyClicks(message._editor.edit, "?")
    assert message._editor.edit.toPlainText() == "A long question?"
