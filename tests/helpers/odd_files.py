"""Things that may lie where a file is expected, and that must not be read to their end."""

import os
import sys
from pathlib import Path

import pytest

ODD_FILES = ("fifo", "device", "sparse", "link to itself")

odd_files = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.skipif(
            sys.platform == "win32" and kind != "sparse", reason="needs POSIX"
        ))
        for kind in ODD_FILES
    ],
)  # fmt: skip
"""Runs a test with each kind."""


def make_odd_file(path: Path, kind: str) -> None:
    """Put something odd at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 30)
    else:
        path.symlink_to(path.name)
