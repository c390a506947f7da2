"""GPUs that only torch knows come into the window when torch has answered."""

import threading

import pytest
from pytestqt.qtbot import QtBot

from engine import DeviceInfo
from tests.helpers.fake_planner import CPU, GIB
from tests.helpers.shell_driver import MakeShell

LATE = DeviceInfo("cuda:0", "cuda", "Orin", 30 * GIB, 20 * GIB)


def test_the_window_does_not_wait_for_torch(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def list_devices(*, wait: bool = True) -> list[DeviceInfo]:
        if wait:
            assert threading.current_thread() is not threading.main_thread()
            assert answered.wait(20)
        return [LATE, CPU] if answered.is_set() else [CPU]

    monkeypatch.setattr("engine.list_devices", list_devices)
    shell = make_shell()
    qtbot.waitUntil(lambda: bool(shell.split_panel.rows))
    assert [row.title.text() for row in shell.split_panel.rows] == ["CPU 0"]
    answered.set()
    qtbot.waitUntil(lambda: len(shell.split_panel.rows) == 2)
    assert [row.title.text() for row in shell.split_panel.rows] == ["GPU 0", "CPU 0"]
    assert shell.split.load_params().devices == ("cuda:0",), "as if it had been there at once"
    assert shell.poller.is_running


def test_nobody_looks_for_more_where_a_gpu_is_known(
    make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def list_devices(*, wait: bool = True) -> list[DeviceInfo]:
        asked.append(wait)
        return [LATE, CPU]

    monkeypatch.setattr("engine.list_devices", list_devices)
    make_shell()
    assert asked == [False]
