"""Small files of JSON that the engine keeps for itself: lost or damaged ones do no harm."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.files import replaced, user_folder

HOME_VARIABLE = "TANDEM_HOME"
"""One folder for everything, as in `app.paths`."""

MOST_BYTES = 4 << 20
"""A file that is larger is not one of ours."""


def cache_folder() -> Path | None:
    """Where measurements are kept; None on a system without a place for them."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home) / "cache"
    base = user_folder("cache")
    return base and base / "tandem"


def data_folder() -> Path | None:
    """Where is kept what a person made, the same as Qt's; None on a system without a place."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home)
    base = user_folder("data")
    return base and base / "Tandem"


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
    with replaced(path) as file:
        file.write(json.dumps(value, ensure_ascii=True, indent=1).encode())
