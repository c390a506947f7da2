"""Titles that the model gives: which chats get one, what is taken for one, and who comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.chat.conversation import TITLE_LENGTH, Conversation
from app.chat.listing import titles
from app.chat.listing.titles import cleaned_title, needs_title
from app.chat.message import AnswerStats, Message
from app.main import Shell
from engine import AnswerRequest
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, host_of, prompts, shown

STATS = AnswerStats("stop", 3, 10.0, 0.1, 20)


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ("Uneven split on three cards", "Uneven split on three cards"),
        ('"Uneven split."\n', "Uneven split"),
        ("**Title: Uneven split**", "Uneven split"),
        ("Titel: „Ungleiche Teile“", "Ungleiche Teile"),
        ("<think>\nhm\n</think>\n\nRust lifetimes", "Rust lifetimes"),
        ("C++ and C#?", ""), ("Was ist C++?", "Was ist C++?"), ("日本語の題名", "日本語の題名"),
        ("", ""), ("...", ""), ("**", ""), ("one\ntwo", ""), ("<b>Bold</b>", ""), ("a `b` c", ""),
        ("# Heading", ""), ("see https://x.org", ""), ("word " * 11, ""), ("x" * 49, ""),
        ("Sure! Here is a title for this conversation that you may like", ""),
        ("<think>still thinking", ""), ("a\x1b[31mb", ""),
    ],
)  # fmt: skip
def test_what_is_taken_for_a_title(written: str, title: str) -> None:
    assert cleaned_title(written) == title


@given(st.text(max_size=80))
def test_no_title_is_long_or_has_lines(written: str) -> None:
    title = cleaned_title(written)
    assert len(title) <= TITLE_LENGTH
    assert title.isprintable()


def test_which_chats_get_one() -> None:
    chat = Conversation()
    assert not needs_title(chat)
    chat.add(Message("user", "Why is the third card slow?"))
    assert not needs_title(chat)
    answer = chat.add(Message("assistant", "It waits.", replace(STATS, reason="cancelled")))
    assert not needs_title(chat)
    answer.stats = STATS
    assert needs_title(chat)
    chat.has_own_title = True
    assert not needs_title(chat)
    chat.has_own_title, chat.title = False, "Older than this feature"
    assert not needs_title(chat)


@pytest.fixture
def shell(make_shell: MakeShell) -> Shell:
    """A window that asks for titles when a test has it end its pause."""
    return make_shell(model=MODEL)


def end_pause(shell: Shell) -> bool:
    """Let the time pass after which a title is asked for; return whether one was waited for."""
    assert shell.chat_listing._titler is not None
    pause = shell.chat_listing._titler._pause
    was_waiting = pause.isActive()
    if was_waiting:
        pause.stop()
        pause.timeout.emit()
    return was_waiting


def asked_for_titles(shell: Shell) -> list[AnswerRequest]:
    commands = [c for c in host_of(shell).commands if isinstance(c, AnswerRequest)]
    return [c for c in commands if any(m.content == titles.REQUEST for m in c.messages)]


def hold_title(qtbot: QtBot, shell: Shell, script: Script) -> None:
    """Wait until a title is being written, which goes on until it is ended."""
    script.hold, script.hold_after = True, 1
    assert end_pause(shell)
    qtbot.waitUntil(lambda: shell.client._aside is not None and shell.client._aside.text != "")


def test_a_chat_is_named_after_its_first_answer(
    qtbot: QtBot, shell: Shell, make_shell: MakeShell, script: Script
) -> None:
    ask(qtbot, shell, "Why is the third card slow?")
    script.answer = "Slow third card"
    rates: list[float] = []
    shell.client.rate.connect(lambda rate, _: rates.append(rate))
    assert end_pause(shell)
    qtbot.waitUntil(lambda: shell.window.chat_list.shown_titles() == ["TODAY", "Slow third card"])
    (request,) = asked_for_titles(shell)
    assert [m.content for m in request.messages] == [
        "Why is the third card slow?", "Hello from the **fake** model.", titles.REQUEST,
    ]  # fmt: skip
    assert request.sampling.max_tokens == titles.MAX_TOKENS
    assert shown(shell) == ["Why is the third card slow?", "Hello from the fake model."]
    assert not rates, "it is no answer"
    script.answer = "Another one"
    ask(qtbot, shell, "And now?")
    assert not end_pause(shell)
    assert len(asked_for_titles(shell)) == 1
    shell.window.close()
    assert make_shell().session.current.title == "Slow third card"


def test_chats_that_were_answered_at_once_are_named_one_by_one(
    qtbot: QtBot, shell: Shell, script: Script
) -> None:
    """Once nothing runs any more; a chat that is gone by then is left out."""
    asked = ["Why is the first card slow?", "And the second?", "Who deletes this?"]
    script.others |= {text: Script(hold=True, hold_after=1) for text in asked}
    chats = []
    for text in asked:
        shell.chat_presenter.new_chat()
        shell.chat_presenter.send(text)
        chats.append(shell.session.current)
    host_of(shell).let_go(script.others[asked[2]], script.others[asked[1]])
    qtbot.waitUntil(lambda: len(shell.session.answers) == 1)
    assert end_pause(shell)
    assert asked_for_titles(shell) == [], "one is still being answered"
    host_of(shell).let_go(script.others[asked[0]])
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    shell.session.delete([chats[2].id], "")
    script.answer = "Slow second card"
    assert end_pause(shell)
    qtbot.waitUntil(lambda: chats[1].title == "Slow second card")
    script.answer = "Slow first card"
    qtbot.waitUntil(lambda: shell.client.is_idle)
    assert end_pause(shell)
    qtbot.waitUntil(lambda: chats[0].title == "Slow first card")
    assert not end_pause(shell)
    assert len(asked_for_titles(shell)) == 2
    assert len(shell.session.library.summaries) == 2


def test_a_title_that_the_end_of_the_window_ends_is_not_asked_for_again(
    qtbot: QtBot, shell: Shell, script: Script
) -> None:
    ask(qtbot, shell, "Why is the third card slow?")
    hold_title(qtbot, shell, script)
    shell.window.close()
    assert not end_pause(shell)


def test_a_title_of_a_chat_that_is_deleted_meanwhile_does_not_bring_it_back(
    qtbot: QtBot, shell: Shell, script: Script
) -> None:
    ask(qtbot, shell, "Why is the third card slow?")
    script.answer = "Slow third card"
    hold_title(qtbot, shell, script)
    chat = shell.session.current
    shell.session.delete([chat.id], "")
    host_of(shell).let_go(script)
    qtbot.waitUntil(lambda: shell.client.is_idle)
    assert shell.session.library.summaries == []


def test_a_bad_title_leaves_the_first_words(qtbot: QtBot, shell: Shell, script: Script) -> None:
    ask(qtbot, shell, "Why is the third card slow?")
    script.answer = "# Here\n\nis a *list*"
    assert end_pause(shell)
    assert asked_for_titles(shell)
    qtbot.waitUntil(lambda: shell.client.is_idle)
    assert shell.session.current.title == "Why is the third card slow?"


def test_a_title_that_a_person_gave_stays(qtbot: QtBot, shell: Shell, script: Script) -> None:
    script.hold = True
    shell.chat_presenter.send("Why is the third card slow?")
    qtbot.waitUntil(lambda: shell.session.is_busy)
    shell.session.rename(shell.session.current.id, "Why is the third card slow?")
    script.hold = False
    shell.session.stop()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    ask(qtbot, shell, "Go on")
    assert not end_pause(shell)


def test_a_message_comes_before_a_title(qtbot: QtBot, shell: Shell, script: Script) -> None:
    ask(qtbot, shell, "Why is the third card slow?")
    hold_title(qtbot, shell, script)
    script.hold, script.answer = False, "Because."
    edit = shell.window.composer.edit
    edit.setPlainText("And now?")
    qtbot.keyClick(edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell)[-1] == "Because."
    assert prompts(shell)[-1][-1] == ("user", "And now?")
    assert end_pause(shell), "it is asked for once more"
    qtbot.waitUntil(lambda: shell.session.current.title == "Because")


def test_a_title_ends_for_whatever_the_engine_is_to_do(
    qtbot: QtBot, shell: Shell, script: Script
) -> None:
    """And only the title: what was asked for in the same moment is done."""
    ask(qtbot, shell, "Why is the third card slow?")
    hold_title(qtbot, shell, script)
    script.hold = False
    saved: list[object] = []
    shell.client.state_saved.connect(saved.append)
    shell.client.state_loaded.connect(saved.append)
    shell.client.save_state("none.state")
    shell.client.load_state("none.state")
    qtbot.waitUntil(lambda: len(saved) == 2)
    assert shell.session.current.title == "Why is the third card slow?"


@pytest.mark.parametrize("n_tokens", [titles.MAX_CHAT + 1, 4096 - titles.ROOM + 1])
def test_a_long_chat_and_a_full_context_get_no_title(
    qtbot: QtBot, shell: Shell, n_tokens: int
) -> None:
    ask(qtbot, shell, "Why is the third card slow?")
    last = shell.session.current.messages[-1]
    assert last.stats is not None
    last.stats = replace(last.stats, context_tokens=n_tokens)
    assert end_pause(shell)
    assert asked_for_titles(shell) == []


def test_no_titles_if_nobody_wants_them(qtbot: QtBot, shell: Shell) -> None:
    shell.keep(replace(shell.settings.current, auto_titles=False))
    ask(qtbot, shell, "Why is the third card slow?")
    assert not end_pause(shell)


def test_a_model_that_thinks_does_not_think_about_a_title(
    qtbot: QtBot, shell: Shell, script: Script
) -> None:
    script.answer = "<think>hm</think>Hello"
    ask(qtbot, shell, "Why is the third card slow?")
    script.answer = "Slow third card"
    assert end_pause(shell)
    qtbot.waitUntil(lambda: shell.session.current.title == "Slow third card")
    (request,) = asked_for_titles(shell)
    assert request.continue_last
    assert request.messages[-1].content == titles.NO_THOUGHT
