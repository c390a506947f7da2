"""The engine's libraries where they do not lie beside Tandem: torch and others in folders apart.

Such a folder comes last on the path of imports, so that it replaces nothing. Child processes find
it by an environment variable, which `import engine` reads.

Each process that uses a pack keeps a file beside its folder open, locked where the system can share
a lock. So no pack is deleted under a living process, and a dead one holds nothing.
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
"""Environment variable with the folders, separated as in PATH."""

IN_USE = "in-use"
"""Name of the file beside a pack's folder of libraries that its users keep open."""

_held: dict[str, int] = {}
"""Open files of the packs that this process uses, by the folders of their libraries."""

LIBRARIES = ("torch", "llvmlite", "tokenizers")
"""Requirements that only the engine imports, and that a pack brings with all that they need."""


def use_pack(folders: Iterable[Path | str]) -> None:
    """Import the engine's libraries from some folders, in this process and in later children.

    Folders of an earlier call are left; what was imported from them stays.
    """
    leave_pack()
    os.environ[VARIABLE] = os.pathsep.join(str(folder) for folder in folders)
    add_pack()


def leave_pack() -> None:
    """Import nothing more from the folders in use."""
    for folder in pack_folders():
        if folder in sys.path:
            sys.path.remove(folder)
        if (handle := _held.pop(folder, None)) is not None:
            os.close(handle)
    os.environ.pop(VARIABLE, None)
    importlib.invalidate_caches()


def add_pack() -> None:
    """Add the folders that the environment names to the path of imports."""
    for folder in pack_folders():
        if folder not in sys.path:
            sys.path.append(folder)
        _hold(folder)
    importlib.invalidate_caches()


def pack_folders() -> list[str]:
    """Return the folders that the environment names."""
    return [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]


def make_holdable(home: Path) -> None:
    """Make the file of a pack that its users keep open.

    Args:
        home: folder of the pack, in which its folder of libraries lies.

    Raises:
        OSError: it cannot be written.
    """
    (home / IN_USE).touch()


def delete_pack(home: Path) -> bool:
    """Delete the folder of a pack, unless a living process uses it; return whether it was free.

    What cannot be deleted stays.

    Args:
        home: folder of the pack, in which its folder of libraries lies.
    """
    with _is_free(home / IN_USE) as is_free:
        if is_free:
            shutil.rmtree(home, ignore_errors=True)
        return is_free


def _hold(folder: str) -> None:
    """Keep the file of a pack open while this process uses it; other packs have none."""
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
    """Yield whether nobody uses a pack, and let nobody begin to, as far as the system can."""
    if sys.platform == "win32":  # a file that is open cannot be deleted
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
