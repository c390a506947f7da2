"""States of the window without an engine, and with one that is installed, for `main_states`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from PySide6.QtWidgets import QWidget

from app.main import Shell
from app.setup.page.engine_session import InstallRequest
from app.window.engine_setup import EngineSetup
from app.window.parts import if_made
from engine import DeviceInfo, EngineError, leave_pack
from tests.helpers.fake_engine_pack import PackScript, no_own_engine, write_lock
from tests.helpers.screenshots import pause

patches = ExitStack()
"""What states without an engine have changed, until their picture is taken."""


def engine_page(shell: Shell) -> QWidget:
    """Show the first start of a window without an engine, on a machine with a GPU."""
    without_engine(shell)
    _setup(shell).begin("none")
    pause(1500)
    return shell.window


def engine_installing(shell: Shell) -> QWidget:
    """Show an installation that fetches."""
    script = without_engine(shell)
    script.hold_at = 1
    _setup(shell).begin("none")
    pause(1500)
    _setup(shell).page.install(InstallRequest("cuda13"))
    pause(1500)
    return shell.window


def engine_failed(shell: Shell) -> QWidget:
    """Show an installation that has failed."""
    script = without_engine(shell)
    text = "files.pythonhosted.org cannot be reached."
    script.error = EngineError(text, "Check the connection; what has arrived is kept.")
    _setup(shell).begin("none")
    pause(1500)
    _setup(shell).page.install(InstallRequest("cuda13"))
    pause(2500)
    return shell.window


def engine_left(shell: Shell) -> QWidget:
    """Show the window whose page of the engine was left."""
    without_engine(shell)
    _setup(shell).begin("none")
    pause(1500)
    assert _setup(shell).page.view is not None
    _setup(shell).page.view.left.emit()
    pause(500)
    return shell.window


def engine_settings(shell: Shell) -> QWidget:
    """Show the engine in the settings, after another version of Tandem brings a newer one."""
    script = without_engine(shell)
    for backend in ("cpu", "cuda13"):
        _setup(shell).page.install(InstallRequest(backend))
        pause(3000)
    write_lock(script.site.parent / "locks", "cuda13", "2.16.0")
    shell.settings_page.toggle()
    view = shell.settings_page.view
    assert view is not None
    view.search.setText("pytorch")
    pause(2000)
    return shell.window


def _setup(shell: Shell) -> EngineSetup:
    assert if_made(shell, "engine_setup") is not None
    return shell.engine_setup


def without_engine(shell: Shell) -> PackScript:
    """Have a window look as if Tandem had been installed without torch, beside a GPU."""

    def set_attribute(name: str, value: object) -> None:
        patches.enter_context(patch(name, value))

    folder = Path(patches.enter_context(tempfile.TemporaryDirectory()))
    script = no_own_engine(set_attribute, folder, ("cpu", "cuda13"))
    set_attribute("engine.suitable_torch", lambda: ("cuda13", "cpu"))
    gpu = DeviceInfo("cuda:0", "cuda", "NVIDIA GeForce RTX 4090", 24 << 30, 23 << 30, usable=False)
    shell.start_up.devices = (gpu, *shell.start_up.devices)
    patches.callback(script.go_on.set)
    patches.callback(leave_pack)
    return script


ENGINE_STATES: dict[str, Callable[[Shell], QWidget]] = {
    "engine": engine_page,
    "engine-installing": engine_installing,
    "engine-failed": engine_failed,
    "engine-left": engine_left,
    "engine-settings": engine_settings,
}
