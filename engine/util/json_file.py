"""Reads and writes the engine's own small JSON files, whose loss or damage does no harm."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.util.files import HOME_VARIABLE, atomic_write, read_file, user_folder

MOST_BYTES = 4 << 20
"""Size limit of a file; a larger one is not ours."""


def cache_folder() -> Path | None:
    """Return the folder of measurements; None on a system without a place for them."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home) / "cache"
    base = user_folder("cache")
    return base and base / "tandem"


def read_json(path: Path | None) -> Any:
    """Return the content of a file; None if it is missing or damaged."""
    if path is None:
        return None
    try:
        return json.loads(read_file(path, MOST_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path | None, value: object) -> None:
    """Replace a file atomically; do nothing if it cannot be written."""
    if path is not None:
        with suppress(OSError):
            replace_json(path, value)


def replace_json(path: Path, value: object, *, ensure_ascii: bool = True) -> None:
    """Replace a file atomically, so that a crash leaves the old one.

    Args:
        ensure_ascii: whether to escape all non-ASCII characters, as in `json.dumps`.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=1)
    with atomic_write(path) as file:
        file.write(text.encode(errors="surrogatepass"))
