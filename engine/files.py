"""Places for files, and files that are replaced as a whole."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

Kind = Literal["cache", "data"]

WINDOWS: Mapping[Kind, tuple[str, str]] = {
    "cache": ("LOCALAPPDATA", "AppData/Local"), "data": ("APPDATA", "AppData/Roaming"),
}  # fmt: skip
MACOS: Mapping[Kind, tuple[str, str]] = {
    "cache": ("", "Library/Caches"), "data": ("", "Library/Application Support"),
}  # fmt: skip
OTHERS: Mapping[Kind, tuple[str, str]] = {
    "cache": ("XDG_CACHE_HOME", ".cache"), "data": ("XDG_DATA_HOME", ".local/share"),
}  # fmt: skip
"""The variable that names a user's folder, and where it is below the home without that."""


def user_folder(kind: Kind) -> Path | None:
    """Where a system keeps what programs of this user make.

    None if there is no such folder: some containers run as a user without a home.
    """
    known = {"win32": WINDOWS, "darwin": MACOS}.get(sys.platform, OTHERS)
    variable, below_home = known[kind]
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home)
    except RuntimeError:
        return None


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another one once it is whole and on the disk.

    Raises:
        OSError: it cannot be written; the other one is as it was.
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
