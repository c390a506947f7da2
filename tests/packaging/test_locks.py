"""Locks are made of what the engine needs and the window has not; an index can bring some of it."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from making import locks
from making.locks import lock_pack, main, pack_names, read_source, requirements
from making.tree import window_requirements

from app.setup.engine_pack.lock import read_lock, this_python
from tests.helpers.fake_pack import make_pack, write_wheel
from tests.helpers.hostile_server import HostileServer, hostile_server

WANTED = ["torch>=2,<3", "llvmlite", "tokenizers", "hub>=1"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HostileServer]:
    """Two package indexes: /pypi has all, /other a build of torch with a local version."""
    packages = (
        ("pypi", "torch", "2.9.0", ("sympy", "shared")), ("pypi", "torch", "3.0.0", ()),
        ("pypi", "llvmlite", "0.50.0", ()), ("pypi", "tokenizers", "0.23.0", ("hub",)),
        ("pypi", "hub", "1.0.0", ("shared",)), ("pypi", "shared", "1.5.0", ()),
        ("pypi", "sympy", "1.1.0", ()), ("other", "torch", "2.8.0+cpu", ("sympy", "shared")),
    )  # fmt: skip
    with hostile_server() as server:
        pages: dict[str, str] = {}
        for index, name, version, requires in packages:
            path = write_wheel(tmp_path, name, version, {f"{name}/a.py": b"#" * 900}, requires)
            place = f"/files/{path.name.replace('+', '%2B')}"
            server.files[place] = data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            with zipfile.ZipFile(path) as archive:
                (inner,) = [one for one in archive.namelist() if one.endswith("/METADATA")]
                server.files[f"{place}.metadata"] = archive.read(inner)
            key, told = f"/{index}/{name}/", 'data-core-metadata="true"'
            link = f'<a href="{place}#sha256={digest}" {told}>{path.name}</a>'
            pages[key] = pages.get(key, "") + link
        for key, page in pages.items():
            body = f"<html><body>{page}</body></html>".encode()
            server.replies[key] = lambda _, body=body: (200, {"Content-Type": "text/html"}, body)
        yield server


def lock(server: HostileServer, tmp_path: Path, name: str, **changes: object) -> dict[str, str]:
    """Lock a pack from the server's indexes; return the versions by name."""
    source = replace(read_source(name), pypi=f"{server.url}/pypi", **changes)  # type: ignore[arg-type]
    path = tmp_path / "pylock.test.toml"
    path.write_text(lock_pack(source, WANTED, ["hub>=1"]))
    found = read_lock(path)
    assert (found.backend, found.system) == (source.backend, source.system)
    for wheel in found.wheels:
        data = (tmp_path / wheel.file.name).read_bytes()
        assert (wheel.file.n_bytes, wheel.file.sha256) == (
            len(data),
            hashlib.sha256(data).hexdigest(),
        )
    assert found.unpacked_bytes > 900 * len(found.wheels)
    return {wheel.name: wheel.version for wheel in found.wheels}


def test_a_pack_has_what_the_window_has_not(server: HostileServer, tmp_path: Path) -> None:
    found = lock(server, tmp_path, "cuda13-linux-x86_64")
    assert found == {
        "torch": "2.9.0", "llvmlite": "0.50.0", "tokenizers": "0.23.0", "sympy": "1.1.0",
    }  # fmt: skip


def test_an_index_brings_torch_alone(server: HostileServer, tmp_path: Path) -> None:
    found = lock(server, tmp_path, "cpu-linux-x86_64", index=f"{server.url}/other")
    assert found["torch"] == "2.8.0+cpu"
    assert found["sympy"] == "1.1.0"


def test_files_of_an_index_stand_for_it(server: HostileServer, tmp_path: Path) -> None:
    """They are locked under the addresses that it has for them."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    name = next(path.name for path in tmp_path.glob("torch-2.8.0+cpu*.whl"))
    shutil.copy(tmp_path / name, mirror)
    index = "https://download.pytorch.org/whl/cpu"
    found = lock(server, tmp_path, "cpu-linux-x86_64", index=index, mirror=mirror)
    assert found["torch"] == "2.8.0+cpu"
    text = (tmp_path / "pylock.test.toml").read_text()
    assert f"{index}/{name.replace('+', '%2B')}" in text
    assert "file:" not in text


def test_an_index_that_lacks_it_is_told(server: HostileServer, tmp_path: Path) -> None:
    index = f"{server.url}/nothing"
    with pytest.raises(SystemExit, match=r"cuda12-linux-x86_64: (.|\n)*torch was not found"):
        lock(server, tmp_path, "cuda12-linux-x86_64", index=index)


def test_a_folder_of_wheels_is_locked(tmp_path: Path) -> None:
    pack = make_pack(tmp_path)
    out = tmp_path / "pylock.own.toml"
    main(["cpu-linux-x86_64", "--wheels", str(pack.wheels), "--out", str(out)])
    found = read_lock(out)
    known = {wheel.name: wheel.file for wheel in read_lock(pack.lock).wheels}
    assert {wheel.name: wheel.file for wheel in found.wheels} == known
    assert found.python == this_python()
    assert not found.is_complete


def test_the_table_names_what_can_be_locked() -> None:
    for name in pack_names():
        source = read_source(name)
        assert source.index == "" or source.index.startswith("https://download.pytorch.org/whl/")
        assert bool(source.index) == bool(source.packages)
    with pytest.raises(SystemExit, match="has no pack cpu-plan9"):
        read_source("cpu-plan9")


def test_engine_and_window_share_pyproject() -> None:
    window = window_requirements()
    only = {line for line in requirements() if line not in window}
    assert {line.partition(">")[0] for line in only} == {"torch", "llvmlite", "tokenizers"}
    assert set(window) < set(requirements())
    assert len(requirements(["gpu"])) == len(requirements()) + 1


def test_without_uv_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="uv is missing"):
        locks.find_uv()
