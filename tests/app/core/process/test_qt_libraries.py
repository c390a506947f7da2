"""A system without the libraries that Qt links against is told which, in one line."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.core.process.environment import DEBIAN_PACKAGES, missing_qt_library

REPO = Path(__file__).resolve().parents[4]
PROBLEM = "libEGL.so.1: cannot open shared object file: No such file or directory"
SENTENCE = "Qt needs the system library libEGL.so.1, which is missing."
HINT = f"Install it with: apt-get install {DEBIAN_PACKAGES}"


@pytest.fixture
def without_egl(tmp_path: Path) -> dict[str, str]:
    """The environment of programs that find a Qt whose libraries are missing, on Debian."""
    package, programs = tmp_path / "PySide6", tmp_path / "bin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("QtCore", "QtGui", "QtWidgets"):
        (package / f"{name}.py").write_text(f"raise ImportError({PROBLEM!r})")
    programs.mkdir()
    (programs / "apt-get").write_text("#!/bin/sh")
    (programs / "apt-get").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}", "PATH": path}


def run(command: Sequence[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=REPO, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_the_window_names_the_library(without_egl: dict[str, str]) -> None:
    found = run(["-m", "app", "--demo"], without_egl)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == f"{SENTENCE} {HINT}\n"


@pytest.mark.parametrize(
    "path", ["tests", "tests/app/core/test_paths.py", "tests/engine/formats/gguf"]
)
def test_so_does_a_run_of_the_tests(without_egl: dict[str, str], path: str) -> None:
    found = run(["-m", "pytest", "-p", "no:cacheprovider", path], without_egl)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == f"{SENTENCE} {HINT}\n"


def test_without_apt_only_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    missing = missing_qt_library(ImportError(PROBLEM))
    assert missing is not None
    assert (str(missing), missing.hint) == (SENTENCE, "")


def test_other_errors_of_an_import_stay_what_they_are() -> None:
    assert missing_qt_library(ImportError("No module named 'PySide6'")) is None


def test_the_packages_are_those_that_ci_installs() -> None:
    assert DEBIAN_PACKAGES in (REPO / ".ci/run").read_text()
