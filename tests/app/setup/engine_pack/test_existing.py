"""An existing environment is used if this Python can import from it and it answers."""

from __future__ import annotations

import json
import sys
import venv
from pathlib import Path

import pytest

from app.setup.engine_pack import existing
from app.setup.engine_pack.existing import find_python, is_within, use_environment
from app.setup.engine_pack.store import Pack, PackStore
from engine import EngineError
from tests.helpers.fake_pack import adopt_pack, fake_attempt

LIBRARIES = ("torch", "llvmlite", "tokenizers")


@pytest.fixture(autouse=True)
def no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fake libraries have any version."""
    monkeypatch.setattr(existing.metadata, "requires", lambda _: [])


@pytest.fixture
def store(tmp_path: Path) -> PackStore:
    return PackStore(tmp_path / "engines")


def make_environment(folder: Path, names: tuple[str, ...] = LIBRARIES) -> Path:
    """Make a virtual environment with fake libraries; return its folder of libraries."""
    venv.create(folder, symlinks=sys.platform != "win32")
    (site,) = [path for path in folder.rglob("site-packages") if path.is_dir()]
    for name in names:
        (site / name).mkdir()
        body = "N_TOKENS = 1\nVERSION = '9.7.0'\n"
        (site / name / "__init__.py").write_text(body)
        info = site / f"{name}-9.7.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.7.0\n")
    return site


def test_an_environment_is_used_by_its_folder(
    store: PackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    old = adopt_pack(store)
    site = make_environment(tmp_path / "env")
    pack = use_environment(tmp_path / "env", store, attempt=fake_attempt()).pack
    assert (pack.version, pack.backend, pack.is_usable) == ("9.7.0", "environment", True)
    assert pack.folders == (str(site),)
    assert Path(pack.source).parent.parent == tmp_path / "env"
    assert (store.current, store.previous) == (pack, old)
    store.remove()
    assert [path.name for path in (site / "torch").iterdir()] == ["__init__.py"], "it is as before"


def test_an_environment_without_torch_is_refused(store: PackStore, tmp_path: Path) -> None:
    make_environment(tmp_path / "env", ("llvmlite",))
    with pytest.raises(EngineError, match="lacks torch, tokenizers") as caught:
        use_environment(tmp_path / "env", store, attempt=fake_attempt())
    assert "pip install torch tokenizers" in caught.value.hint
    assert store.current is None


def test_an_environment_that_does_not_answer_is_refused(store: PackStore, tmp_path: Path) -> None:
    old = adopt_pack(store)
    make_environment(tmp_path / "env")
    with pytest.raises(EngineError, match="does not work: torch is too old"):
        use_environment(
            tmp_path / "env", store, attempt=fake_attempt("raise SystemExit('torch is too old')")
        )
    assert store.current == old


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for Python")
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"python": "3.9"}, r"is cpython 3\.9, but Tandem needs cpython 3\."),
        ({"kind": "pypy"}, "is pypy 3"),
        ({"is_64_bit": False}, "but Tandem needs"),
        (None, "is not a working Python"),
        ([], "is not a working Python"),
    ],
)
def test_another_python_is_refused(
    store: PackStore, tmp_path: Path, said: object, words: str
) -> None:
    facts = {
        "python": f"3.{sys.version_info.minor}", "kind": "cpython", "is_64_bit": True,
        "folders": [], "versions": dict.fromkeys(LIBRARIES, "1"),
    }  # fmt: skip
    answer = facts | said if isinstance(said, dict) else said
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=words):
        use_environment(python, store, attempt=fake_attempt())
    assert store.current is None


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("2.13.0+cu130", ">=2.11,<3", True),
        ("2.11", ">=2.11,<3", True),
        ("3.0.0", "<3,>=2.11", False),
        ("2.9.1", ">=2.11,<3", False),
        ("0.60.0", "<0.60,>=0.45", False),
        ("unknown", ">=2", True),
        ("2.9.1", "", True),
    ],
)
def test_versions_are_compared_with_the_bounds(version: str, bounds: str, expected: bool) -> None:
    assert is_within(version, bounds) is expected


def test_other_versions_are_refused(
    store: PackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["torch<3,>=2.11", "llvmlite>=0.45,<20", "tokenizers<20,>=1", "numpy<3"]
    monkeypatch.setattr(existing.metadata, "requires", lambda _: lines)
    make_environment(tmp_path / "env")  # with 9.7.0 of all
    with pytest.raises(EngineError, match=r"has torch 9\.7\.0, which") as caught:
        use_environment(tmp_path / "env", store, attempt=fake_attempt())
    assert '"torch<3,>=2.11"' in caught.value.hint


def test_what_is_no_environment_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="There is no Python in"):
        find_python(tmp_path)
    with pytest.raises(EngineError, match="There is no Python in"):
        find_python(tmp_path / "gone")


def test_a_pack_of_an_environment_says_so() -> None:
    assert Pack("n", "environment", "1", "3.11", (), source="/usr/bin/python3").is_environment
