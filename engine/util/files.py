"""Tandem's folders and their protection, atomic file replacement, cleanup of temporary files."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from engine.errors import Sentence, reason_of

Kind = Literal["cache", "config", "data"]

HOME_VARIABLE = "TANDEM_HOME"
"""Environment variable for a single folder with all of Tandem's files: tests, portable use."""

PREFIX = ".tandem-"
MARK = re.compile(r"(\d{1,19})-(\d{1,19})-([0-9a-f]{8})")
"""Mark of a process: process id, start time in seconds, mark of the machine."""

TEMPORARY = re.compile(r"\.tandem-[^.]+\.([^.]+)\.tmp")
"""Name of a temporary file, with the mark of the process that created it."""

START_S = 2
"""Tolerance when comparing a process's start times, in seconds."""

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
"""Environment variable for a user's folder, and the default path below the home folder, by kind: on
Windows, macOS and all other systems."""


def user_folder(kind: Kind) -> Path | None:
    """Return the system's folder for a user's files; None if the user has no home folder."""
    known = {"win32": WINDOWS, "darwin": MACOS}.get(sys.platform, OTHERS)
    variable, below_home = known[kind]
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home)
    except RuntimeError:
        return None


def tandem_folder(kind: Kind) -> Path | None:
    """Return Tandem's folder, as Qt's `QStandardPaths` would; None if there is no home folder."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home)
    base = user_folder(kind)
    if base is None:
        return None
    shares_base = sys.platform == "win32" and kind == "cache"  # next to the configuration
    return base / "Tandem" / "cache" if shares_base else base / "Tandem"


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents, all accessible only to this user."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def exposure(folder: Path) -> str:
    """Return how other users could put code into a folder, as a clause; "" if they cannot.

    The folder must belong to this user or root and be writable only by its owner, and no parent may
    allow everybody to replace it. A missing folder is not exposed; neither is any on Windows, where
    a user's folders are private.
    """
    try:
        if why := exposed(folder.stat()):
            return Sentence("{path} {why}", path=str(folder), why=why)
        for above in {*folder.absolute().parents, *folder.resolve().parents}:
            mode = above.stat().st_mode
            if sys.platform != "win32" and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return Sentence(
                    "{path}, above {folder}, is writable by everyone",
                    path=str(above),
                    folder=str(folder),
                )
    except FileNotFoundError:
        pass
    except OSError as error:
        return Sentence(
            "{path} cannot be checked ({problem})", path=str(folder), problem=reason_of(error)
        )
    return ""


def exposed(status: os.stat_result) -> str:
    """Return why other users can write to a file or folder, as a predicate; "" if they cannot."""
    if sys.platform == "win32":
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return Sentence("belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Sentence("is writable by other users")
    return ""


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file, without blocking on anything else, such as a FIFO.

    Raises:
        OSError: the file cannot be read.
        ValueError: the path is not a regular file, or the file is larger than `max_bytes`.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"{path} is larger than {max_bytes} bytes")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)  # files in /proc have no size
    finally:
        os.close(handle)
    if data is None:  # a regular file without data to read yet, such as /proc/kmsg
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
    if len(data) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes} bytes")
    return data


@contextmanager
def atomic_write(path: Path, *, is_durable: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` once it is complete.

    Args:
        is_durable: whether to sync the file to disk first, so that it survives a power cut.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    _sweep_once(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=PREFIX, suffix=_suffix())
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if is_durable and os.name == "posix":  # sync the new name in the folder; other systems and
        with suppress(OSError):  # some file systems cannot
            _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def temporary_folder(base: Path | None) -> Iterator[Path]:
    """Create a folder in `base` or in the system's temporary folder; delete it afterwards."""
    base = base or Path(tempfile.gettempdir())
    _sweep_once(base)
    with tempfile.TemporaryDirectory(
        prefix=PREFIX, suffix=_suffix(), dir=base, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def sweep_temporaries(folder: Path) -> None:
    """Delete temporary files that killed processes left in a folder, but not those of live ones.

    Their names identify the process, its start time and its machine. Those from other machines and
    containers are kept, because processes there are invisible from here.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            name = TEMPORARY.fullmatch(path.name)
            if name and has_ended(name[1]):
                _delete(path)


@cache
def _sweep_once(folder: Path) -> None:
    sweep_temporaries(folder)


def process_mark() -> str:
    """Return a unique mark for this process that is valid in a file name."""
    pid = os.getpid()
    return f"{pid}-{_started(pid)}-{_machine()}"


def has_ended(mark: str) -> bool:
    """Return whether the process with a mark is known to have exited, on this machine."""
    parts = MARK.fullmatch(mark)
    return bool(parts and parts[3] == _machine() and not _is_alive(int(parts[1]), parts[2]))


def _suffix() -> str:
    return f".{process_mark()}.tmp"


@cache
def _started(pid: int) -> int:
    import psutil  # imported late: settings folders are needed before the first frame

    return int(psutil.Process(pid).create_time())


@cache
def _machine() -> str:
    # includes the container, which has its own process ids
    name = platform.node()
    with suppress(OSError):
        name += str(Path("/proc/self/ns/pid").stat().st_ino)
    return f"{zlib.crc32(name.encode()):08x}"


def _is_alive(pid: int, started: str) -> bool:
    import psutil

    try:
        return abs(psutil.Process(pid).create_time() - int(started)) <= START_S
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _delete(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


MAX_BYTES = 4 << 20
"""Size limit for a file; a larger one is not Tandem's."""


def cache_folder() -> Path | None:
    """Return the folder for measurements; None if the system has no place for them."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home) / "cache"
    base = user_folder("cache")
    return base and base / "tandem"


def read_json(path: Path | None) -> Any:
    """Return the content of a JSON file; None if it is missing or damaged."""
    if path is None:
        return None
    try:
        return json.loads(read_file(path, MAX_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path | None, value: object) -> None:
    """Replace a JSON file atomically; do nothing if it cannot be written."""
    if path is not None:
        with suppress(OSError):
            replace_json(path, value)


def replace_json(path: Path, value: object, *, ensure_ascii: bool = True) -> None:
    """Replace a JSON file atomically, so that a crash leaves the old one intact.

    Args:
        ensure_ascii: whether to escape all non-ASCII characters, as in `json.dumps`.

    Raises:
        OSError: the disk is full, or the folder is not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=1)
    with atomic_write(path) as file:
        file.write(text.encode(errors="surrogatepass"))
