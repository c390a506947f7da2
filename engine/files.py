"""Finds the folders for files, tells who can write there, and replaces files atomically."""

from __future__ import annotations

import os
import stat
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


def make_private(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for this user alone.

    Raises:
        OSError: it cannot be created.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def exposure(folder: Path) -> str:
    """Return how other users could put code into a folder, as a clause; "" if they cannot.

    The folder must belong to this user or to root, who alone may write there, and none of those
    above it may be one in which everybody can replace it. A folder that does not exist yet is not
    exposed, and nor is any on Windows, where a user's folders are private.
    """
    try:
        if why := exposed(folder.stat()):
            return f"{folder} {why}"
        for above in {*folder.absolute().parents, *folder.resolve().parents}:
            mode = above.stat().st_mode
            if sys.platform != "win32" and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"{above}, above {folder}, can be written by everybody"
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"{folder} cannot be checked ({error.strerror})"
    return ""


def exposed(status: os.stat_result) -> str:
    """Return why other users can write to a file or folder, as a predicate; "" if they cannot."""
    if sys.platform == "win32":
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users"
    return ""


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
