"""The progress of loads and downloads in the desktop's taskbar."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys

import pytest
from pytestqt.qtbot import QtBot

from app.core.engine_client import EngineState
from app.window import desktop as taskbar
from app.window.desktop import TaskbarProgress
from tests.helpers.shell_driver import MODEL, MakeShell

SENDER = """
from PySide6.QtCore import QCoreApplication
from PySide6.QtGui import QGuiApplication
from app.window.desktop import unity_painter
app = QCoreApplication([])
QGuiApplication.setDesktopFileName("tandem")
paint = unity_painter()
paint(0.42)
paint(None)
"""


@pytest.fixture
def painted() -> list[float | None]:
    return []


@pytest.fixture
def progress(painted: list[float | None], qtbot: QtBot) -> TaskbarProgress:
    from PySide6.QtCore import QObject

    return TaskbarProgress(lambda: painted.append, QObject())


def test_a_load_is_shown_before_downloads_and_its_end_shows_them_again(
    progress: TaskbarProgress, painted: list[float | None]
) -> None:
    progress.note_downloads(0.25)
    progress.note_state(EngineState.LOADING)
    progress.note_load(0.5)
    progress.note_load(0.501)  # too small a change
    progress.note_downloads(0.3)
    progress.note_state(EngineState.READY)
    progress.note_load(0.9)  # arrived late
    progress.note_downloads(None)
    assert painted == [0.25, 0.5, 0.3, None]


def test_a_load_that_fails_and_the_end_of_the_program_leave_nothing(
    progress: TaskbarProgress, painted: list[float | None]
) -> None:
    progress.note_state(EngineState.LOADING)
    progress.note_load(0.1)
    progress.note_state(EngineState.EMPTY)
    progress.note_downloads(0.9)
    progress.close()
    progress.close()
    assert painted == [0.1, None, 0.9, None]


def test_the_window_shows_its_loads(
    make_shell: MakeShell, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[float | None] = []
    monkeypatch.setattr("app.main.painter_for", lambda window: shown.append)
    shell = make_shell(model=MODEL)
    shell.client.state_changed.emit(EngineState.LOADING)
    shell.client.load_progress.emit(0.5)
    shell.client.state_changed.emit(EngineState.READY)
    assert shown[-2:] == [0.5, None]


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("dbus-run-session"), reason="needs a D-Bus"
)
def test_the_signal_is_as_docks_expect_it() -> None:
    """Its two arguments are the desktop file and a dictionary of a double and a boolean."""
    watch = f"timeout 20 dbus-monitor --session \"interface='{INTERFACE}'\" & sleep 0.5; "
    script = f"{watch} {sys.executable} -c '{SENDER}'; sleep 0.3; kill %1"
    command = ["dbus-run-session", "--", "bash", "-c", script]
    heard = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    words = " ".join(heard.split())
    assert 'member=Update string "application://tandem.desktop"' in words, heard
    assert 'string "progress" variant double 0.42' in words
    assert words.count('string "progress-visible" variant boolean true') == 1
    assert words.count('string "progress-visible" variant boolean false') == 1


INTERFACE = "com.canonical.Unity.LauncherEntry"


def test_the_methods_of_windows_are_called_by_their_places() -> None:
    """A table of functions simulates the interface, with its memory layout."""
    called: list[tuple[object, ...]] = []
    types = {
        taskbar.INIT: (),
        taskbar.SET_VALUE: (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_ulonglong),
        taskbar.SET_STATE: (ctypes.c_void_p, ctypes.c_int),
    }
    kept = []
    table = (ctypes.c_void_p * 11)()
    for place, arguments in types.items():

        def note(this: int, *given: object, place: int = place) -> int:
            called.append((place, *given))
            return 0

        made = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, *arguments)(note)
        kept.append(made)
        table[place] = ctypes.cast(made, ctypes.c_void_p).value
    pointer = ctypes.c_void_p(ctypes.addressof(table))
    paint = taskbar.interface_painter(ctypes.addressof(pointer), 77, ctypes.CFUNCTYPE)
    paint(0.42)
    paint(None)
    shown, taken_away = (taskbar.SET_VALUE, 77, 42, 100), (taskbar.SET_STATE, 77, 0)
    assert called == [(taskbar.INIT,), shown, taken_away]
