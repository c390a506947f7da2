"""All texts fit into a small window, in every language."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QToolButton, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.message import AnswerStats, Message
from app.core import paths
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import languages, tr
from app.main import Shell
from app.server.page.server_panel import state_text
from app.tools.server_store import ToolServer
from app.widgets.buttons import button
from app.widgets.text import label
from app.window.keeper import start_language
from app.window.preferences.settings_view import SettingsPage
from engine import parse_rig
from tests.helpers.clipped import clipped
from tests.helpers.fake_host import FakeHost, Script
from tests.helpers.hollow import hollow_moe
from tests.helpers.main_states import ANSWER, QUESTION, THOUGHT
from tests.helpers.screenshots import RIG, base_settings
from tests.helpers.server_views import server_view

SMALL = 1024, 700
"""Width and height in pixels of the smallest window in which all texts must be readable."""


@pytest.fixture(params=languages(), scope="module")
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def shell(
    language: str, qapp: QApplication, qtbot: QtBot, script: Script, home: Path
) -> Iterator[Shell]:
    """Yield a small window with three simulated GPUs and a mixture of experts."""
    store = SettingsStore(paths.settings_file())
    store.put(replace(Settings(), language=language))
    assert store.save()
    made = Shell(qapp, lambda on_event: FakeHost(on_event, script), parse_rig(RIG))
    made.start()
    made.window.resize(*SMALL)
    made.window.resizeDocks([made.window.split_dock], [SMALL[0]], Qt.Orientation.Horizontal)
    qtbot.waitUntil(lambda: made.start_up.is_ready)
    sizes = {"n_layer": 48, "n_embd": 2048, "n_head": 32, "n_head_kv": 4, "n_ff_exp": 768}
    made.models.open(str(hollow_moe(home / "moe.gguf", **sizes)))
    qtbot.waitUntil(lambda: made.models.info is not None)
    made.split.change(base_settings(made))
    qtbot.waitUntil(lambda: bool(made.split_panel.summary.predicted.text()), timeout=30_000)
    yield made
    made.close()
    made.window.close()
    made.window.deleteLater()
    made.deleteLater()
    start_language(qapp, "en")


def open_groups(panel: QWidget) -> None:
    """Expand a group by clicking its heading."""
    for head in panel.findChildren(QToolButton):
        if head.property("role") == "group":
            head.setChecked(True)


def split(shell: Shell) -> QWidget:
    shell.split_panel.rows[0].more.click()
    open_groups(shell.split_panel)
    return shell.split_panel


def short_of_memory(shell: Shell) -> QWidget:
    settings = base_settings(shell).with_rank_on(0, False).with_split((1, 1))
    shell.split.change(replace(settings, n_ctx=131072))
    return shell.split_panel


def dock(name: str) -> Callable[[Shell], QWidget]:
    def show(shell: Shell) -> QWidget:
        found = shell.window.findChild(QWidget, name)
        assert found is not None
        shell.window.show_dock(found, True)  # type: ignore[arg-type]
        open_groups(found)
        return found

    return show


def page(attribute: str) -> Callable[[Shell], QWidget]:
    def show(shell: Shell) -> QWidget:
        made: SettingsPage = getattr(shell, attribute)
        made.toggle()
        assert made.view is not None
        return made.view

    return show


def downloads(shell: Shell) -> QWidget:
    tabs = shell.library.tabs
    assert tabs is not None
    tabs.setCurrentIndex(1)
    return tabs


def search(shell: Shell) -> QWidget:
    dialog = shell.side_panels.search.dialog
    dialog.open_for(shell.split.tune_devices())
    return dialog


def chat(shell: Shell) -> QWidget:
    """Show an answer with everything: two versions, and a Continue button."""
    stats = AnswerStats("length", 212, 48.3, 0.41, 300)
    made = Conversation()
    question = made.add(Message("user", QUESTION))
    made.add(Message("assistant", "Use a calculator.", stats))
    made.add(Message("assistant", THOUGHT + ANSWER, stats, thought_s=2.1), question.id)
    shell.session.take(made)
    return shell.window


def failure(shell: Shell) -> QWidget:
    text = tr("Something went wrong in the window ({line}).").format(line="ValueError: 3")
    what = tr("This is a bug in Tandem. Your chats are safe; you can continue.")
    shell.window.banner.show_notice(Notice(text, what, "error", tr("Copy details"), lambda: None))
    return shell.window


def shortcuts(shell: Shell) -> QWidget:
    shell.help.show_shortcuts()
    assert shell.help.shortcuts is not None
    return shell.help.shortcuts


def server(shell: Shell) -> QWidget:
    """Show the server page with everything on it."""
    shown = dock("server")(shell)
    shell.keep(replace(shell.settings.current, server_needs_key=True, server_for_pages=True))
    panel = shell.side_panels.server
    panel.access.pages.setText("localhost")
    panel.access.pages.editingFinished.emit()
    panel.show_view(server_view())
    panel.show_state(is_on=True, state=state_text(server_view()), problem="")
    shell.window.server.show_running(True)
    return shown


def tools(shell: Shell) -> QWidget:
    """Show the dialog of tool servers, with one that has failed."""
    shell.tools.put(ToolServer("Files", ("no-such-program", "-y", "server-files")))
    shell.tool_presenter.open()
    assert shell.tool_presenter.dialog is not None
    return shell.tool_presenter.dialog


SCENES: dict[str, Callable[[Shell], QWidget]] = {
    "start": lambda shell: shell.window,
    "chat": chat,
    "failure": failure,
    "split": split,
    "short of memory": short_of_memory,
    "map": dock("map"),
    "links": dock("links"),
    "server": server,
    "sampling": dock("sampling"),
    "settings": page("settings_page"),
    "tools": tools,
    "models": page("library"),
    "downloads": downloads,
    "search": search,
    "shortcuts": shortcuts,
}


def test_all_texts_fit_into_a_small_window(shell: Shell, qtbot: QtBot, language: str) -> None:
    found: list[str] = []
    for name, show in SCENES.items():
        shown = show(shell)
        qtbot.waitUntil(shown.isVisible)
        qtbot.wait(200)  # layouts and plans follow a moment later
        found += [f"{name}: {text}" for text in clipped(shown)]
    assert (shell.window.width(), shell.window.height()) == SMALL
    listed = "".join(f"\n  {text}" for text in dict.fromkeys(found))
    assert not found, f"texts without room in the language “{language}”:{listed}"


def test_a_text_without_room_is_found(qtbot: QtBot) -> None:
    page = QWidget()
    layout = QVBoxLayout(page)
    wide, narrow = label("All of it fits"), label("Much of this is cut off")
    narrow.setFixedWidth(20)
    pressed = button("Much too long")
    pressed.setFixedWidth(30)
    for each in (wide, narrow, pressed):
        layout.addWidget(each)
    qtbot.addWidget(page)
    page.show()
    assert [text.partition(":")[0] for text in clipped(page)] == [
        "PlainLabel “Much of this is cut off”", "QPushButton “Much too long”",
    ]  # fmt: skip
