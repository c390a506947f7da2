"""Every page of the window comes to rest at every width, without endless layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from PySide6.QtCore import QEvent, QObject
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.core.paths import models_dir
from app.main import Shell
from tests.helpers.shell_driver import MODEL, MakeShell, ask
from tests.helpers.tiny_gguf import tiny_gguf

HEIGHT = 860
LOOKS, TURNS = 100, 30
"""Samples within which a page comes to rest, and turns of the event loop per sample."""
QUIET = 20
"""Maximum number of events in a sample of a page at rest: timers.

Endless layouts cause some in each turn of the event loop.
"""
PAUSE_MS = 5


class _Events(QObject):
    """Counter of the events of all objects of the program."""

    def __init__(self, app: QApplication) -> None:
        super().__init__(app)
        self.counts: Counter[QEvent.Type] = Counter()
        app.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        self.counts[event.type()] += 1
        return False


@pytest.fixture
def events(qapp: QApplication) -> Iterator[_Events]:
    counter = _Events(qapp)
    yield counter
    qapp.removeEventFilter(counter)


def _pages(shell: Shell) -> dict[str, Callable[[], object]]:
    """Return the functions that open each page and panel of the window."""
    window = shell.window

    def front(number: int) -> None:
        if shell.library.tabs is None or not shell.library.tabs.isVisible():
            shell.library.toggle()
        assert shell.library.tabs is not None
        shell.library.tabs.setCurrentIndex(number)

    docks = {
        dock.objectName(): lambda dock=dock: window.show_dock(dock, True)
        for dock in window.right_docks
    }
    return {
        "chat": shell._show_chat,
        "models": lambda: front(0),
        "download": lambda: front(1),
        "settings": shell.settings_page.toggle,
        **docks,
    }


def _comes_to_rest(qtbot: QtBot, app: QApplication, events: _Events) -> bool:
    for _ in range(LOOKS):
        events.counts.clear()
        for _ in range(TURNS):
            app.processEvents()
        if events.counts.total() <= QUIET:
            return True
        qtbot.wait(PAUSE_MS)
    return False


@pytest.mark.parametrize(
    "widths",
    [
        range(905, 2000, 146),
        pytest.param(range(900, 2001), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
    ids=["some widths", "all widths"],
)
def test_pages_come_to_rest(
    widths: range, qtbot: QtBot, qapp: QApplication, make_shell: MakeShell, events: _Events
) -> None:
    models_dir().mkdir(parents=True)
    tiny_gguf(models_dir() / "a-model-with-a-long-name.gguf")
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    restless = []
    for name, show in _pages(shell).items():
        show()
        for width in widths:
            shell.window.resize(width, HEIGHT)
            if not _comes_to_rest(qtbot, qapp, events):
                restless.append(f"{name}, {width}: {events.counts.most_common(4)}")
    assert not restless
