"""How Tandem starts programs of its own: modules of the engine, each in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

NO_WINDOW: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)
"""Creation flag that keeps Windows from opening a console window."""


def program_command(module: str) -> tuple[str, ...]:
    """Return the command that runs a module; nothing in the working directory is imported."""
    return sys.executable, "-P", "-m", module


def child_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of such a program: this process's, and where the engine lies.

    Args:
        variables: more variables, which replace those of this process.
    """
    paths = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
    python_path = os.pathsep.join(filter(None, paths))
    return {**os.environ, **(variables or {}), "PYTHONPATH": python_path}
