"""Thinking before answering: the button, the chat's option, and the figures."""

import pytest
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.views.answer_view import AnswerView
from app.main import Shell
from engine import AnswerRequest
from tests.helpers.fake_host import Script, model_info
from tests.helpers.shell_driver import MODEL, MakeShell, ask, host_of


def wishes(shell: Shell) -> list[bool | None]:
    return [
        command.thinks for command in host_of(shell).commands if isinstance(command, AnswerRequest)
    ]


@pytest.fixture
def thinking_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.helpers.fake_host.model_info", lambda path: model_info(path, can_think=True)
    )


def test_a_model_that_cannot_be_told_has_no_button(make_shell: MakeShell) -> None:
    assert make_shell(model=MODEL).thinking.button.isHidden()


def test_each_chat_has_its_own_wish(
    qtbot: QtBot, make_shell: MakeShell, thinking_model: None
) -> None:
    shell = make_shell(model=MODEL)
    switch = shell.thinking.button
    assert switch.isVisible()
    assert switch.isChecked()
    ask(qtbot, shell, "Hi")
    switch.click()
    ask(qtbot, shell, "Quick?")
    first = shell.session.current.id
    shell.chat_presenter.new_chat()
    assert switch.isChecked()
    ask(qtbot, shell, "Other")
    assert wishes(shell) == [None, False, None]
    shell.chat_presenter.open_chat(first)
    assert not switch.isChecked()
    shell.window.close()
    again = make_shell(model=MODEL)
    assert again.session.current.id == first
    assert not again.thinking.button.isChecked()
    again.thinking.button.click()
    ask(qtbot, again, "Slow?")
    assert wishes(again) == [True]


def test_each_chat_has_its_own_effort(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell(model=MODEL)
    assert shell.thinking.effort.isHidden(), "its template has no such option"
    shell.window.close()
    monkeypatch.setattr(
        "tests.helpers.fake_host.model_info", lambda path: model_info(path, has_effort=True)
    )
    shell = make_shell(model=MODEL)
    chip = shell.thinking.effort
    assert chip.isVisible()
    assert chip.text() == "Effort ▾"
    ask(qtbot, shell, "Hi")
    choose(shell, "High")
    assert chip.text() == "Effort: high ▾"
    ask(qtbot, shell, "Deeper")
    first = shell.session.current.id
    shell.chat_presenter.new_chat()
    assert chip.text() == "Effort ▾"
    shell.chat_presenter.open_chat(first)
    shell.window.close()
    again = make_shell(model=MODEL)
    ask(qtbot, again, "Still")
    choose(again, "Model default")
    ask(qtbot, again, "Done")
    assert [*efforts(shell), *efforts(again)] == ["", "high", "high", ""]


def choose(shell: Shell, name: str) -> None:
    """Choose an effort in the menu."""
    menu = shell.thinking.effort.menu()
    next(action for action in menu.actions() if action.text() == name).trigger()


def efforts(shell: Shell) -> list[str]:
    return [
        command.effort for command in host_of(shell).commands if isinstance(command, AnswerRequest)
    ]


def test_a_chat_with_an_unknown_effort_opens() -> None:
    stored = Conversation(effort="high").to_json()
    assert Conversation.from_json(stored).effort == "high"
    for odd in ("extreme", 3, None, ["low"]):
        assert Conversation.from_json({**stored, "effort": odd}).effort == ""


def test_a_thought_has_its_tokens_and_keeps_them(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.answer, script.chunk = "<think>hmmm</think>\n\nYes.", 5
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Well?")
    message = shell.session.current.messages[-1]
    assert message.thought_tokens
    assert message.thought_tokens <= 6
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    assert answer._thought._toggle.text().endswith(f"{message.thought_tokens} tokens")
    shell.window.close()
    again = make_shell()
    assert again.session.current.messages[-1].thought_tokens == message.thought_tokens


def test_a_thought_without_figures_is_a_thought(qtbot: QtBot) -> None:
    """As in a chat of an earlier version."""
    stored = {"role": "assistant", "content": "<think>a</think>b"}
    view = AnswerView(Message.from_json(stored))
    qtbot.addWidget(view)
    view.close_answer()
    assert view._thought._toggle.text() == "▸ Thought"
