"""The engine's libraries outside Tandem's installation: torch and others in separate folders.

Such a folder comes last on the import path, so that it replaces nothing. Child processes find it
through an environment variable, which `import engine` reads.

Each process that uses a pack keeps a file next to its folder open, and locked if the system has
shared locks. Thus no pack is deleted while a live process uses it, and dead processes lock nothing.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "TANDEM_ENGINE_PACK"
"""Environment variable that lists the folders, separated as in PATH."""

IN_USE = "in-use"
"""Name of the file next to a pack's library folder that processes using the pack keep open."""

_held: dict[str, int] = {}
"""Open files of the packs in use, by library folder."""

LIBRARIES = ("torch", "llvmlite", "tokenizers")
"""Requirements that only the engine imports; a pack contains these and their dependencies."""


def use_pack(folders: Iterable[Path | str]) -> None:
    """Import the engine's libraries from these folders instead of those from an earlier call."""
    leave_pack()
    os.environ[VARIABLE] = os.pathsep.join(str(folder) for folder in folders)
    add_pack()


def leave_pack() -> None:
    """Remove the folders in use from the import path."""
    for folder in pack_folders():
        if folder in sys.path:
            sys.path.remove(folder)
        if (handle := _held.pop(folder, None)) is not None:
            os.close(handle)
    os.environ.pop(VARIABLE, None)
    importlib.invalidate_caches()


def add_pack() -> None:
    """Add the folders in the environment variable to the import path."""
    for folder in pack_folders():
        if folder not in sys.path:
            sys.path.append(folder)
        _hold(folder)
    importlib.invalidate_caches()


def pack_folders() -> list[str]:
    """Return the folders in the environment variable."""
    return [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]


def make_holdable(home: Path) -> None:
    """Create the lock file for the pack in the folder `home`; may raise OSError."""
    (home / IN_USE).touch()


def delete_pack(home: Path) -> bool:
    """Delete the pack in the folder `home` unless it is in use; return whether it was free."""
    with _is_free(home / IN_USE) as is_free:
        if is_free:
            shutil.rmtree(home, ignore_errors=True)
        return is_free


def _hold(folder: str) -> None:
    # older packs have no such file
    path = Path(folder).parent / IN_USE
    if folder in _held or not path.is_file():
        return
    with suppress(OSError):
        _held[folder] = handle = os.open(path, os.O_RDONLY)
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextmanager
def _is_free(path: Path) -> Iterator[bool]:
    # locks an unused pack, as far as the system can
    if sys.platform == "win32":  # an open file cannot be deleted
        try:
            path.unlink(missing_ok=True)
        except OSError:
            yield False
        else:
            yield True
        return
    import fcntl

    try:
        handle = os.open(path, os.O_RDWR)
    except OSError as error:
        yield isinstance(error, FileNotFoundError)
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)
