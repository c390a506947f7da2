"""The list of running answers shows their progress, opens their chats, and stops them."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.running import RunningChip, RunningList
from app.main import Shell
from app.models.current.model_views import ModelBar
from engine import Fallback, LoadParams, PrefillProgress
from tests.helpers.fake_host import Script, model_loaded
from tests.helpers.shell_driver import MODEL, MakeShell, answered, host_of, running, shown
from tests.helpers.split_panels import settle


@pytest.fixture
def shell(qtbot: QtBot, make_shell: MakeShell, script: Script) -> Iterator[Shell]:
    """Yield a window with two chats: one has a running answer, one processes its prompt."""
    made = make_shell(model=MODEL)
    script.others["First"] = Script(answer="One two three", hold=True, hold_after=2)
    script.others["Second"] = Script(answer="Four five six", hold=True, hold_after=2)
    script.n_at_once = 1
    for text in script.others:
        made.chat_presenter.new_chat()
        made.chat_presenter.send(text)
    qtbot.waitUntil(lambda: running(made)[0].meter.n_tokens == 2)
    yield made
    made.window.running.list.hide()


def rows(found: RunningList) -> list[tuple[str, str]]:
    return [(row.title.accessibleName(), row.stage.text()) for row in found.rows.values()]


def opened(qtbot: QtBot, shell: Shell) -> RunningList:
    """Open the list with a click."""
    qtbot.mouseClick(shell.window.running, Qt.MouseButton.LeftButton)
    found = shell.window.running.list
    assert found.isVisible()
    return found


def test_the_list_says_where_and_how_far(qtbot: QtBot, shell: Shell) -> None:
    chip = shell.window.running
    assert chip.isVisible()
    assert chip.text() == "2 answers running"
    found = opened(qtbot, shell)
    assert rows(found) == [("Go to “First”", "writing"), ("Go to “Second”", "waiting")]
    host_of(shell).send(running(shell)[1].number, PrefillProgress(450, 1000))
    running(shell)[0].tokens_per_s = 12.04
    reading = ("Go to “Second”", "reading the prompt · 45 %")
    qtbot.waitUntil(lambda: rows(found)[1] == reading)
    assert rows(found)[0] == ("Go to “First”", "writing · 12.0 tok/s")
    assert found._heading.text() == "2 answers running"
    shell.client.rate.emit(31.5, 2)
    qtbot.waitUntil(lambda: found._heading.text() == "2 answers running · 31.5 tok/s in total")


def test_a_click_leads_to_the_chat(qtbot: QtBot, shell: Shell) -> None:
    found = opened(qtbot, shell)
    qtbot.keyClicks(shell.window.composer.edit, "a draft")
    second = shell.session.current
    qtbot.mouseClick(next(iter(found.rows.values())).title, Qt.MouseButton.LeftButton)
    assert not found.isVisible()
    assert shown(shell)[0] == "First"
    assert second.draft == "a draft"


def test_each_is_stopped_by_its_button(qtbot: QtBot, shell: Shell, script: Script) -> None:
    """The row disappears; the chip stays while an answer runs in a chat that is not open."""
    found = opened(qtbot, shell)
    first, second = found.rows.values()
    assert first.stop.accessibleName() == "Stop the answer in “First”"
    second.title.setFocus()
    qtbot.mouseClick(first.stop, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: answered(shell) == ["Second"])
    assert list(found.rows.values()) == [second]
    assert not shell.window.running.isVisible(), "the open chat shows its own answer"
    assert not found.isVisible()
    shell.chat_presenter.new_chat()
    assert shell.window.running.isVisible()
    assert shell.window.running.text() == "1 answer running"
    found = opened(qtbot, shell)
    qtbot.mouseClick(second.stop, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert not shell.window.running.isVisible()


def test_the_list_follows_while_it_is_seen_and_rests_after(qtbot: QtBot, shell: Shell) -> None:
    found = opened(qtbot, shell)
    timer = shell.running._timer
    assert timer.isActive()
    qtbot.keyClick(found, Qt.Key.Key_Escape)
    assert not found.isVisible()
    qtbot.waitUntil(lambda: not timer.isActive())


def test_another_title_is_shown(qtbot: QtBot, shell: Shell) -> None:
    chat = shell.session.answers[0].chat
    shell.session.rename(chat.id, "Card <b>0</b> (slow)")
    row = shell.window.running.list.rows[chat.id]
    assert row.title.accessibleName() == "Go to “Card <b>0</b> (slow)”"
    assert row.stop.accessibleName() == "Stop the answer in “Card <b>0</b> (slow)”"


@pytest.mark.parametrize(
    ("width", "text"), [(1200, "3 answers running"), (560, "3 answers running"), (360, "3")]
)
def test_a_narrow_bar_keeps_both_chips(
    qtbot: QtBot, qapp: QApplication, width: int, text: str
) -> None:
    bar, chip = ModelBar(), RunningChip()
    bar.add_chip(chip)
    qtbot.addWidget(bar)
    bar.resize(width, bar.height())
    bar.show()
    graph = Fallback("exchange", ("cuda:0", "cuda:1"), "no graphs")
    bar.show_loaded(model_loaded(LoadParams(MODEL), fallbacks=(graph,)))
    chip.set_texts(("3 answers running", "3 answers", "3"))
    settle()
    assert (bar.slower.isVisible(), chip.isVisible(), chip.text()) == (True, True, text)
    places = [part.geometry() for part in (bar._name, bar.slower, chip, bar._button)]
    for left, right in pairwise(places):
        assert left.right() < right.left()
    assert places[-1].right() < width


def test_many_answers_can_be_scrolled(qtbot: QtBot, make_shell: MakeShell, script: Script) -> None:
    shell = make_shell(model=MODEL)
    script.hold = True
    for n in range(16):
        shell.chat_presenter.new_chat()
        shell.chat_presenter.send(f"Chat {n}")
    found = opened(qtbot, shell)
    bar = found._scroll.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.isVisible() and bar.maximum() > 0)
    widest = max(row.stop.geometry().right() for row in found.rows.values())
    assert widest <= found._scroll.viewport().width(), "no row is clipped"
    found.hide()
