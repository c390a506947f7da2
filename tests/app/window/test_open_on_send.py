"""A message sent without a model waits for the one that is loading, or offers to load one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.core.engine_client import EngineState
from app.core.notice import Notice
from app.main import Shell
from engine import EngineError
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, banner, prompts


def type_and_send(qtbot: QtBot, shell: Shell, text: str) -> None:
    shell.window.composer.edit.setPlainText(text)
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_Return)


def action(shell: Shell) -> str:
    notice = shell.window.banner.notice
    return notice.action if notice else ""


def test_the_last_model_is_loaded_and_the_message_sent(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    last = tmp_path / "last one.gguf"
    last.write_text("GGUF")
    shell = make_shell()
    gone = str(tmp_path / "gone.gguf")
    shell.settings.put(replace(shell.settings.current, recent_models=(gone, str(last))))
    type_and_send(qtbot, shell, "Hi")
    assert banner(shell).startswith("No model is loaded")
    assert action(shell) == "Load last one and send"
    assert shell.window.composer.text == "Hi"
    shell.window.banner._act()
    qtbot.waitUntil(lambda: prompts(shell) == [[("user", "Hi")]])
    assert shell.client.model is not None
    assert shell.client.model.info.path == str(last)
    assert shell.window.composer.text == ""


def test_the_selected_model_comes_before_the_last(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    shell.models.eject()
    qtbot.waitUntil(lambda: shell.client.model is None)
    type_and_send(qtbot, shell, "Hi")
    assert action(shell) == "Load tiny and send"
    shell.window.banner._act()
    qtbot.waitUntil(lambda: prompts(shell) == [[("user", "Hi")]])


def test_a_message_to_a_model_that_is_leaving_stays(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    shell.models.eject()
    assert shell.client.model is not None
    type_and_send(qtbot, shell, "Hi")
    assert banner(shell).startswith("No model is loaded")
    assert shell.window.composer.text == "Hi"
    shell.window.banner._act()
    qtbot.waitUntil(lambda: prompts(shell) == [[("user", "Hi")]])


@pytest.fixture
def slow(script: Script) -> Script:
    """Return the script of an engine with slow loads."""
    script.pause_s = 0.2
    return script


def loading(qtbot: QtBot, make_shell: MakeShell) -> Shell:
    """Return a window in which a model is being loaded."""
    shell = make_shell()
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.state is EngineState.LOADING)
    return shell


def wait_text(shell: Shell) -> str:
    """Return the status below the message."""
    composer = shell.window.composer
    return composer._wait_text.text() if composer._wait.isVisible() else ""


@pytest.mark.usefixtures("slow")
def test_a_message_waits_for_a_model_that_is_loading(qtbot: QtBot, make_shell: MakeShell) -> None:
    """Other notices do not replace it."""
    shell = loading(qtbot, make_shell)
    type_and_send(qtbot, shell, "Hi")
    assert wait_text(shell) == "Will be sent when the model is ready"
    assert shell.window.composer.text == "Hi"
    shell._notify(Notice("The disk is read-only.", kind="warning"))
    assert wait_text(shell) == "Will be sent when the model is ready"
    assert not prompts(shell)
    qtbot.waitUntil(lambda: prompts(shell) == [[("user", "Hi")]])
    assert (wait_text(shell), shell.window.composer.text) == ("", "")


def test_a_message_waits_for_a_model_whose_file_is_being_read(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell()
    shell.models.open(MODEL)
    assert shell.client.state is EngineState.EMPTY
    type_and_send(qtbot, shell, "Hi")
    assert wait_text(shell)
    qtbot.waitUntil(lambda: prompts(shell) == [[("user", "Hi")]])


def test_a_file_that_is_no_model_leaves_the_message_as_a_draft(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise EngineError("This is no model.")

    shell = make_shell()
    monkeypatch.setattr("engine.read_model_info", fail)
    shell.models.open(MODEL)
    type_and_send(qtbot, shell, "Hi")
    qtbot.waitUntil(lambda: wait_text(shell).startswith("Not sent"))
    assert banner(shell) == "This is no model."
    assert shell.window.composer.text == "Hi"


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("how", ["cancel", "edit"])
def test_a_message_that_is_cancelled_or_edited_is_a_draft_again(
    how: str, qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = loading(qtbot, make_shell)
    type_and_send(qtbot, shell, "Hi")
    if how == "cancel":
        shell.window.composer._cancel_wait.click()
        assert shell.window.composer.edit.hasFocus()
    else:
        qtbot.keyClicks(shell.window.composer.edit, "Oh ")
    assert not wait_text(shell)
    left = shell.window.composer.text
    assert left == ("Hi" if how == "cancel" else "Oh Hi")
    qtbot.waitUntil(lambda: shell.client.model is not None)
    qtbot.wait(50)
    assert not prompts(shell)
    assert shell.window.composer.text == left


@pytest.mark.usefixtures("slow")
def test_a_message_is_sent_in_its_chat_while_another_is_open(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = loading(qtbot, make_shell)
    type_and_send(qtbot, shell, "Hi")
    left = shell.session.current
    shell.chat_presenter.new_chat()
    assert not wait_text(shell)
    shell.window.composer.edit.setPlainText("A draft of another chat")
    qtbot.waitUntil(lambda: prompts(shell) == [[("user", "Hi")]])
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert [message.role for message in left.messages] == ["user", "assistant"]
    assert left.draft == ""
    assert shell.session.current.is_empty
    assert shell.window.composer.text == "A draft of another chat"


@pytest.mark.usefixtures("slow")
def test_a_message_with_files_of_another_chat_stays_and_is_named(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("Buy milk")
    shell = loading(qtbot, make_shell)
    shell.window.composer.files_given.emit([str(tmp_path / "notes.txt")])
    qtbot.waitUntil(lambda: shell.chat_presenter.files.ready_files() not in (None, ()))
    type_and_send(qtbot, shell, "Sum it up")
    assert wait_text(shell)
    left = shell.session.current
    shell.chat_presenter.new_chat()
    qtbot.waitUntil(lambda: "was not sent because it has files" in banner(shell))
    assert not prompts(shell)
    shell.window.banner._act()
    assert shell.session.current is left
    assert shell.window.composer.text == "Sum it up"


@pytest.mark.usefixtures("slow")
def test_a_window_closed_meanwhile_keeps_the_message(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = loading(qtbot, make_shell)
    type_and_send(qtbot, shell, "Hi")
    shell.window.close()
    again = make_shell()
    assert again.window.composer.text == "Hi"
    assert not wait_text(again)


@pytest.mark.parametrize("keeps_old", [True, False])
def test_a_failed_load_keeps_the_text_and_says_so(
    keeps_old: bool, qtbot: QtBot, make_shell: MakeShell, slow: Script
) -> None:
    shell = make_shell(model=MODEL)
    if not keeps_old:
        shell.models.eject()
        qtbot.waitUntil(lambda: shell.client.model is None)
    slow.load_error = EngineError("This file is broken.")
    shell.models.load()
    type_and_send(qtbot, shell, "Hi")
    qtbot.waitUntil(lambda: "broken" in banner(shell))
    assert wait_text(shell) == "Not sent: the model was not loaded."
    assert (shell.client.model is not None) == keeps_old
    assert shell.window.composer.text == "Hi"
    slow.load_error = None
    shell.models.load()  # manually: the waiting message was given up
    qtbot.waitUntil(lambda: shell.client.state is EngineState.READY)
    qtbot.wait(50)
    assert shell.window.composer.text == "Hi"
    assert not prompts(shell)


def test_without_any_model_a_hint_says_what_to_do(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    type_and_send(qtbot, shell, "Hi")
    notice = shell.window.banner.notice
    assert notice is not None
    assert (notice.action, notice.hint) == ("", "Open a model first.")
    assert shell.window.composer.text == "Hi"
