"""The version of this installation."""

from __future__ import annotations

from pathlib import Path

from engine import package_version

PROJECT_FILE = Path(__file__).parents[2] / "pyproject.toml"


def version() -> str:
    """Return the version of the installed package, or that of the source tree if there is none."""
    return package_version() or _source_version()


def _source_version() -> str:
    import tomllib  # late: an installed package does not need it

    project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
    return str(project["version"])
