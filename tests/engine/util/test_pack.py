"""Libraries in a folder apart are found here and in child processes, behind all others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import engine
from engine.util.pack import LIBRARIES, VARIABLE
from engine.util.programs import child_environment, program_command


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A pack with a module of its own, and one that hides a module of Python."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in ("only_in_pack", "json"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nWHERE = 'pack'\n")
    engine.use_pack([tmp_path])
    yield tmp_path
    engine.leave_pack()


def test_a_pack_comes_last(pack: Path) -> None:
    assert sys.path[-1] == str(pack)
    assert find_spec("only_in_pack") is not None
    spec = find_spec("json")
    assert spec is not None
    assert not (spec.origin or "").startswith(str(pack))


def test_a_child_finds_it(pack: Path) -> None:
    code = "import engine, only_in_pack, json; print(only_in_pack.WHERE, hasattr(json, 'WHERE'))"
    done = subprocess.run(
        [program_command("x")[0], "-P", "-c", code],
        env=child_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "pack False\n"


def test_another_pack_replaces_it(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    engine.use_pack([other])
    assert engine.pack_folders() == [str(other)]
    assert str(pack) not in sys.path
    engine.leave_pack()
    assert str(other) not in sys.path
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("module", LIBRARIES)
def test_a_missing_library_is_an_error_with_a_hint(module: str) -> None:
    code = (
        f"import sys; sys.modules['{module}'] = None\n"
        "import engine\n"
        "try: engine.load_model\n"
        "except engine.EngineMissing as error: print(error, error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=child_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == (
        f"The engine is not installed: {module} is missing. Run: tandem engine install\n"
    )
