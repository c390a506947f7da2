"""Small files of JSON that the engine keeps for itself: lost or damaged ones do no harm."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

HOME_VARIABLE = "TANDEM_HOME"
"""One folder for everything, as in `app.paths`."""

MOST_BYTES = 4 << 20
"""A file that is larger is not one of ours."""


def cache_folder() -> Path | None:
    """Where measurements are kept; None on a system without a place for them."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home) / "cache"
    variable, below_home = {
        "win32": ("LOCALAPPDATA", "AppData/Local"),
        "darwin": ("", "Library/Caches"),
    }.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home) / "tandem"
    except RuntimeError:  # a user without a home, as in some containers
        return None


def data_folder() -> Path | None:
    """Where is kept what a person made, the same as Qt's; None on a system without a place."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home)
    variable, below_home = {
        "win32": ("APPDATA", "AppData/Roaming"),
        "darwin": ("", "Library/Application Support"),
    }.get(sys.platform, ("XDG_DATA_HOME", ".local/share"))
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home) / "Tandem"
    except RuntimeError:
        return None


def read_json(path: Path | None) -> Any:
    """What is in a file; None if there is none, or it is damaged."""
    if path is None:
        return None
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path | None, value: object) -> None:
    """Replace a file as a whole or not at all; what cannot be written is forgotten."""
    if path is not None:
        with suppress(OSError):
            write_json_strictly(path, value)


def write_json_strictly(path: Path, value: object) -> None:
    """Replace a file as a whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=True, indent=1)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
