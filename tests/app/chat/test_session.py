"""The session loses nothing between two chats, two windows, and an answer that ends in between."""

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.chat.message import Message
from app.chat.store import ChatStore
from app.core.engine_client import EngineState, RunningAnswer
from app.core.paths import chats_dir
from engine import EngineError
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of, prompts, shown


def test_a_chat_that_two_windows_changed_is_kept_twice(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    other = ChatStore(chats_dir())
    (theirs,) = other.load()
    theirs.add(Message("user", "from the other window"))
    other.save(theirs)
    ask(qtbot, shell, "from this window")
    assert "Both versions are kept" in banner(shell)
    kept = [[m.content for m in chat.messages] for chat in ChatStore(chats_dir()).load()]
    assert sorted(len(texts) for texts in kept) == [3, 4]
    assert {texts[2] for texts in kept} == {"from the other window", "from this window"}
    shell.window.close()
    again = make_shell()
    assert again.session.current.messages[2].content == "from this window"


def test_an_edit_keeps_the_draft(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    shell.window.composer.edit.setPlainText("half a question")
    shell.window.chat_view.resend_requested.emit(1, "Better")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shell.window.composer.text == shell.session.current.draft == "half a question"


def test_an_edit_that_cannot_be_sent_becomes_the_draft(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    shell.models.eject()
    qtbot.waitUntil(lambda: shell.client.model is None)
    shell.window.composer.edit.setPlainText("half a question")
    shell.window.chat_view.resend_requested.emit(1, "Better")
    assert shell.session.current.messages[0].content == "First"
    assert shell.window.composer.text == "half a question\n\nBetter"
    assert shell.session.current.draft == shell.window.composer.text


def test_a_draft_that_was_taken_back_stays_away(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    shell.window.composer.edit.setPlainText("never mind")
    shell.chat_presenter.flush()
    shell.session.save_all()
    shell.window.composer.edit.setPlainText("")
    shell.window.close()
    assert make_shell().window.composer.text == ""


def test_dropping_the_oldest_goes_on_in_the_chat_that_was_full(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """Another chat may have been opened before the context was full."""
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Elsewhere")
    elsewhere = shell.session.current
    shell.chat_presenter.new_chat()
    script.reason, script.hold = "context", True
    shell.window.composer.edit.setPlainText("Too long")
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: shell.session.is_busy)
    full = shell.session.current
    shell.chat_presenter.open_chat(elsewhere.id)
    host_of(shell).let_go(script)
    qtbot.waitUntil(lambda: shell.window.banner._action.isVisible())
    assert banner(shell).startswith("“Too long”: "), "the notice names its chat"
    script.answer, script.reason = " More.", "stop"
    shell.window.banner._action.click()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shell.session.current is full
    assert full.messages[-1].content == "Hello from the **fake** model. More."
    assert elsewhere.messages[-1].content == "Hello from the **fake** model."
    assert prompts(shell)[-1][0] == ("user", "Too long")


def test_nothing_is_asked_while_another_model_is_loading(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """The question would wait for the load, and stopping it would stop both."""
    shell = make_shell(model=MODEL)
    script.hold = True
    shell.models.load()
    shell.window.composer.edit.setPlainText("Hi")
    shell.chat_presenter.send("Hi")
    assert shell.window.composer.text == "Hi"
    assert prompts(shell) == []
    shell.models.cancel()
    qtbot.waitUntil(lambda: shell.client.state is EngineState.READY)
    script.hold = False
    assert prompts(shell) == []
    ask(qtbot, shell, "Hi")
    assert prompts(shell) == [[("user", "Hi")]]


@pytest.mark.parametrize("how", ["stop", "error", "close"])
def test_figures_of_an_answer_survive_what_cuts_it_off(
    qtbot: QtBot, make_shell: MakeShell, script: Script, how: str
) -> None:
    """They are in the file too, with the text so far."""
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    filled = shell.session.current.context_tokens
    assert filled > 0
    if how == "error":
        script.answer_error = EngineError("The card has fallen off the bus.")
    else:
        script.hold, script.hold_after = True, 5
    begun = list[RunningAnswer]()
    shell.client.text.connect(lambda _, answer: begun.append(answer))
    shell.chat_presenter.send("Second")
    qtbot.waitUntil(lambda: bool(begun) and begun[-1].meter.n_tokens >= 5)
    if how == "stop":
        script.hold = False
        shell.session.stop()
    if how != "close":
        qtbot.waitUntil(lambda: not shell.session.is_busy)
    shell.window.close()
    again = make_shell()
    message = again.session.current.messages[-1]
    assert message.content.startswith("Hello fr")
    assert message.stats is not None
    assert message.stats.reason == ("failed" if how == "error" else "cancelled")
    assert message.stats.n_tokens >= 5
    assert message.stats.first_token_s > 0
    assert message.stats.tokens_per_s > 0
    if how == "error":  # otherwise the engine reports it
        assert again.session.current.context_tokens == filled, "as far as known"


def test_a_killed_answer_keeps_its_text_and_offers_to_go_on(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """As found at the next start: without figures and reason."""
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    assert not answer.footer.go_on.isVisible(), "it ended by itself"
    chat = shell.session.current
    chat.messages[-1].stats, chat.messages[-1].content = None, "Hello"
    shell.session.save_all()
    shell.window.close()
    shell = make_shell(model=MODEL)
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    assert answer._problem.text() == "This answer was interrupted."
    assert (answer.footer.go_on.isVisible(), answer.footer.again.text()) == (True, "Retry")
    script.answer = ", world."
    answer.footer.go_on.click()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell) == ["Hi", "Hello, world."]
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    assert not answer._problem.isVisible()
    assert answer.footer.again.text() == "Regenerate"
