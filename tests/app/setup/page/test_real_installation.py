"""The window installs small wheels of a server on this machine, as it would a real pack."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from PySide6.QtWidgets import QFileDialog
from pytestqt.qtbot import QtBot

from app.models.downloads.transfer import transfer
from app.models.downloads.transfer.transfer import Patience
from app.setup.engine_pack import installation
from app.setup.engine_pack.store import PackStore
from engine import leave_pack
from tests.helpers.engine_pages import current_pack, view_of
from tests.helpers.fake_pack import FakePack, fake_attempt, make_pack
from tests.helpers.hostile_server import HostileServer, Mischief, hostile_server
from tests.helpers.shell_driver import MakeShell, banner

QUICK = Patience(tries=2, base_s=0.01, most_s=0.02)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileServer]:
    monkeypatch.setattr(transfer, "POLL_S", 0.01)
    monkeypatch.setattr(installation, "flush_disks", lambda: None)
    with hostile_server() as made:
        yield made


@pytest.fixture
def wheels(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakePack]:
    """Wheels that the server has, for a Tandem that came without torch."""
    pack = make_pack(tmp_path / "made", server.url, n_bytes=3_000_000)
    server.files.update(pack.files())
    monkeypatch.setattr("app.setup.engine_pack.lock.locks_dir", lambda: pack.lock.parent)
    monkeypatch.setattr("app.setup.engine_pack.activation.has_own_engine", lambda: False)
    real = partial(installation.Installation, patience=QUICK, attempt=fake_attempt())
    monkeypatch.setattr(installation, "Installation", real)
    monkeypatch.setattr("engine.suitable_torch", lambda: ("cpu",))
    yield pack
    leave_pack()


def test_a_failure_a_pause_and_an_engine(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer, wheels: FakePack
) -> None:
    server.plan = lambda _: Mischief(status=500)
    shell = make_shell()
    view = view_of(qtbot, shell)
    assert server.asked == [], "nothing is asked before the click"
    view.install.click()
    qtbot.waitUntil(lambda: view.panel.retry.isVisible())
    assert "could not be downloaded: 127.0.0.1 returned error" in view.panel.text
    server.plan = lambda _: Mischief(pause_s=0.01)
    view.panel.retry.click()
    qtbot.waitUntil(lambda: "MB of 3.0 MB" in view.panel.text)
    view.panel.pause.click()
    qtbot.waitUntil(lambda: view.panel.resume.isVisible())
    assert any(PackStore().fetched.iterdir())
    server.plan = lambda _: None
    server.asked.clear()
    with qtbot.waitSignal(shell.client.ready, timeout=20_000):
        view.panel.resume.click()
    assert min(asked.start for asked in server.asked) > 0, "it went on where it stopped"
    assert banner(shell) == "The engine is installed: PyTorch 9.1.0."
    assert (Path(current_pack().folders[0]) / "torch" / "__init__.py").is_file()
    assert not PackStore().fetched.exists()


def test_a_folder_of_wheels_needs_no_network(
    qtbot: QtBot, make_shell: MakeShell, server: HostileServer, wheels: FakePack,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    empty = tmp_path / "empty"
    empty.mkdir()
    folders = [str(empty), str(wheels.wheels)]
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: folders.pop(0))
    shell = make_shell()
    view = view_of(qtbot, shell)
    view.wheels.click()
    qtbot.waitUntil(lambda: view.panel.leave.isVisible())
    assert view.panel.text.startswith(f"{empty} lacks 3 wheels, including torch-9.1.0")
    assert view.panel._hint.text() == "Put all wheels of this engine there.", "it names no commands"
    view.panel.leave.click()
    with qtbot.waitSignal(shell.client.ready, timeout=20_000):
        view.wheels.click()
    assert server.asked == []
