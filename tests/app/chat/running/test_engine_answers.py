"""Chats answered concurrently by the engine get the same answers as one by one."""

from collections.abc import Iterator

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.core import paths
from app.main import Shell
from app.widgets.theme import apply_theme
from engine import ProcessHost, SamplingParams
from tests.helpers.shell_driver import ask

WAIT_MS = 60_000
QUESTIONS = (
    "What is tensor parallelism?",
    "How do I split a model over two devices?",
    "Who are you?",
)


@pytest.fixture
def shell(qapp: QApplication, qtbot: QtBot) -> Iterator[Shell]:
    """Yield a window with the demo model, whose engine is in another process."""
    made = Shell(qapp, ProcessHost)
    made.start()
    made.window.sampling.set_params(SamplingParams(temperature=0, max_tokens=48))
    with qtbot.waitSignal(made.client.loaded, timeout=WAIT_MS):
        made.models.open(str(paths.demo_model()))
    yield made
    made.window.close()
    made.window.deleteLater()
    made.deleteLater()
    apply_theme(qapp, "dark")


def text_of(chat: Conversation) -> str:
    return chat.messages[-1].content


def begin(shell: Shell, question: str) -> Conversation:
    """Ask in a new chat."""
    shell.chat_presenter.new_chat()
    shell.chat_presenter.send(question)
    return shell.session.current


def test_answers_at_once_are_those_of_each_chat_alone(shell: Shell, qtbot: QtBot) -> None:
    """Even if one of them is stopped."""
    alone = {}
    for question in QUESTIONS:
        shell.chat_presenter.new_chat()
        ask(qtbot, shell, question)
        alone[question] = text_of(shell.session.current)
    together = [begin(shell, question) for question in QUESTIONS]
    assert len(shell.session.answers) == 3
    qtbot.waitUntil(lambda: not shell.session.is_busy, timeout=WAIT_MS)
    assert [text_of(chat) for chat in together] == list(alone.values())
    first, stopped, last = (begin(shell, question) for question in QUESTIONS)
    shell.session.stop_answer(stopped.id)
    qtbot.waitUntil(lambda: not shell.session.is_busy, timeout=WAIT_MS)
    assert text_of(first) == alone[QUESTIONS[0]]
    assert text_of(last) == alone[QUESTIONS[2]]
    assert stopped.messages[-1].stats is not None
    assert stopped.messages[-1].stats.reason in ("cancelled", "stop")
    assert alone[QUESTIONS[1]].startswith(text_of(stopped))
