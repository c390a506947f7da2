"""The window's start, keyboard use, and response times while an answer streams."""

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QAbstractButton, QApplication, QLabel, QScrollArea, QWidget
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.views.chat_view import N_AT_ONCE, N_SHOWN, ChatView
from app.models.current.model_views import ModelBar
from app.widgets.theme import apply_theme
from tests.helpers.fake_host import Script, model_info
from tests.helpers.shell_driver import MODEL, MakeShell
from tests.helpers.stall_watch import StallWatch

STALL_S = 0.25  # the goal is 0.1 s; this is for a busy test machine


def test_whatever_takes_the_focus_has_a_name(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    shell.window.toggle_sampling()
    buddies = {label.buddy() for label in shell.window.findChildren(QLabel)}
    nameless = [
        f"{type(widget).__name__} in {type(widget.parent()).__name__}"
        for widget in shell.window.findChildren(QWidget)
        if widget.focusPolicy() & Qt.FocusPolicy.TabFocus
        and widget.isVisible()
        and not widget.objectName().startswith("qt_")
        and widget.focusProxy() is None
        and widget not in buddies
        and not widget.accessibleName()
        and not (isinstance(widget, QAbstractButton) and widget.text())
        and type(widget) is not QScrollArea  # it only scrolls named widgets
    ]
    assert nameless == []


def test_tab_leads_from_the_composer_round_and_back(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    shell.window.activateWindow()
    qtbot.waitUntil(lambda: shell.window.composer.edit.hasFocus())
    seen: list[QWidget | None] = []
    for _ in range(200):
        qtbot.keyClick(QApplication.focusWidget(), Qt.Key.Key_Tab)
        seen.append(QApplication.focusWidget())
        if seen[-1] is shell.window.composer.edit:
            break
    assert seen[-1] is shell.window.composer.edit
    assert shell.window.chat_list.search in seen


def test_tab_goes_as_the_window_is_read(qtbot: QtBot, make_shell: MakeShell) -> None:
    """Even for widgets created later: a device's row comes before the widgets below it."""
    shell = make_shell(model=MODEL)
    shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    split, window = shell.split_panel, shell.window
    wanted = [
        window.chat_list.search,
        window.chat_list.list,
        shell.window.chat_view.shown[0],
        shell.window.chat_view.shown[1],
        window.composer.edit,
        split.header.mode_button("single"),
        split.rows[0].switch,
        split.options.context,
        split.footer.undo,
    ]
    split.options.context.setValue(1024)
    qtbot.waitUntil(split.footer.undo.isEnabled)
    window.composer.edit.setFocus()
    stops: list[QWidget] = []
    for _ in range(200):
        qtbot.keyClick(QApplication.focusWidget(), Qt.Key.Key_Tab)
        stops.append(QApplication.focusWidget())
        if stops[-1] is window.composer.edit:
            break
    turn = next(i for i, stop in enumerate(stops) if window.chats_dock.isAncestorOf(stop))
    stops = stops[turn:] + stops[:turn]
    places = [
        next((i for i, s in enumerate(stops) if s is widget or widget.isAncestorOf(s)), None)
        for widget in wanted
    ]
    assert None not in places, stops
    assert places == sorted(places)


def test_the_search_is_left_with_esc_and_opens_what_it_found_with_enter(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    for text in ("apples", "pears"):
        shell.chat_presenter.send(text)
        qtbot.waitUntil(lambda: not shell.session.is_busy)
        shell.window.new_chat_requested.emit()
    search = shell.window.chat_list.search
    search.setFocus()
    search.setText("apples")
    qtbot.keyClick(search, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: not shell.session.current.is_empty)
    assert shell.session.current.messages[0].content == "apples"
    qtbot.keyClick(search, Qt.Key.Key_Escape)
    assert not search.text()
    assert shell.window.composer.edit.hasFocus()


def test_a_closed_panel_hands_the_focus_to_the_composer(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    shell.split_panel.cpu_ranks.setFocus()
    shell.window.split_dock.close()
    assert shell.window.composer.edit.hasFocus()


@pytest.mark.parametrize("width", [360, 420, 740])
def test_the_model_bar_cuts_a_long_name_and_nothing_else(
    qtbot: QtBot, qapp: QApplication, width: int
) -> None:
    """During a load, name, progress and button are side by side; the tooltip has the name."""
    apply_theme(qapp, "dark")
    window = QWidget()
    qtbot.addWidget(window)
    bar = ModelBar(window)
    bar.resize(width, bar.height())
    window.show()
    name = "An extraordinarily long model name, instruct, abliterated, v3.2"
    bar.show_loading(model_info(name=name))
    bar.set_progress(1.0)
    QApplication.processEvents()
    assert bar.minimumSizeHint().width() <= width
    assert bar._name.toolTip() == name


def test_the_chat_keeps_its_width_when_the_scroll_bar_shows(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """Messages end where the composer ends, in short chats and in long ones."""
    shell = make_shell(model=MODEL)
    view = shell.window.chat_view
    shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: not shell.session.is_busy and view.isVisible())
    width = view._column.width()
    script.answer = "One line.\n\n" * 60
    shell.chat_presenter.send("More")
    qtbot.waitUntil(lambda: not shell.session.is_busy and view.verticalScrollBar().isVisible())
    QApplication.processEvents()
    assert view._column.width() == width == shell.window.composer.width()


def test_the_window_never_stalls_while_an_answer_streams(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.answer = (
        "Some *words* in a paragraph.\n\n```python\nx = [1, 2]\n```\n\n- item\n" * 8
    ) + ("a long tail " * 60)
    script.pause_s, script.chunk = 0.004, 4
    shell = make_shell(model=MODEL)
    watch = StallWatch(shell)
    qtbot.wait(50)
    watch.restart()
    shell.chat_presenter.send("Go")
    qtbot.waitUntil(lambda: not shell.session.is_busy, timeout=30_000)
    watch.stop()
    assert 0 < watch.worst_s < STALL_S


def long_chat(n_messages: int = 200) -> Conversation:
    chat = Conversation()
    for number in range(n_messages):
        chat.add(Message("user" if number % 2 == 0 else "assistant", f"turn {number}\n\n" * 3))
    return chat


def turns(view: ChatView) -> list[int]:
    """Return the indices of the visible messages, from the top."""
    return [int(shown.message.content.split()[1]) for shown in view.shown]


def test_a_long_chat_opens_with_its_end_and_shows_more_on_demand(qtbot: QtBot) -> None:
    view = ChatView()
    qtbot.addWidget(view)
    view.resize(600, 400)
    view.show()
    chat = long_chat()
    view.show_chat(chat)
    assert turns(view)[-1] == 199
    qtbot.waitUntil(lambda: turns(view) == list(range(170, 200)))
    view.verticalScrollBar().setValue(0)
    qtbot.waitUntil(lambda: turns(view) == list(range(140, 200)))
    chat.tree.remove_branch(151)
    view.show_path()
    assert turns(view) == list(range(140, 150))
    qtbot.waitUntil(lambda: not view._more.is_active)


def test_what_is_seen_stays_while_earlier_turns_are_made(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat opens at its end, and messages added at its top do not move the visible part."""
    monkeypatch.setattr("app.core.process.spare_time.SLICE_S", 0.0)  # one step at a time
    view = ChatView()
    qtbot.addWidget(view)
    view.resize(600, 400)
    view.show()
    view.show_chat(long_chat())
    bar = view.verticalScrollBar()
    qtbot.waitUntil(lambda: len(view.shown) == N_SHOWN and not view._more.is_active)
    assert 0 < bar.value() == bar.maximum()
    first = view.shown[0]
    bar.setValue(5)
    before = first.mapTo(view, first.rect().topLeft()).y()
    seen: list[int] = []
    while len(view.shown) < 2 * N_SHOWN or view._more.is_active:
        QApplication.processEvents()
        seen.append(first.mapTo(view, first.rect().topLeft()).y())
    assert len(seen) >= N_SHOWN
    assert set(seen) == {before}


def test_opening_a_chat_makes_few_turns_at_once(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty long answers take half a second, during which the window would not respond."""
    monkeypatch.setattr("app.chat.views.chat_view.AT_ONCE_S", 0.0)
    monkeypatch.setattr("app.chat.views.chat_view.MAX_AT_ONCE_S", 60.0)
    view = ChatView()
    qtbot.addWidget(view)
    view.resize(600, 2000)
    view.show()
    view.show_chat(long_chat())
    assert turns(view) == list(range(200 - N_AT_ONCE, 200))
    view.show_chat(long_chat(N_AT_ONCE))
    assert turns(view) == list(range(N_AT_ONCE)), "pending steps are dropped"
    assert not view._more.is_active
    view.resize(600, 50)
    view.show_chat(long_chat())
    assert turns(view) == [199], "one that fills the view is enough"


def test_scrolling_up_stops_following_the_answer(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.answer = "line\n\n" * 160
    script.chunk, script.pause_s = 5, 0.004
    shell = make_shell(model=MODEL)
    shell.chat_presenter.send("Go")
    bar = shell.window.chat_view.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() > 0 and bar.value() == bar.maximum())
    qtbot.waitUntil(lambda: len(shell.session.current.messages[-1].content) > 300)
    bar.setValue(10)
    before = bar.maximum()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    qtbot.waitUntil(lambda: bar.maximum() > before)
    assert bar.value() == 10


@pytest.mark.parametrize("n_bytes", [0, 999, 668_000_000, 18_600_000_000])
def test_sizes_are_short(n_bytes: int) -> None:
    from app.core.units import decimal_size

    assert decimal_size(n_bytes) in {"0 B", "999 B", "668.0 MB", "18.6 GB"}
