"""On-disk cache for compiled GPU kernels: one folder per version, in Tandem's cache folder.

Triton keys kernels by source and target. Tandem chooses the folder and deletes other versions'
folders some time after their last use. If the user has set TRITON_CACHE_DIR, it takes precedence.
Triton executes the files there, so a folder that other users can write to is not used.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from engine.errors import EngineError, Sentence, reason_of
from engine.hardware.fallbacks import OF_THIS_PROCESS
from engine.util.files import cache_folder, exposure, make_private, temporary_folder
from engine.util.sanitize import package_version

log = logging.getLogger(__name__)

VARIABLE = "TRITON_CACHE_DIR"  # environment variable that Triton reads at each look-up
KERNELS_VARIABLE = "TANDEM_KERNEL_CACHE"  # the folder for all kernels, including those for the CPU

UNUSED_S = 14 * 24 * 3600.0  # how long another version's folder may be unused before it is deleted
NEEDED_BYTES = 64 << 20  # required free disk space; a model's kernels take a few MiB

MAX_PATH = 110
"""Longest folder path on Windows, in characters. A whole path has at most 260, and Triton adds 52
for a hash, 60 for a unique temporary name, and the kernel's name."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)

_lock = threading.Lock()
_temporary: list[Path] = []
_at_exit = contextlib.ExitStack()
atexit.register(_at_exit.close)


def use_cache(target: str, triton_version: str) -> Path:
    """Make Triton cache its kernels in Tandem's folder from now on.

    Args:
        target: name for all GPUs' targets together, for example "sm90".

    Returns:
        The folder: the user's choice, Tandem's, or a temporary one if nothing can be kept, or if
        other users could have put kernels there.

    Raises:
        EngineError: no file can be written anywhere.
    """
    with _lock:
        named = os.environ.get(VARIABLE)
        if named and not (problem := exposure(Path(named))):
            return Path(named)
        if named:
            return _without(problem)
        version = "-".join(filter(None, (package_version(), triton_version)))
        base = _base()
        folder = base and short_path(base / f"{version}-{target}")
        problem = writing_problem(folder) if folder else Sentence("there is no folder for it")
        if folder is None or problem:
            return _without(problem)
        os.utime(folder)
        prune(folder, version)
        os.environ[VARIABLE] = str(folder)
        return folder


def _without(problem: str) -> Path:
    log.warning("GPU kernels are compiled again at each start: %s", problem)
    OF_THIS_PROCESS.report("compiling", (), problem)
    folder = _temporary_folder()
    os.environ[VARIABLE] = str(folder)
    return folder


def is_full(error: OSError) -> bool:
    """Return whether the error means that a folder cannot hold more files."""
    return error.errno in FULL


def cache_in_use() -> str:
    """Return the folder that Triton uses now; "" for its default."""
    return os.environ.get(VARIABLE, "")


def leave_cache(folder: str, error: OSError) -> None:
    """Switch from `folder`, which is full, to a temporary one; once for all threads.

    Raises:
        EngineError: `folder` is already temporary, or no other can be created.
    """
    with _lock:
        if cache_in_use() != folder:
            return
        if folder in map(str, _temporary):
            raise _no_place(error) from error
        why = reason_of(error)
        _without(
            Sentence("no files can be created in {folder} ({problem})", folder=folder, problem=why)
        )


def writing_problem(folder: Path) -> str:
    """Create a folder; return why this user's kernels cannot be kept there, or ""."""
    try:
        make_private(folder)
        if problem := exposure(folder):
            return problem
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
        n_free = shutil.disk_usage(folder).free
    except OSError as error:
        problem = reason_of(error)
        return Sentence("{folder} is not writable ({problem})", folder=str(folder), problem=problem)
    if n_free < NEEDED_BYTES:
        return Sentence("the disk that contains {folder} is full", folder=str(folder))
    return ""


def prune(folder: Path, version: str) -> None:
    """Delete neighbours of `folder` that belong to other versions and were not used recently."""
    for other in folder.parent.iterdir():
        if other.name.startswith(f"{version}-") or not other.is_dir():
            continue
        try:
            is_old = time.time() - other.stat().st_mtime > UNUSED_S
        except OSError:
            continue
        if is_old:
            shutil.rmtree(other, ignore_errors=True)


def short_path(folder: Path) -> Path:
    """Return a folder's short ASCII path, if Windows has one and it is needed.

    The path is passed to other vendors' compilers, some of which cannot read other paths.
    """
    if sys.platform == "win32" and not (str(folder).isascii() and len(str(folder)) <= MAX_PATH):
        import ctypes

        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)  # only existing paths have a short name
        buffer = ctypes.create_unicode_buffer(1024)
        found = ctypes.windll.kernel32.GetShortPathNameW(str(folder), buffer, len(buffer))
        if 0 < found < len(buffer):
            return Path(buffer.value)
    return folder


def _base() -> Path | None:
    if named := os.environ.get(KERNELS_VARIABLE):
        return Path(named).absolute() / "gpu"
    base = cache_folder()
    return base and base.absolute() / "gpu"


def _temporary_folder() -> Path:
    """Return a new folder that is deleted at exit, or swept later if this process is killed."""
    try:
        folder = _at_exit.enter_context(temporary_folder(None))
    except OSError as error:
        raise _no_place(error) from error
    _temporary.append(folder)
    return folder


def _no_place(error: OSError) -> EngineError:
    return EngineError(
        "There is no folder for compiled kernels, not even a temporary one ({problem}).",
        "Free some disk space, or set TANDEM_BACKEND=reference.",
        problem=reason_of(error),
    )
