"""With the bundled model, the empty page has messages to send by a click."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QPushButton, QScrollArea
from pytestqt.qtbot import QtBot

from app.__main__ import main
from app.core.paths import settings_file
from app.core.settings import Settings, SettingsStore
from app.main import Shell
from app.models.current.model_session import DEMO_PROMPTS
from app.models.current.model_views import StartView
from tests.helpers.shell_driver import MODEL, MakeShell, prompts

WORDS = ("Tandem", "splits every weight", "keys and values", "4.8 bits")
"""Words that the answer to each of them has."""


def offered(shell: Shell) -> list[QPushButton]:
    """Return the buttons of the messages that the empty page offers."""
    texts = set(DEMO_PROMPTS)
    buttons = shell.window.start_view.findChildren(QPushButton)
    return [made for made in buttons if made.text() in texts and made.isVisible()]


def test_a_click_sends_a_message_to_the_demo(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    assert offered(shell) == []
    shell.model_presenter.open_demo()
    qtbot.waitUntil(lambda: shell.client.model is not None)
    qtbot.waitUntil(lambda: [made.text() for made in offered(shell)] == list(DEMO_PROMPTS))
    second = offered(shell)[1]
    assert second.accessibleName() == "Ask: What is tensor parallelism?"
    second.setFocus()
    qtbot.keyClick(second, Qt.Key.Key_Space)
    qtbot.waitUntil(lambda: not shell.session.is_busy and bool(prompts(shell)))
    assert prompts(shell)[-1][-1] == ("user", "What is tensor parallelism?")
    assert shell.window.chat_view.isVisible()
    assert shell.window.composer.edit.hasFocus(), "the next question can be typed"
    shell.chat_presenter.new_chat()
    assert len(offered(shell)) == len(DEMO_PROMPTS)


def test_suggestions_are_translated_and_asked_in_english(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    store = SettingsStore(settings_file())
    store.put(replace(Settings(), language="de"))
    store.save()
    shell = make_shell()
    shell.model_presenter.open_demo()
    qtbot.waitUntil(lambda: shell.client.model is not None)

    def first() -> list[QPushButton]:
        buttons = shell.window.start_view.findChildren(QPushButton)
        return [made for made in buttons if made.text() == "Was ist Tandem?"]

    qtbot.waitUntil(lambda: len(first()) == 1)
    first()[0].click()
    qtbot.waitUntil(lambda: not shell.session.is_busy and bool(prompts(shell)))
    assert prompts(shell)[-1][-1] == ("user", "What is Tandem?")


def test_a_low_page_scrolls_in_place_of_squeezing_what_it_offers(qtbot: QtBot) -> None:
    page = StartView()
    qtbot.addWidget(page)
    page.show_state("Demo", recent=(), has_demo=True, prompts=DEMO_PROMPTS)
    page.resize(400, 700)
    page.show()
    buttons = [made for made in page.findChildren(QPushButton) if made.isVisible()]
    heights = [made.height() for made in buttons]
    assert len(buttons) == len(DEMO_PROMPTS)
    page.resize(400, 160)
    QApplication.processEvents()
    assert [made.height() for made in buttons] == heights
    assert page.findChild(QScrollArea).verticalScrollBar().maximum() > 0


def test_other_models_get_no_suggestions(make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    assert offered(shell) == []


@pytest.mark.parametrize(("prompt", "words"), list(zip(DEMO_PROMPTS, WORDS, strict=True)))
def test_the_demo_knows_what_is_suggested(
    prompt: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is random here, so one answer is enough."""
    assert main(["generate", "demo", "-p", prompt, "--temp", "0", "--devices", "cpu"]) == 0
    assert words in capsys.readouterr().out
