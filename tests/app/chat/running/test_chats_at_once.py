"""Two or more chats are answered at once, independently of each other."""

import json
from pathlib import Path

import pytest
from PySide6.QtWidgets import QFileDialog
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.core.engine_client import EngineState
from app.main import Shell
from engine import (
    AnswerRequest,
    ContextOverflow,
    EngineCrashed,
    EngineError,
    Failed,
    PrefillProgress,
)
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import (
    MODEL,
    MakeShell,
    answered,
    ask,
    banner,
    host_of,
    running,
    shown,
)


def begin(qtbot: QtBot, shell: Shell, script: Script, *texts: str) -> list[Conversation]:
    """Ask in several new chats; the answers pause after two pieces until released."""
    chats = []
    for text in texts:
        script.others[text] = Script(answer=f"{text} has an answer.", hold=True, hold_after=2)
        shell.chat_presenter.new_chat()
        shell.chat_presenter.send(text)
        chats.append(shell.session.current)
    qtbot.waitUntil(lambda: all(len(chat.messages[-1].content) == 8 for chat in chats))
    return chats


def let_go(qtbot: QtBot, shell: Shell, script: Script, *texts: str) -> None:
    """Let the answers finish."""
    chats = {chat.title: chat for chat in (one.chat for one in shell.session.answers)}
    host_of(shell).let_go(*(script.others[text] for text in texts))
    qtbot.waitUntil(lambda: all(chats[text].messages[-1].stats is not None for text in texts))


def status(shell: Shell) -> str:
    """Return the text below the last answer of the open chat."""
    view = shell.window.chat_view.last_answer()
    assert view is not None
    return view.footer.figures.accessibleName()


def is_stop(shell: Shell) -> bool:
    """Return whether the composer's button stops an answer."""
    return shell.window.composer._send.text() == "Stop"


def test_a_second_chat_is_answered_while_the_first_one_is(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    first, second = begin(qtbot, shell, script, "First", "Second")
    assert answered(shell) == ["First", "Second"]
    assert shown(shell) == ["Second", "Second h"]
    let_go(qtbot, shell, script, "Second")
    assert shown(shell) == ["Second", "Second has an answer."]
    assert not is_stop(shell)
    ask_more(qtbot, shell, "And more?")
    shell.chat_presenter.open_chat(first.id)
    assert is_stop(shell)
    assert shown(shell) == ["First", "First ha"]
    let_go(qtbot, shell, script, "First")
    assert shown(shell) == ["First", "First has an answer."]
    assert [m.content for m in second.messages][-1] == script.answer
    shell.window.close()
    again = make_shell()
    texts = {chat.title: chat for chat in map(again.session.find, (first.id, second.id)) if chat}
    assert [m.content for m in texts["First"].messages] == ["First", "First has an answer."]
    assert len(texts["Second"].messages) == 4


def ask_more(qtbot: QtBot, shell: Shell, text: str) -> None:
    """Ask in the open chat, and wait for its answer only."""
    chat = shell.session.current
    shell.chat_presenter.send(text)
    qtbot.waitUntil(lambda: chat.messages[-1].stats is not None)


def test_stop_ends_the_answer_that_is_looked_at(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    first, second = begin(qtbot, shell, script, "First", "Second")
    assert is_stop(shell)
    shell.window.stop_requested.emit()
    qtbot.waitUntil(lambda: answered(shell) == ["First"])
    assert second.messages[-1].stats is not None
    assert second.messages[-1].stats.reason == "cancelled"
    assert not is_stop(shell)
    shell.chat_presenter.new_chat()
    assert not is_stop(shell), "nothing is running here"
    assert not shell.window._stop.isEnabled()
    shell.session.stop()
    shell.chat_presenter.open_chat(first.id)
    assert is_stop(shell)
    let_go(qtbot, shell, script, "First")


def test_an_error_is_told_and_ends_no_other_answer(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    begin(qtbot, shell, script, "First", "Second")
    script.others["Bad"] = Script(answer_error=EngineError("The template refuses it."))
    shell.chat_presenter.new_chat()
    shell.chat_presenter.send("Bad")
    qtbot.waitUntil(lambda: answered(shell) == ["First", "Second"])
    assert banner(shell) == "The template refuses it."
    assert shell.session.current.messages[-1].problem == banner(shell)
    let_go(qtbot, shell, script, "First", "Second")
    assert shell.client.state is EngineState.READY


def test_an_error_is_seen_until_something_asked_for_later_succeeds(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    begin(qtbot, shell, script, "First")
    script.others["Bad"] = Script(answer_error=EngineError("The template refuses it."))
    shell.chat_presenter.new_chat()
    shell.chat_presenter.send("Bad")
    qtbot.waitUntil(lambda: answered(shell) == ["First"])
    let_go(qtbot, shell, script, "First")
    assert banner(shell) == "The template refuses it."
    ask(qtbot, shell, "Good")
    assert banner(shell) == ""


def test_a_full_context_elsewhere_names_its_chat(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    begin(qtbot, shell, script, "First", "Second")
    host_of(shell).send(running(shell)[0].number, Failed(ContextOverflow(2100, 2048)))
    qtbot.waitUntil(lambda: answered(shell) == ["Second"])
    assert banner(shell).startswith("“First”: ")
    let_go(qtbot, shell, script, "Second")


def test_an_answer_waits_from_the_moment_it_is_sent(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """Each chat shows the progress of its own answer, also after reopening."""
    shell = make_shell(model=MODEL)
    script.n_at_once = 1
    (first,) = begin(qtbot, shell, script, "First")
    shell.chat_presenter.new_chat()
    shell.chat_presenter.send("Second")
    second = shell.session.current
    assert status(shell) == "Waiting…"
    host_of(shell).send(running(shell)[1].number, PrefillProgress(300, 900))
    qtbot.waitUntil(lambda: status(shell) != "Waiting…")
    assert status(shell) == "Reading the prompt · 300 of 900 tokens"
    shell.chat_presenter.open_chat(first.id)
    assert status(shell) == "…"
    shell.chat_presenter.open_chat(second.id)
    assert status(shell) == "Reading the prompt · 300 of 900 tokens"
    let_go(qtbot, shell, script, "First")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell) == ["Second", "Hello from the fake model."]


def test_sixteen_chats_are_answered_and_more_wait(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    names = [f"Chat {n}" for n in range(16)]
    begin(qtbot, shell, script, *names)
    shell.chat_presenter.new_chat()
    shell.chat_presenter.send("One more")
    assert status(shell) == "Waiting…"
    assert len(shell.session.answers) == 17
    let_go(qtbot, shell, script, *names)
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell) == ["One more", "Hello from the fake model."]


def test_deleting_a_chat_ends_its_answer_alone(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    first, _ = begin(qtbot, shell, script, "First", "Second")
    shell.chat_presenter.delete_chats([first.id])
    assert answered(shell) == ["Second"]
    shell.window.banner._action.click()
    assert shell.session.current is first
    assert shown(shell) == ["First", "First ha"]
    assert first.messages[-1].stats is not None
    assert not is_stop(shell)
    let_go(qtbot, shell, script, "Second")


def test_a_message_of_another_chat_is_deleted_and_edited_meanwhile(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Old")
    old = shell.session.current
    (first,) = begin(qtbot, shell, script, "First")
    shell.chat_presenter.open_chat(old.id)
    chat_view = shell.window.chat_view
    chat_view.resend_requested.emit(1, "Better")
    qtbot.waitUntil(lambda: answered(shell) == ["First"])
    assert shown(shell) == ["Better", "Hello from the fake model."]
    shell.session.end_answer(old.messages)
    assert answered(shell) == ["First"]
    shell.session.end_answer(first.messages)
    assert answered(shell) == []


def test_chats_are_exported_as_they_are_while_they_are_answered(
    qtbot: QtBot, make_shell: MakeShell, script: Script, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shell = make_shell(model=MODEL)
    chats = begin(qtbot, shell, script, "First", "Second")
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(tmp_path))
    shell.chat_listing.exchange.export([chat.id for chat in chats], ".json")
    qtbot.waitUntil(lambda: banner(shell).startswith("2 chats saved in "))
    for chat in chats:
        said = json.loads((tmp_path / f"{chat.title}.json").read_text())
        assert said["messages"][-1]["content"] == f"{chat.title} has an answer."[:8]
    assert answered(shell) == ["First", "Second"]
    let_go(qtbot, shell, script, "First", "Second")


def test_closing_the_window_keeps_what_all_answers_have(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    chats = begin(qtbot, shell, script, "First", "Second", "Third")
    shell.window.close()
    assert shell.client.state is EngineState.CLOSED
    again = make_shell()
    for chat in chats:
        found = again.session.find(chat.id)
        assert found is not None
        assert found.messages[-1].content.startswith(f"{chat.title} has an answer."[:8])
        assert found.messages[-1].stats is not None
        assert found.messages[-1].stats.reason == "cancelled"
        assert found.messages[-1].stats.n_tokens >= 2


def test_a_split_is_changed_under_two_answers(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    begin(qtbot, shell, script, "First", "Second")
    assert shell.client.model is not None
    with qtbot.waitSignal(shell.client.resplit_done):
        shell.models.apply(shell.client.model.params)
    assert answered(shell) == ["First", "Second"]
    assert is_stop(shell)
    script.hold = True
    shell.models.apply(shell.client.model.params)
    with qtbot.waitSignal(shell.client.resplit_failed):
        shell.models.cancel()
    assert answered(shell) == ["First", "Second"], "the button only cancels the replacement"
    let_go(qtbot, shell, script, "First", "Second")


def test_unloading_ends_all_answers_with_what_they_have(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    chats = begin(qtbot, shell, script, "First", "Second")
    with qtbot.waitSignal(shell.client.unloaded):
        shell.models.eject()
    assert not shell.session.is_busy
    for chat in chats:
        assert chat.messages[-1].stats is not None
        assert chat.messages[-1].stats.reason == "cancelled"


CRASH = EngineCrashed("The engine was killed.", "Load the model again.")


def lose(qtbot: QtBot, shell: Shell) -> None:
    """Crash the engine's process: all running answers fail."""
    answers = running(shell)
    for answer in answers:
        failed = Failed(CRASH, is_model_lost=answer is answers[0])
        host_of(shell).send(answer.number, failed)
    host_of(shell).cancel()
    qtbot.waitUntil(lambda: not shell.session.is_busy)


def test_what_the_cause_of_a_loss_has_ended_before_goes_on_as_well(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """The loss of the model is known only with the last answer that a dead device has ended."""
    shell = make_shell(model=MODEL)
    begin(qtbot, shell, script, "First", "Second")
    answers = running(shell)
    with qtbot.waitSignal(shell.client.lost):
        host_of(shell).send(answers[0].number, Failed(CRASH))
        host_of(shell).send(answers[1].number, Failed(CRASH, is_model_lost=True))
    assert [cut.chat.title for cut in shell.session.lost_answers] == ["First", "Second"]
    assert shell.window.banner.notice is not None
    assert shell.window.banner.notice.action == "Reload and continue"


def test_lost_answers_are_counted_where_another_button_has_loaded_the_model(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    begin(qtbot, shell, script, "First", "Second")
    lose(qtbot, shell)
    with qtbot.waitSignal(shell.client.loaded):
        shell.models.load()
    assert banner(shell) == "2 answers were cut off."


@pytest.mark.parametrize("open_one", [True, False], ids=["here", "elsewhere"])
def test_after_a_lost_engine_each_answer_goes_on_from_its_tokens(
    qtbot: QtBot, make_shell: MakeShell, script: Script, open_one: bool
) -> None:
    shell = make_shell(model=MODEL)
    (alone,) = begin(qtbot, shell, script, "Alone")
    host_of(shell).send(running(shell)[0].number, Failed(EngineError("Too hot.")))
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    first, second = begin(qtbot, shell, script, "First", "Second")
    begun = [tuple(answer.ids) for answer in running(shell)]
    if not open_one:
        shell.chat_presenter.new_chat()
    lose(qtbot, shell)
    assert shell.window.banner.notice is not None
    assert shell.window.banner.notice.action == "Reload and continue"
    script.others.clear()
    script.answer = "…"
    shell.window.banner._action.click()
    qtbot.waitUntil(lambda: shell.client.model is not None and not shell.session.is_busy)
    asked = [c for c in host_of(shell).commands if isinstance(c, AnswerRequest)][-2:]
    assert [command.begun for command in asked] == begun
    assert [command.messages[-1].content for command in asked] == ["First ha", "Second h"]
    assert [chat.messages[-1].content for chat in (first, second)] == ["First ha…", "Second h…"]
    assert alone.messages[-1].content == "Alone ha", "it had already ended"
    assert shell.session.current is second
    assert shown(shell) == ["Second", "Second h…"]
