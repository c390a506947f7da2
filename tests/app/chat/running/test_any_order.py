"""Whatever the user does with several chats while they are answered, no text gets into another."""

import random

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.core.engine_client import EngineState
from app.main import Shell
from engine import EngineError
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, running

N_STEPS = 80


class Person:
    """A user who asks, switches, stops, edits and deletes at random."""

    def __init__(self, shell: Shell, script: Script, chance: random.Random) -> None:
        self.shell, self.script, self.chance = shell, script, chance
        self._n_asked = 0
        self.steps = [
            *[self.ask] * 3, *[self.ask_anew] * 4, self.switch, self.stop, self.stop_any,
            self.regenerate, self.edit, self.delete, self.cut_off, self.split,
        ]  # fmt: skip

    def question(self) -> str:
        """Return a question with its own answer; some fail."""
        self._n_asked += 1
        text = f"Question {self._n_asked}"
        self.script.others[text] = Script(
            answer=f"[{text}] " + "and so on " * self.chance.randint(0, 8),
            pause_s=self.chance.choice([0.0, 0.01, 0.03]),
            answer_error=EngineError("No.") if self.chance.random() < 0.1 else None,
        )
        return text

    def ask(self) -> None:
        self.shell.chat_presenter.send(self.question())

    def ask_anew(self) -> None:
        self.shell.chat_presenter.new_chat()
        self.ask()

    def switch(self) -> None:
        ids = [chat.id for chat in self.shell.session.library.summaries]
        if ids:
            self.shell.chat_presenter.open_chat(self.chance.choice(ids))

    def stop(self) -> None:
        self.shell.window.stop_requested.emit()

    def stop_any(self) -> None:
        if answers := self.shell.session.answers:
            self.shell.window.running.stop_requested.emit(self.chance.choice(answers).chat.id)

    def regenerate(self) -> None:
        self.shell.session.regenerate()

    def edit(self) -> None:
        asked = [m.id for m in self.shell.session.current.messages if not m.is_answer]
        if asked:
            view = self.shell.window.chat_view
            view.resend_requested.emit(self.chance.choice(asked), self.question())

    def delete(self) -> None:
        ids = [chat.id for chat in self.shell.session.library.summaries]
        if len(ids) > 3:
            self.shell.chat_presenter.delete_chats([self.chance.choice(ids)])
            if self.chance.random() < 0.5:
                self.shell.window.banner._action.click()

    def cut_off(self) -> None:
        if messages := self.shell.session.current.messages:
            self.shell.session.end_answer(messages)

    def split(self) -> None:
        model = self.shell.client.model
        if self.shell.client.state is not EngineState.LOADING and model is not None:
            self.shell.models.apply(model.params)


def check(chat: Conversation, script: Script) -> None:
    """Check that each answer is part of the one to its own question."""
    for message in chat.tree:
        if message.is_answer:
            asked = chat.tree[message.parent].content
            assert script.others[asked].answer.startswith(message.content)
            assert message.stats is not None
            if message.stats.reason == "stop":
                assert message.content == script.others[asked].answer


@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_the_one_to_its_question(
    qtbot: QtBot, make_shell: MakeShell, script: Script, seed: int
) -> None:
    shell = make_shell(model=MODEL)
    person = Person(shell, script, random.Random(seed))
    for _ in range(4):
        person.ask_anew()
    assert len(shell.session.answers) == 4
    for _ in range(N_STEPS):
        person.chance.choice(person.steps)()
        written = [answer.chat for answer in shell.session.answers]
        assert len(set(map(id, written))) == len(written), "at most one in each chat"
        if person.chance.random() < 0.4:
            QApplication.processEvents()
    qtbot.waitUntil(lambda: not shell.session.is_busy and not running(shell), timeout=30_000)
    found = [shell.session.find(chat.id) for chat in shell.session.library.summaries]
    for chat in found:
        assert chat is not None
        check(chat, script)
    qtbot.waitUntil(lambda: shell.client.state is EngineState.READY)
    shell.window.close()
    again = make_shell()
    for chat in found:
        assert chat is not None
        kept = again.session.find(chat.id)
        assert kept is not None
        assert [m.content for m in kept.tree] == [m.content for m in chat.tree]
