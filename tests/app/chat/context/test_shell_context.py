"""The context gauge in the window: what it counts and when, and messages that do not fit."""

from dataclasses import replace

import pytest
from pytestqt.qtbot import QtBot

from app.chat.views.composer import ContextUsage
from app.core.notice import Notice
from app.main import Shell
from app.widgets.text import label
from engine import AnswerRequest, CountTokens, EngineError, Failed
from tests.helpers.fake_host import Script, model_loaded
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of, running


def usage(shell: Shell) -> ContextUsage:
    return shell.chat_presenter._context.counter.usage


def settle(qtbot: QtBot, shell: Shell) -> None:
    """Wait until the draft and the messages are counted."""
    shell.window.composer.flush_draft()
    qtbot.waitUntil(lambda: shell.chat_presenter._context.counter.is_current)


def full_counts(shell: Shell) -> int:
    """Return the number of counts that included messages."""
    counts = host_of(shell).counts
    return sum(isinstance(c, CountTokens) and c.messages is not None for c in counts)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the scripted engine a context of 40 tokens."""
    monkeypatch.setattr(
        "tests.helpers.fake_host.model_loaded",
        lambda *found: replace(model_loaded(*found), n_ctx=40),
    )


def test_draft_messages_and_system_prompt_are_counted(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    settle(qtbot, shell)
    size = usage(shell).size
    assert usage(shell) == ContextUsage(size, 0, 0, 0, is_counted=True)
    shell.window.composer.edit.insertPlainText("four words are here")
    settle(qtbot, shell)
    assert (usage(shell).n_before, usage(shell).n_draft) == (0, 4)
    shell.window.sampling.prompt.edit.setPlainText("Be brief")
    shell.window.sampling.prompt.flush()
    settle(qtbot, shell)
    assert (usage(shell).n_before, usage(shell).n_draft) == (5, 4)
    before = full_counts(shell)
    shell.window.composer.edit.insertPlainText(" and more")
    settle(qtbot, shell)
    assert usage(shell).n_draft == 6
    assert full_counts(shell) == before, "only the draft has changed"
    tip = shell.window.composer.gauge.toolTip()
    for part in ("11 of", "5 system prompt", "6 this message", "left for the answer"):
        assert part in tip


def test_the_answer_and_other_chats_are_counted(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "one two")
    settle(qtbot, shell)
    n_answer = len(shell.session.current.messages[-1].content.split())
    assert usage(shell).n_before == 3 + 2 + 3 + n_answer
    assert (usage(shell).n_draft, usage(shell).n_answer) == (0, 0)
    shell.chat_presenter.new_chat()
    settle(qtbot, shell)
    assert usage(shell).used == 0
    shell.chat_presenter.open_chat(shell.session.library.summaries[-1].id)
    settle(qtbot, shell)
    assert usage(shell).n_before == 8 + n_answer


def test_an_answer_that_grows_is_added(qtbot: QtBot, make_shell: MakeShell, script: Script) -> None:
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 2
    shell.window.composer.edit.setPlainText("one two")
    shell.window.composer.submit()
    qtbot.waitUntil(lambda: running(shell)[0].meter.n_tokens >= 2)
    settle(qtbot, shell)
    assert (usage(shell).n_before, usage(shell).n_answer) == (5, 2), "not as a message too"
    assert "2 the answer so far" in shell.window.composer.gauge.toolTip()
    shell.session.stop()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    settle(qtbot, shell)
    assert usage(shell).n_answer == 0


def test_an_answer_in_the_same_words_is_counted_once(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "one two")
    settle(qtbot, shell)
    before = usage(shell)
    shell.session.regenerate()
    running(shell)[0].meter.n_tokens = 2
    shell.chat_presenter._context.counter.count_answer()
    assert usage(shell).n_answer == 2
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    settle(qtbot, shell)
    qtbot.waitUntil(lambda: usage(shell) == before)


@pytest.mark.usefixtures("small")
def test_a_message_that_does_not_fit_is_not_sent_until_the_oldest_may_go(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    composer = shell.window.composer
    ask(qtbot, shell, "word " * 20)
    composer.edit.setPlainText("more " * 20)
    settle(qtbot, shell)
    assert composer.gauge.text == "too long"
    n_sent = len(host_of(shell).commands)
    composer.submit()
    assert "With this message, the chat has" in banner(shell)
    assert len(host_of(shell).commands) == n_sent
    assert composer.text.startswith("more"), "it stays as a draft"
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.on_action is not None
    notice.on_action()
    qtbot.waitUntil(lambda: len(host_of(shell).commands) > n_sent)
    command = host_of(shell).commands[-1]
    assert isinstance(command, AnswerRequest)
    assert command.sampling.on_overflow == "shift"
    qtbot.waitUntil(lambda: not shell.session.is_busy)


@pytest.mark.usefixtures("small")
def test_a_message_longer_than_the_context_is_told_so(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    shell.session.current.drops_oldest = True
    shell.window.composer.edit.setPlainText("more " * 50)
    settle(qtbot, shell)
    shell.window.composer.submit()
    assert banner(shell) == "This message alone has 50 tokens; the context holds 40."
    assert not [c for c in host_of(shell).commands if isinstance(c, AnswerRequest)]


@pytest.mark.usefixtures("small")
def test_a_message_that_has_no_room_beside_the_system_prompt_is_told_so(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    """Older messages stay, as dropping them would not help."""
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    shell.window.sampling.prompt.edit.setPlainText("Be brief " * 8)
    shell.window.sampling.prompt.flush()
    shell.window.composer.edit.setPlainText("more " * 30)
    settle(qtbot, shell)
    shell.session.current.drops_oldest = True
    shell.window.composer.submit()
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.text == "This message and the system prompt have 49 tokens; the context holds 40."
    assert notice.hint.startswith("Shorten one of them")
    assert notice.action == ""


def test_a_long_draft_leaves_the_buttons_free_in_a_low_window(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    shell.window.resize(1024, 700)
    shell.window.show_page(
        "models", label("\n" * 14)
    )  # as high as the start page with the demo model
    shell.window.show_chat(True)
    shell.window.banner.show_notice(Notice("Something has happened."))
    composer = shell.window.composer
    composer.edit.setPlainText("line\n" * 20)
    qtbot.waitUntil(lambda: composer.edit.height() > 100)
    qtbot.waitUntil(lambda: composer.edit.geometry().bottom() < composer.gauge.geometry().top())


def test_without_a_model_nothing_is_counted(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    shell.window.composer.edit.setPlainText("hello there")
    shell.window.composer.flush_draft()
    qtbot.wait(200)
    assert shell.client._host is None or not host_of(shell).counts
    assert shell.window.composer.gauge.isHidden()


def test_what_a_template_refuses_leaves_the_last_answer_s_figure(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.helpers.fake_host._counted", lambda command: Failed(EngineError("No template."))
    )
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    qtbot.waitUntil(lambda: len(host_of(shell).counts) > 0)
    qtbot.wait(300)
    assert usage(shell).used == shell.session.current.context_tokens > 0
    assert banner(shell) == ""
    n_asked = len(host_of(shell).counts)
    qtbot.wait(300)
    assert len(host_of(shell).counts) == n_asked, "the question is not repeated"
