"""The zoom scales the whole window and is saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from PySide6.QtCore import QPoint, QSize, Qt
from PySide6.QtWidgets import QApplication, QLabel, QWidget
from pytestqt.qtbot import QtBot

from app.chat.views.prose_view import ProseView
from app.core.paths import settings_file
from app.main import Shell
from app.widgets import theme as scale
from app.widgets.buttons import IconButton
from app.widgets.controls import Switch
from app.widgets.layout import Rail
from app.widgets.theme import apply_theme, px
from app.window.keeper import STEPS, next_zoom
from app.window.main_window import SIDEBAR_WIDTH, SPLIT_WIDTH
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask
from tests.helpers.wheel import wheel


@pytest.fixture(autouse=True)
def normal_size(qapp: QApplication) -> Iterator[None]:
    yield
    apply_theme(qapp, "dark", 100)


def press(qtbot: QtBot, shell: Shell, key: Qt.Key, times: int = 1) -> None:
    shell.window.activateWindow()
    qtbot.waitUntil(shell.window.isActiveWindow)
    for _ in range(times):
        qtbot.keyClick(shell.window.composer.edit, key, Qt.KeyboardModifier.ControlModifier)


def sizes(shell: Shell) -> dict[str, float]:
    """Return the sizes in pixels of parts that are painted in different ways."""
    window = shell.window
    rail = window.findChild(Rail)
    icon = rail.findChild(IconButton)
    muted = next(x for x in window.findChildren(QLabel) if x.property("role") == "muted")
    return {
        "application font": QApplication.font().pixelSize(),
        "composer font": window.composer.edit.fontInfo().pixelSize(),
        "style sheet font": muted.fontInfo().pixelSize(),
        "rail icon": icon.iconSize().width(),
        "model bar": window.model_bar.height(),
        "composer": window.composer.edit.height() - 6,
        "switch": shell.split_panel.findChild(Switch).sizeHint().height() - 2,
        "number field": shell.split_panel.options.context.width(),
        "answer font": prose(shell).document().defaultFont().pixelSize(),
    }


def prose(shell: Shell) -> ProseView:
    """Return the text of the last answer."""
    return shell.window.chat_view.shown[-1].findChild(ProseView)


def test_all_parts_grow_alike_and_shrink_back(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    QApplication.processEvents()
    before = sizes(shell)
    press(qtbot, shell, Qt.Key.Key_Plus, 3)
    QApplication.processEvents()
    after = sizes(shell)
    for name, size in before.items():
        assert after[name] / size == pytest.approx(1.5, abs=0.09), name
    press(qtbot, shell, Qt.Key.Key_0)
    QApplication.processEvents()
    assert sizes(shell) == before
    press(qtbot, shell, Qt.Key.Key_Minus, 9)
    assert shell.settings.current.zoom == 70
    assert sizes(shell)["rail icon"] == 14


@pytest.mark.slow
def test_the_zoom_is_kept_over_a_restart_and_looks_the_same(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    press(qtbot, shell, Qt.Key.Key_Plus, 2)
    QApplication.processEvents()
    seen = sizes(shell)
    shell.window.close()
    assert json.loads(settings_file().read_text())["zoom"] == 125
    apply_theme(QApplication.instance(), "dark", 100)
    again = make_shell(model=MODEL)
    assert scale.zoom() == 125
    QApplication.processEvents()
    assert sizes(again) == seen


def test_the_wheel_over_the_chat_zooms_with_ctrl_and_scrolls_without(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    over = shell.window.chat_view.viewport()
    wheel(over, 1)
    assert shell.settings.current.zoom == 100
    wheel(over, 1, Qt.KeyboardModifier.ControlModifier)
    assert shell.settings.current.zoom == 110
    over_text = wheel(prose(shell).viewport(), -1, Qt.KeyboardModifier.ControlModifier)
    assert not over_text.isAccepted()  # so that the desktop's own events reach the chat
    wheel(over, -1, Qt.KeyboardModifier.ControlModifier)
    assert shell.settings.current.zoom == 100


def test_the_window_keeps_its_size_and_hides_panels_without_room(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    window = shell.window
    window.resize(1024, 700)
    QApplication.processEvents()
    press(qtbot, shell, Qt.Key.Key_Plus, 3)
    QApplication.processEvents()
    assert (window.width(), window.height()) == (1024, 700)
    assert window.minimumSizeHint().width() <= 1024
    assert window.chats_dock.isVisible()
    assert not window.split_dock.isVisible()
    outside = [
        type(widget).__name__
        for widget in (window.composer, window.model_bar, window.chat_list.search)
        if widget.mapTo(window, widget.rect().topRight()).x() >= window.width()
    ]
    assert outside == []
    press(qtbot, shell, Qt.Key.Key_0)
    QApplication.processEvents()
    assert window.split_dock.isVisible()
    assert window.chats_dock.isVisible()


@pytest.mark.parametrize("zoom", [100, 150, 175])
def test_messages_are_not_cut_off_at_any_zoom(
    zoom: int, qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    prose, code, table = (
        "Words of a long line. " * 9,
        f"```\n{'x' * 200}\n```",
        "|a|b|\n|-|-|\n|1|2|",
    )
    script.answer = f"{prose}\n\n{code}\n\n{table}"
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "A question with so many words that its bubble takes all the room there is")
    shell.window.resize(1440, 860)
    shell.keep(replace(shell.settings.current, zoom=zoom))
    view = shell.window.chat_view

    def cut_off() -> list[str]:
        QApplication.processEvents()
        parts = [one for one in view.widget().findChildren(QWidget) if one.isVisible()]
        ends = {one: one.mapTo(view.viewport(), QPoint(one.width(), 0)).x() for one in parts}
        return [str(one) for one, end in ends.items() if end > view.viewport().width()]

    qtbot.waitUntil(lambda: not cut_off())
    assert shell.window.chats_dock.isVisible(), "the split panel is hidden before the chats"
    shell.window.resize(shell.window.minimumWidth(), 860)
    qtbot.waitUntil(lambda: not cut_off())


def test_panels_give_way_on_a_small_screen(
    make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is not wider than its screen, whatever is opened."""
    room = QSize(800, 560)
    monkeypatch.setattr("app.window.keeper.room_on_screen", lambda _: room)
    window = make_shell().window
    left, right = window.chats_dock, (window.split_dock, window.sampling_dock)

    def shown() -> list[bool]:
        QApplication.processEvents()
        assert window.width() <= room.width()
        assert window.minimumSizeHint().width() <= room.width()
        return [dock.isVisible() for dock in (left, *right)]

    assert shown() == [True, False, False]
    window.toggle_sampling()
    assert shown() == [True, False, True], "it is narrower than the split panel"
    window.show_dock(window.split_dock, True)
    assert shown() == [False, True, True]


def test_panels_give_way_in_a_window_made_narrow_and_come_back(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    window = make_shell().window
    docks = window.chats_dock, window.split_dock

    def shown_at(width: int, *expected: bool) -> None:
        window.resize(width, 700)
        qtbot.waitUntil(lambda: [dock.isVisible() for dock in docks] == list(expected))
        assert window.width() == width
        assert window.minimumSizeHint().width() <= width

    shown_at(1280, True, True)
    for width in range(1240, 800, -40):  # as with a mouse, step by step
        window.resize(width, 700)
        QApplication.processEvents()
    shown_at(800, True, False)
    shown_at(500, False, False)
    shown_at(800, True, False)
    shown_at(1280, True, True)
    usual = [px(SIDEBAR_WIDTH), px(SPLIT_WIDTH)]
    qtbot.waitUntil(lambda: [dock.width() for dock in docks] == usual)
    window.show_dock(window.chats_dock, False)
    shown_at(700, False, False)
    shown_at(1280, False, True)
    shown_at(700, False, False)
    window.show_dock(window.split_dock, True)
    qtbot.waitUntil(lambda: window.width() > 700)
    assert window.minimumSizeHint().width() <= window.width(), "the screen has room for it"


@pytest.mark.slow
def test_a_panel_that_was_closed_stays_closed(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    shell.window.show_dock(shell.window.chats_dock, False)
    press(qtbot, shell, Qt.Key.Key_Plus, 3)
    press(qtbot, shell, Qt.Key.Key_0)
    assert not shell.window.chats_dock.isVisible()


def test_steps_go_up_and_down_from_any_zoom() -> None:
    assert [next_zoom(step, 1) for step in STEPS] == [*STEPS[1:], STEPS[-1]]
    assert (next_zoom(117, 1), next_zoom(117, -1), next_zoom(117, 0)) == (125, 110, 100)


@pytest.mark.parametrize("stored", [10, 1000, "large", True])
def test_an_impossible_zoom_is_not_used(make_shell: MakeShell, stored: object) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text(json.dumps({"zoom": stored}))
    assert make_shell().settings.current.zoom == 100
