"""Where compiled kernels for GPUs are kept on disk: in Tandem's own cache folder, by version.

Triton finds a kernel there by what it was compiled from and for; what is ours is the folder, which
goes away some time after its version did. A variable TRITON_CACHE_DIR of the user's has precedence.
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

from engine.errors import EngineError
from engine.json_file import cache_folder
from engine.planning.speed.calibration import package_version

log = logging.getLogger(__name__)

VARIABLE = "TRITON_CACHE_DIR"
"""Triton reads it each time it looks for a kernel."""

KERNELS_VARIABLE = "TANDEM_KERNEL_CACHE"
"""Names the folder of all compiled kernels, those for the CPU included."""

UNUSED_S = 14 * 24 * 3600.0
"""A folder of another version is deleted when it was not used for so long."""

NEEDED_BYTES = 64 << 20
"""What must be free: the kernels of a model take some MiB."""

LONGEST_PATH = 110
"""Characters of a folder's path on Windows, where a whole path has at most 260: Triton adds 52 for
a hash, 60 for a name that no other program makes, and the kernel's name."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)

_lock = threading.Lock()
_temporary: list[Path] = []


def use_cache(target: str, triton_version: str) -> Path:
    """Let Triton keep its kernels in our folder from now on.

    Args:
        target: what kernels are compiled for, such as "sm90", of all GPUs together.

    Returns:
        The folder: of the user's choice, ours, or where nothing can be kept a temporary one.

    Raises:
        EngineError: there is no place for files at all.
    """
    with _lock:
        named = os.environ.get(VARIABLE)
        if named:
            return Path(named)
        version = "-".join(filter(None, (package_version(), triton_version)))
        base = _base()
        folder = base and plain_path(base / f"{version}-{target}")
        problem = "there is no folder for it" if folder is None else writing_problem(folder)
        if folder is None or problem:
            log.warning("kernels for GPUs are compiled anew each time: %s", problem)
            folder = _temporary_folder()
        else:
            os.utime(folder)
            prune(folder, version)
        os.environ[VARIABLE] = str(folder)
        return folder


def is_full(error: OSError) -> bool:
    """Whether a folder takes no more files."""
    return error.errno in FULL


def cache_in_use() -> str:
    """Where Triton keeps its kernels now; "" for its own folder."""
    return os.environ.get(VARIABLE, "")


def leave_cache(folder: str, error: OSError) -> None:
    """Keep kernels in a temporary folder from now on, unless it is no more `folder` that is in use.

    Args:
        folder: which takes no more files.

    Raises:
        EngineError: it was a temporary one already, or there is none.
    """
    with _lock:
        if cache_in_use() != folder:
            return  # another thread found out before
        if folder in map(str, _temporary):
            raise _no_place(error) from error
        log.warning("kernels for GPUs are not kept on disk: %s", error)
        os.environ[VARIABLE] = str(_temporary_folder())


def writing_problem(folder: Path) -> str:
    """Why files cannot be written into a folder, which is made; "" if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
        n_free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    return "" if n_free >= NEEDED_BYTES else f"the disk of {folder} is full"


def prune(folder: Path, version: str) -> None:
    """Delete the folders beside `folder` that are of other versions and were not used lately."""
    for other in folder.parent.iterdir():
        if other.name.startswith(f"{version}-") or not other.is_dir():
            continue
        try:
            is_old = time.time() - other.stat().st_mtime > UNUSED_S
        except OSError:
            continue
        if is_old:
            shutil.rmtree(other, ignore_errors=True)


def plain_path(folder: Path) -> Path:
    """The folder under a short name of ASCII letters, where Windows has one and it is needed.

    Compilers of other makers are given paths there, and not all understand others.
    """
    if sys.platform == "win32" and not (str(folder).isascii() and len(str(folder)) <= LONGEST_PATH):
        import ctypes

        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)  # what does not exist has no other name
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
    try:
        folder = Path(tempfile.mkdtemp(prefix="tandem-gpu-"))
    except OSError as error:
        raise _no_place(error) from error
    _temporary.append(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _no_place(error: OSError) -> EngineError:
    return EngineError(
        f"There is no place for compiled kernels, not even a temporary one ({error.strerror}).",
        "Free some space on the disk, or set TANDEM_BACKEND=reference.",
    )
