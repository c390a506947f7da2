"""The version of this installation."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

PROJECT_FILE = Path(__file__).parents[2] / "pyproject.toml"


def version() -> str:
    """Return the version of the installed package, or that of the source tree if there is none."""
    try:
        return metadata.version("tandem-llm")
    except metadata.PackageNotFoundError:
        project = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]
        return str(project["version"])
