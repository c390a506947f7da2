"""A message sent without a model: the last or selected one is loaded on a click, then it goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.engine_client import EngineState
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
    assert banner(shell).startswith("No model is loaded yet")
    assert action(shell) == "Load last one and send"
    assert shell.window.composer.text == "Hi"
    shell.window.banner._act()
    shell.window.composer.edit.setPlainText("Hi there")  # one may go on writing
    qtbot.waitUntil(lambda: prompts(shell) == [[("user", "Hi there")]])
    assert shell.client.model is not None
    assert shell.client.model.info.path == str(last)
    assert shell.window.composer.text == ""


def test_a_message_is_sent_at_once_where_the_model_is_loaded_by_now(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    """The banner that offers to wait for it may still be seen."""
    shell = make_shell(model=MODEL)
    shell.open_on_send._offer(True)
    shell.window.composer.edit.setPlainText("Hi")
    assert action(shell) == "Send when it is loaded"
    shell.window.banner._act()
    qtbot.waitUntil(lambda: prompts(shell) == [[("user", "Hi")]])


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
    assert banner(shell).startswith("No model is loaded yet")
    assert shell.window.composer.text == "Hi"
    shell.window.banner._act()
    qtbot.waitUntil(lambda: prompts(shell) == [[("user", "Hi")]])


def test_a_model_that_is_loading_is_waited_for(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.pause_s = 0.2
    shell = make_shell()
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.state is EngineState.LOADING)
    type_and_send(qtbot, shell, "Hi")
    assert action(shell) == "Send when it is loaded"
    shell.window.banner._act()
    assert not prompts(shell)
    qtbot.waitUntil(lambda: prompts(shell) == [[("user", "Hi")]])


def test_a_failed_load_and_another_chat_keep_the_text(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    shell.models.eject()
    qtbot.waitUntil(lambda: shell.client.model is None)
    script.load_error = EngineError("This file is broken.")
    type_and_send(qtbot, shell, "Hi")
    shell.window.banner._act()
    qtbot.waitUntil(lambda: "broken" in banner(shell))
    assert shell.window.composer.text == "Hi"
    script.load_error = None
    shell.models.load()  # by hand: what waited has been given up
    qtbot.waitUntil(lambda: shell.client.model is not None)
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
