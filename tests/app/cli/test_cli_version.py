"""`tandem --version`."""

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from app.cli.output import PROJECT_FILE, version
from tests.helpers.command_line import Run


def test_the_version_is_one_line(run: Run) -> None:
    outcome = run("--version")
    assert (outcome.status, outcome.out, outcome.err) == (0, f"tandem {version()}\n", "")


def test_the_installed_command_runs() -> None:
    """It is a script that calls what `pyproject.toml` names, as this does."""
    project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
    module, function = project["scripts"]["tandem"].split(":")
    code = f"import sys; from {module} import {function} as run; sys.exit(run())"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_FILE.parent)}
    for argument, status in (("--version", 0), ("--simulate", 2)):
        found = subprocess.run(
            [sys.executable, "-c", code, argument],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert found.returncode == status, found.stderr
        assert "Traceback" not in found.stderr


def test_it_costs_neither_qt_nor_torch() -> None:
    code = (
        "import sys; sys.modules['PySide6'] = sys.modules['torch'] = None; "
        "from app.__main__ import main; sys.exit(main(['--version']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_FILE.parent)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("tandem ")


def test_a_source_tree_that_is_not_installed_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    project = tomllib.loads(Path(PROJECT_FILE).read_text(encoding="utf-8"))["project"]
    assert version() == project["version"]
