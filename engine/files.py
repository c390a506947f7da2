"""Finds the folders for files, and replaces files atomically."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

Kind = Literal["cache", "config", "data"]

HOME_VARIABLE = "TANDEM_HOME"
"""Environment variable that names one folder for all of Tandem's files: tests, portable use."""

WINDOWS: Mapping[Kind, tuple[str, str]] = {
    "cache": ("LOCALAPPDATA", "AppData/Local"), "config": ("LOCALAPPDATA", "AppData/Local"),
    "data": ("APPDATA", "AppData/Roaming"),
}  # fmt: skip
MACOS: Mapping[Kind, tuple[str, str]] = {
    "cache": ("", "Library/Caches"), "config": ("", "Library/Preferences"),
    "data": ("", "Library/Application Support"),
}  # fmt: skip
OTHERS: Mapping[Kind, tuple[str, str]] = {
    "cache": ("XDG_CACHE_HOME", ".cache"), "config": ("XDG_CONFIG_HOME", ".config"),
    "data": ("XDG_DATA_HOME", ".local/share"),
}  # fmt: skip
"""Environment variable of a user's folder, and its default place below the home folder, by kind:
for Windows, macOS and all other systems."""


def user_folder(kind: Kind) -> Path | None:
    """Return the folder where this system keeps such files of a user's programs.

    None if there is no such folder: some containers run as a user without a home.
    """
    known = {"win32": WINDOWS, "darwin": MACOS}.get(sys.platform, OTHERS)
    variable, below_home = known[kind]
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home)
    except RuntimeError:
        return None


def tandem_folder(kind: Kind) -> Path | None:
    """Return Tandem's own folder, where Qt's `QStandardPaths` puts it, too; it may not exist yet.

    None for a user without a home, unless `TANDEM_HOME` names a folder.
    """
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home)
    base = user_folder(kind)
    if base is None:
        return None
    shares_base = sys.platform == "win32" and kind == "cache"  # with the configuration
    return base / "Tandem" / "cache" if shares_base else base / "Tandem"


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` once it is complete and on the disk.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
