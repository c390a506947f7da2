"""What the window has imported at its first frame and after an answer, and what comes later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.main import Shell
from tests.helpers.fake_host import FakeHost, Script
from tests.helpers.first_picture import Moment, read_moments
from tests.helpers.shell_driver import MODEL, MakeShell

LATE = {
    "torch": "seconds", "numpy": "90 ms", "gguf": "40 ms", "pyqtgraph": "120 ms",
    "tokenizers": "20 ms", "markdown_it": "40 ms", "pygments": "10 ms",
    "importlib.metadata": "25 ms", "multiprocessing": "10 ms",
    "engine.planning.plan": "60 ms",
    "engine.hardware.devices.catalog": "15 ms", "app.cli.talk": "40 ms",
    "asyncio": "60 ms", "starlette": "40 ms", "uvicorn": "40 ms", "app.server.web": "100 ms",
}  # fmt: skip
"""Modules that the first frame does not need, with the cost of importing them."""

MAX_MODULES = 458
"""Maximum number of modules at the first frame: 452, and some for other systems."""


def moments(home: Path, *arguments: str, **variables: str) -> list[Moment]:
    """Run the window in another process; return its moments."""
    command = [sys.executable, "-m", "tests.helpers.first_picture", *arguments]
    env = {**os.environ, "TANDEM_HOME": str(home), **variables}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return read_moments(done.stdout)


def test_the_first_picture_needs_little(home: Path) -> None:
    picture = moments(home, "--picture")[0]
    assert picture.name == "picture"
    early = {name: cost for name, cost in LATE.items() if name in picture.modules}
    assert early == {}
    assert len(picture.modules) <= MAX_MODULES


@pytest.mark.slow
def test_the_window_never_imports_torch(home: Path) -> None:
    """Neither for its start nor for an answer; `process/test_no_torch.py` tests a whole session."""
    found = moments(home)
    assert [moment.name for moment in found] == ["picture", "answer", "end"]
    assert "markdown_it" in found[1].modules, "the answer was shown"
    assert {"torch", "triton"}.isdisjoint(found[-1].modules)


def test_the_engine_starts_after_the_first_picture(
    qapp: QApplication, qtbot: QtBot, script: Script
) -> None:
    seen: list[bool] = []

    def make_host(on_event: object) -> FakeHost:
        seen.append(shell.window._is_painted)
        return FakeHost(on_event, script)  # type: ignore[arg-type]

    shell = Shell(qapp, make_host)
    shell.start()
    assert not shell.start_up.is_ready
    qtbot.waitUntil(lambda: shell.start_up.is_ready)
    assert seen == [True]
    assert shell.split_panel.rows
    shell.window.close()
    shell.window.deleteLater()
    shell.deleteLater()


def test_a_window_that_is_never_painted_goes_on(
    qapp: QApplication, qtbot: QtBot, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minimised one has no frame."""
    shell = Shell(qapp, lambda on_event: FakeHost(on_event, script))
    monkeypatch.setattr(shell.window, "show", shell.window.hide)
    shell.start()
    qtbot.waitUntil(lambda: shell.start_up.is_ready)
    assert not shell.window._is_painted
    shell.window.close()
    shell.window.deleteLater()
    shell.deleteLater()


def test_a_file_opened_before_the_devices_are_known_is_loaded_once_they_are(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    """Otherwise its split would be chosen without them."""
    shell = make_shell()
    shell.models.hold()
    shell.models.open("/models/other.gguf")
    shell.models.open(MODEL)
    assert shell.models.info is None
    shell.models.release()
    qtbot.waitUntil(lambda: shell.client.model is not None)
    assert shell.models.info is not None
    assert shell.models.info.path == MODEL


def test_a_window_closed_at_once_ends(qapp: QApplication, script: Script) -> None:
    shell = Shell(qapp, lambda on_event: FakeHost(on_event, script))
    shell.start()
    shell.window.close()
    assert not shell.start_up.is_ready
    shell.window.deleteLater()
    shell.deleteLater()
