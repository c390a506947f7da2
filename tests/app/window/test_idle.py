"""An idle model is unloaded, and the next message reloads it automatically."""

from dataclasses import replace

import pytest
from pytestqt.qtbot import QtBot

from app.main import Shell
from app.window import auto_load as idle
from engine import AnswerRequest, EngineError, Load, Unload
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of, shown


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a minute last 50 ms."""
    monkeypatch.setattr(idle, "MINUTE_MS", 50)


def set_minutes(shell: Shell, minutes: int) -> None:
    shell.keeper.keep(replace(shell.settings.current, unload_after_min=minutes))


def kinds(shell: Shell) -> list[type]:
    return [type(command) for command in host_of(shell).commands]


@pytest.mark.usefixtures("soon")
def test_a_model_stays_unless_somebody_wants_otherwise(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    qtbot.wait(200)
    assert kinds(shell) == [Load]
    assert not shell.idle._timer.isActive()


@pytest.mark.usefixtures("soon")
def test_the_next_message_loads_the_model_again_and_is_sent_then(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "first")
    set_minutes(shell, 1)
    qtbot.waitUntil(lambda: shell.client.model is None)
    assert "was unloaded after 1 minute" in banner(shell)
    set_minutes(shell, 0)
    composer = shell.window.composer
    composer.edit.setPlainText("second")
    composer.submit()
    assert composer.text == "second", "it stays until it is sent"
    assert composer._wait.isVisible()
    qtbot.waitUntil(lambda: len(shown(shell)) == 4 and not shell.session.is_busy)
    assert shown(shell)[2] == "second"
    assert composer.text == ""
    assert [kind for kind in kinds(shell) if kind in (Load, Unload, AnswerRequest)] == [
        Load, AnswerRequest, Unload, Load, AnswerRequest,
    ]  # fmt: skip


@pytest.mark.usefixtures("soon")
def test_a_load_that_fails_leaves_the_message_as_a_draft(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    set_minutes(shell, 1)
    qtbot.waitUntil(lambda: shell.client.model is None)
    set_minutes(shell, 0)
    script.load_error, script.loses_model = EngineError("The disk is gone."), True
    composer = shell.window.composer
    composer.edit.setPlainText("hello")
    composer.submit()
    qtbot.waitUntil(lambda: "The disk is gone" in banner(shell))
    assert composer.text == "hello"
    script.load_error = None
    composer.submit()
    qtbot.waitUntil(lambda: len(shown(shell)) == 2 and not shell.session.is_busy)


@pytest.mark.usefixtures("soon")
def test_what_a_person_unloads_is_not_loaded_by_a_message(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    shell.models.eject()
    qtbot.waitUntil(lambda: shell.client.model is None)
    shell.window.composer.edit.setPlainText("hello")
    shell.window.composer.submit()
    assert "No model is loaded" in banner(shell)
    assert kinds(shell).count(Load) == 1


@pytest.mark.usefixtures("soon")
def test_a_model_stays_while_any_chat_is_answered(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.others["long"] = Script(hold=True)
    shell.chat_presenter.send("long")
    shell.chat_presenter.new_chat()
    set_minutes(shell, 1)
    ask_only(qtbot, shell, "short")
    qtbot.wait(200)
    assert shell.client.model is not None
    host_of(shell).let_go(script.others["long"])
    qtbot.waitUntil(lambda: shell.client.model is None)


def ask_only(qtbot: QtBot, shell: Shell, text: str) -> None:
    """Ask in the open chat, and wait for its answer only."""
    chat = shell.session.current
    shell.chat_presenter.send(text)
    qtbot.waitUntil(lambda: chat.messages[-1].stats is not None)


def test_typing_answers_and_other_times_begin_anew(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "MINUTE_MS", 400)
    shell = make_shell(model=MODEL)
    set_minutes(shell, 1)
    for _ in range(6):
        qtbot.wait(150)
        shell.window.composer.draft_changed.emit("x")
    assert shell.client.model is not None
    set_minutes(shell, 0)
    qtbot.wait(600)
    assert shell.client.model is not None
