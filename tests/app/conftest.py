"""Fixtures of the app's tests: own files for each one, and no threads or timers left behind."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")  # before Qt is imported
os.environ["LANGUAGE"] = "en"  # of windows that speak the desktop's language

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QSize, QThread, QTimer
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot
from shiboken6 import Shiboken

from app.chat.formulas import formula_cache
from app.chat.views.code_view import lexers
from app.core.process.spare_time import spare_time
from app.devices.monitor.views.monitor_panel import MonitorPanel
from app.main import Shell
from app.widgets.theme import apply_theme
from app.window.keeper import start_language
from engine import DeviceInfo, ModelInfo
from tests.helpers.fake_host import FakeHost, Script, model_info
from tests.helpers.fake_planner import CPU, GPUS, INFO, FakePlanner, fake_machine
from tests.helpers.prepared_templates import wait_for_templates
from tests.helpers.split_panels import WiredPanel, settle

NEVER_MS = 10**9
"""Milliseconds that no test waits."""

LARGE = QSize(1920, 1080)
"""Size of the screen for whose panels there is room."""

ENDING_S = 2.0
"""Seconds that a thread has to end, as one of asyncio's that has told of a program's end."""

MakeShell = Callable[..., Shell]
MakePanel = Callable[..., WiredPanel]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep settings and chats in the test's own folder."""
    folder = tmp_path / "home"
    monkeypatch.setenv("TANDEM_HOME", str(folder))
    return folder


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Put a keyring in memory in place of the system's; return its passwords by name."""
    kept: dict[str, str] = {}
    monkeypatch.setattr("keyring.get_password", lambda _, name: kept.get(name))
    monkeypatch.setattr("keyring.set_password", lambda _, name, word: kept.update({name: word}))
    monkeypatch.setattr("keyring.delete_password", lambda _, name: kept.pop(name))
    return kept


@pytest.fixture(autouse=True)
def no_left_overs() -> Iterator[None]:
    """Fail a test after which a thread lives on or a timer still runs."""
    before, running_before = set(threading.enumerate()), _running()
    yield
    app = QApplication.instance()
    if app is not None:
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    wait_for_templates()
    formula_cache().close()
    lexers().finish()
    spare_time().close()
    threads = [t.name for t in threading.enumerate() if t not in before and not _has_ended(t)]
    assert not threads, f"threads left behind: {threads}"
    left = [name for key, name in _running().items() if key not in running_before]
    assert not left, f"left running: {left}"


def _has_ended(thread: threading.Thread) -> bool:
    """Return whether a thread ends soon; one that has told its result may still be on its way."""
    thread.join(ENDING_S)
    return not thread.is_alive()


def _running() -> dict[int, str]:
    """Return the running timers and Qt threads by their identity."""
    found = {}
    for thing in Shiboken.getAllValidWrappers():
        if isinstance(thing, QThread) and thing is not QThread.currentThread():
            is_running = thing.isRunning()
        else:
            is_running = isinstance(thing, QTimer) and thing.isActive()
        if is_running:
            found[id(thing)] = f"{thing!r} of {thing.parent()!r}"
    return found


@pytest.fixture
def script() -> Script:
    """Return the script of the engine behind this test's shells."""
    return Script()


@pytest.fixture
def make_shell(
    qtbot: QtBot, qapp: QApplication, script: Script, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeShell]:
    """Return a function that starts the application with a scripted engine, or restarts it."""
    monkeypatch.setattr("engine.read_model_info", lambda path: model_info(str(path)))
    monkeypatch.setattr("app.chat.listing.titles.IDLE_MS", NEVER_MS)  # else tests see its requests
    monkeypatch.setattr(
        "app.window.keeper.room_on_screen", lambda _: LARGE
    )  # that of tests is small
    shells: list[Shell] = []

    def make(*, model: str | None = None) -> Shell:
        shell = Shell(qapp, lambda on_event: FakeHost(on_event, script))
        shells.append(shell)
        shell.start()
        qtbot.waitUntil(lambda: shell.start_up.is_ready)
        if model is not None:
            shell.models.open(model)
            qtbot.waitUntil(lambda: shell.client.model is not None)
        return shell

    yield make
    for shell in shells:
        shell.window.close()
        shell.window.deleteLater()
        shell.deleteLater()
    apply_theme(qapp, "dark")
    start_language(qapp, "en")


@pytest.fixture
def make_panel(qtbot: QtBot, qapp: QApplication) -> MakePanel:
    """A split panel on screen, with a model and a planner that cuts at whole eighths."""

    def make(
        devices: list[DeviceInfo] = [*GPUS, CPU],  # noqa: B006 never changed
        planner: type[FakePlanner] = FakePlanner,
        info: ModelInfo | None = INFO,
    ) -> WiredPanel:
        apply_theme(qapp, "dark")
        panel = WiredPanel(planner, fake_machine)
        qtbot.addWidget(panel)
        panel.resize(420, 900)
        panel.session.set_devices(devices)
        if info is not None:
            panel.session.set_model(info)
            panel.session.set_state("ready")
        panel.show()
        settle()
        return panel

    return make


@pytest.fixture
def panel(make_panel: MakePanel) -> WiredPanel:
    """With three GPUs and the CPU."""
    return make_panel()


@pytest.fixture
def monitor(qapp: QApplication, qtbot: QtBot) -> MonitorPanel:
    apply_theme(qapp, "dark")
    panel = MonitorPanel()
    qtbot.addWidget(panel)
    panel.resize(1000, 180)
    panel.show()
    return panel
