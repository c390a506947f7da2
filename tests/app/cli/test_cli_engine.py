"""`tandem engine`: what is in use, and how it is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from app.cli import engine as command
from app.cli import output as remedy
from app.cli.output import remedy_here
from app.setup.engine_pack import existing, installation, store
from app.setup.engine_pack.store import PackStore
from tests.helpers.command_line import Run, assert_refused
from tests.helpers.fake_pack import FakePack, adopt_pack, fake_attempt, make_pack


class Bare(NamedTuple):
    """A Tandem without torch, with one pack on offer."""

    pack: FakePack
    store: PackStore


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bare:
    pack = make_pack(tmp_path / "locks", "https://127.0.0.1:9")
    monkeypatch.setattr(store, "find_locks", lambda _: own_locks(pack.lock.parent))
    monkeypatch.setattr(command, "has_own_engine", lambda: False)
    monkeypatch.setattr(import_module("engine"), "suitable_torch", lambda: ("cpu",), raising=False)
    monkeypatch.setattr(installation, "flush_disks", lambda: None)
    for name, module in (("Installation", installation), ("use_environment", existing)):
        monkeypatch.setattr(command, name, quick(getattr(module, name)))
    return Bare(pack, PackStore(tmp_path / "home" / "engines"))


own_locks = store.find_locks


def quick(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function that tries packs by a fake torch."""

    def call(*arguments: object) -> object:
        return function(*arguments, attempt=fake_attempt())

    return call


def test_torch_beside_tandem_needs_no_pack(run: Run) -> None:
    assert run("engine").out.startswith("PyTorch is installed alongside Tandem")
    assert run("engine", "status", "--json").document["own"] is True
    assert_refused(run("engine", "install"), "so engine packs are not used")
    assert_refused(run("engine", "use", "/usr/bin/python3"), "so engine packs are not used")


def test_a_pack_is_offered_installed_and_removed(run: Run, bare: Bare) -> None:
    offered = run("engine").out
    assert offered.startswith("No engine is installed: tandem engine install\n")
    assert offered.splitlines()[-3].split() == [
        "cpu", "CPU", "only", "9.1.0", "302.8", "kB", "300.0", "kB", "recommended",
    ]  # fmt: skip
    done = run("engine", "install", "--wheels", bare.pack.wheels)
    assert done.out == "PyTorch 9.1.0 (CPU only) works and is now in use.\n", done.err
    assert "is in use: " in run("engine").out
    again = run("engine", "install", "--wheels", bare.pack.wheels)
    assert again.out == "PyTorch 9.1.0 (CPU only) is already installed.\n"
    assert run("engine", "remove").out == "The engine was removed.\n"
    assert bare.store.current is None


def test_an_earlier_engine_comes_back(run: Run, bare: Bare) -> None:
    old = adopt_pack(bare.store)
    status = run("engine").out
    assert "PyTorch 9.1.0 is available: tandem engine install" in status
    assert run("engine", "install", "--wheels", bare.pack.wheels).status == 0
    assert "Previous: PyTorch 9.0.0" in run("engine").out
    assert run("engine", "rollback").out == "PyTorch 9.0.0 (CPU only) is back in use.\n"
    document = run("engine", "status", "--json").document
    assert document["current"]["name"] == old.name
    assert document["update"] is True
    assert document["offers"][0]["recommended"] is True


def test_the_wheels_for_another_machine_are_listed(run: Run, bare: Bare) -> None:
    lines = run("engine", "wheels").out.splitlines()
    assert lines[0] == "https://127.0.0.1:9/torch-9.1.0-py3-none-any.whl"
    assert len(lines) == 3


def test_a_lock_of_ones_own_can_be_named(run: Run, bare: Bare, tmp_path: Path) -> None:
    pack = make_pack(tmp_path / "other", version="9.8.0")
    assert run("engine", "wheels", "--lock", pack.lock).out.count(".whl") == 3
    done = run("engine", "install", "--lock", pack.lock, "--wheels", pack.wheels)
    assert "PyTorch 9.8.0" in done.out, done.err


def test_what_cannot_be_done_is_one_line(run: Run, bare: Bare, tmp_path: Path) -> None:
    assert_refused(run("engine", "install", "--backend", "xpu"), "no engine “xpu” for this system")
    assert_refused(run("engine", "install", "--lock", tmp_path / "no"), "cannot be read")
    done = run("engine", "install", "--wheels", tmp_path)
    assert_refused(done, "lacks 3 wheels")
    assert "`tandem engine wheels` lists the wheels." in done.err
    assert_refused(run("engine", "use", tmp_path), "There is no Python in")
    assert_refused(run("engine", "rollback"), "no previous engine")
    with bare.store.locked():
        assert_refused(run("engine", "remove"), "Another window or command")
    assert "TANDEM_ENGINE_PACK" not in os.environ


def test_commands_of_pip_are_for_a_torch_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "pip install --force-reinstall torch"
    assert remedy_here(command) == command
    monkeypatch.setattr(remedy, "has_own_engine", lambda: False)
    assert remedy_here(command) == "tandem engine"
    assert remedy_here("sudo usermod -aG render $USER") == "sudo usermod -aG render $USER"
    assert remedy_here("") == ""
