"""Where the focus goes, and which panels the rail's icons show."""

from collections.abc import Callable

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QDockWidget, QPushButton, QToolButton, QWidget
from pytestqt.qtbot import QtBot

from app.chat.views.answer_view import AnswerView
from app.chat.views.message_view import UserView
from app.main import Shell
from tests.helpers.shell_driver import MODEL, MakeShell, ask


def hide(widget: QWidget) -> None:
    widget.hide()


def disable(widget: QWidget) -> None:
    widget.setEnabled(False)


def hide_around(widget: QWidget) -> None:
    widget.parentWidget().hide()


@pytest.fixture
def shell(qtbot: QtBot, make_shell: MakeShell) -> Shell:
    made = make_shell(model=MODEL)
    made.window.activateWindow()
    qtbot.waitUntil(made.window.isActiveWindow)
    return made


def rail_button(shell: Shell, name: str) -> QToolButton:
    buttons = shell.window._rail.findChildren(QToolButton)
    return next(button for button in buttons if button.accessibleName() == name)


def tab_round(qtbot: QtBot, shell: Shell) -> list[QWidget]:
    """Press Tab until the focus is back in the composer; return the widgets on the way."""
    shell.window.composer.setFocus()
    stops: list[QWidget] = []
    while not stops or stops[-1] is not shell.window.composer.edit:
        assert len(stops) < 200
        qtbot.keyClick(QApplication.focusWidget(), Qt.Key.Key_Tab)
        stops.append(QApplication.focusWidget())
    return stops


@pytest.mark.parametrize("lose", [hide, disable, hide_around])
def test_a_widget_that_goes_away_hands_the_focus_to_the_composer(
    shell: Shell, lose: Callable[[QWidget], None]
) -> None:
    button = shell.split_panel.findChildren(QPushButton)[0]
    button.show()
    button.setEnabled(True)
    button.setFocus()
    assert button.hasFocus()
    lose(button)
    assert shell.window.composer.edit.hasFocus()


def test_after_regenerating_by_key_one_types_the_next_message(qtbot: QtBot, shell: Shell) -> None:
    ask(qtbot, shell, "Hi")
    answer = shell.window.chat_view.shown[-1]
    assert isinstance(answer, AnswerView)
    answer.footer.again.setFocus()
    qtbot.keyClick(answer.footer.again, Qt.Key.Key_Space)
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shell.window.composer.edit.hasFocus()


def test_after_an_edited_message_one_types_the_next_one(qtbot: QtBot, shell: Shell) -> None:
    ask(qtbot, shell, "Hi")
    message = shell.window.chat_view.shown[0]
    assert isinstance(message, UserView)
    message.start_editing()
    assert message._editor is not None
    qtbot.keyClick(message._editor.edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shell.window.composer.edit.hasFocus()


def test_tab_passes_by_panels_behind_others(qtbot: QtBot, shell: Shell) -> None:
    window = shell.window
    window.toggle_dock(window.sampling_dock)  # in front of the split panel
    stops = tab_round(qtbot, shell)
    assert any(window.sampling_dock.isAncestorOf(stop) for stop in stops)
    assert not any(window.split_dock.isAncestorOf(stop) for stop in stops)


def test_a_rail_icon_raises_a_panel_behind_another_and_hides_one_in_front(
    qtbot: QtBot, shell: Shell
) -> None:
    window = shell.window
    split = rail_button(shell, "Split")
    sampling = rail_button(shell, "Sampling and system prompt")
    sampling.click()
    qtbot.waitUntil(lambda: is_seen(window.sampling_dock) and not is_seen(window.split_dock))
    assert (split.isChecked(), sampling.isChecked()) == (False, True)
    split.click()
    qtbot.waitUntil(lambda: is_seen(window.split_dock) and not is_seen(window.sampling_dock))
    assert not window.sampling_dock.isHidden()
    assert (split.isChecked(), sampling.isChecked()) == (True, False)
    split.click()
    qtbot.waitUntil(lambda: window.split_dock.isHidden())
    assert not split.isChecked()


def is_seen(dock: QDockWidget) -> bool:
    return dock.isVisible() and not dock.visibleRegion().isEmpty()
