"""The store names one pack that works, whatever lies in its folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import engine
from app.setup.engine_pack import activation
from app.setup.engine_pack.store import PackBusy, PackStore
from engine import EngineError, process_mark
from tests.helpers.fake_pack import adopt_pack


@pytest.fixture
def store(tmp_path: Path) -> PackStore:
    return PackStore(tmp_path / "engines")


def test_an_empty_store_has_nothing(store: PackStore) -> None:
    assert (store.current, store.previous, store.n_bytes()) == (None, None, 0)
    store.sweep()
    assert not store.folder.exists(), "looking makes no folder"
    with pytest.raises(EngineError, match="no previous engine"):
        store.roll_back()


def test_removing_leaves_nothing(store: PackStore) -> None:
    adopt_pack(store)
    adopt_pack(store, "9.1.0")
    (store.fetched / "x").mkdir(parents=True)
    assert store.n_bytes() > 0
    store.remove()
    assert (store.current, store.previous) == (None, None)
    assert [path.name for path in store.folder.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"current": 7}', '{"current": "../../x-1"}', '{"current": "gone-1"}']
)
def test_a_damaged_pointer_names_no_pack(store: PackStore, text: str) -> None:
    pack = adopt_pack(store)
    (store.folder / "current.json").write_text(text)
    assert store.current is None
    again = adopt_pack(store, "9.1.0")
    assert store.current == again
    assert again.name != pack.name


@pytest.mark.parametrize("text", ["", "{}", '{"folders": 3}', '{"folders": [], "n_bytes": 1}'])
def test_a_damaged_pack_is_none(store: PackStore, text: str) -> None:
    pack = adopt_pack(store)
    (store.folder / pack.name / "pack.json").write_text(text)
    assert store.current is None


def test_a_pack_of_another_python_or_without_its_folder_is_not_usable(store: PackStore) -> None:
    pack = adopt_pack(store)
    manifest = store.folder / pack.name / "pack.json"
    known = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(known | {"python": "3.2"}))
    assert store.current is not None
    assert not store.current.is_usable
    for gone in (str(store.folder / "gone"), "x" * 5000, "a\0b"):
        manifest.write_text(json.dumps(known | {"folders": [gone]}))
        assert not store.current.is_usable


def test_sweeping_keeps_what_is_named_and_what_lives(store: PackStore) -> None:
    pack = adopt_pack(store)
    ended = process_mark().replace(process_mark().split("-")[0], "4194304", 1)
    names = ("cpu-9.5.0-7", f".tandem-a.{ended}.tmp", f".tandem-b.{process_mark()}.tmp", "mine")
    for name in names:
        (store.folder / name).mkdir()
    store.sweep()
    left = {path.name for path in store.folder.iterdir() if path.is_dir()}
    assert left == {pack.name, f".tandem-b.{process_mark()}.tmp", "mine"}


USER = """
import sys, engine
print("ready", flush=True)
sys.stdin.read()
"""
"""Program of a process to which its parent has named a pack."""


def test_a_pack_in_use_stays_until_its_last_process_ends(store: PackStore) -> None:
    """Also under the child of a window that has moved on to another one."""
    first = adopt_pack(store)
    engine.use_pack(first.folders)
    try:
        command = [sys.executable, "-c", USER]
        with subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            engine.use_pack(adopt_pack(store, "9.1.0").folders)
            adopt_pack(store, "9.2.0")
            assert Path(first.folders[0]).is_dir()
            store.sweep()
            assert Path(first.folders[0]).is_dir()
            child.kill()
        store.sweep()
        assert not (store.folder / first.name).exists()
    finally:
        engine.leave_pack()


def test_the_pack_of_another_window_stays_when_all_are_removed(store: PackStore) -> None:
    pack = adopt_pack(store)
    command = [sys.executable, "-c", USER]
    engine.use_pack(pack.folders)
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "ready\n"
        store.remove()
        assert (store.current, Path(pack.folders[0]).is_dir()) == (None, True)
        assert engine.pack_folders() == []
        it.kill()
    store.remove()
    assert not (store.folder / pack.name).exists()


def test_the_lock_ends_with_its_process(store: PackStore) -> None:
    code = (
        "import sys; from pathlib import Path; from app.setup.engine_pack.store import PackStore\n"
        "with PackStore(Path(sys.argv[1])).locked():\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(store.folder)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(PackBusy, match="Another window or command"), store.locked():
            pass
        store.sweep()  # does nothing
        process.kill()
    with store.locked():
        pass


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(EngineError, match="cannot be written"),
        PackStore(tmp_path / "file").locked(),
    ):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="folders of a user are private there")
def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    monkeypatch.setattr(activation, "has_own_engine", lambda: False)
    store = PackStore()
    pack = adopt_pack(store)
    try:
        assert activation.activate() == "pack"
        assert engine.pack_folders() == list(pack.folders)
        store.folder.chmod(0o777)
        assert activation.activate() == "none"
        assert engine.pack_folders() == []
        with pytest.raises(EngineError, match="Other users could change"), store.locked():
            pass
    finally:
        engine.leave_pack()


def test_others_cannot_write_there(store: PackStore) -> None:
    with store.locked():
        assert store.folder.stat().st_mode & 0o077 == 0
