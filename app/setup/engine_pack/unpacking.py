"""Unpacking of wheels into a folder by uv, which checks their hashes once more."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path

from app.core.translation import tr
from app.models.downloads.transfer.part_file import SPARE, NoRoom
from app.setup.engine_pack.children.running import Ended, run_child
from app.setup.engine_pack.lock import Lock
from app.setup.engine_pack.progress import InstallProgress, InstallStage, IsStopped, Told
from app.setup.engine_pack.store import disk_error, folder_bytes
from engine import EngineError, one_line

LIMIT_S = 3600.0
"""Longest time in seconds, for slow disks."""

LOOK_S = 1.0
"""Seconds between two looks at how much is unpacked."""

FULL = re.compile(r"os error (28|112|122)\b")
"""How uv names a full disk or quota; the numbers are the system's."""

PLACES = (Path(__file__).resolve().parents[4] / "bin", Path(sys.executable).parent)
"""Folders that may have uv: that of Tandem's programs, and that of this Python."""


class UvMissing(EngineError):
    """Error of a Tandem without the program that unpacks wheels."""


def find_uv() -> Path:
    """Return the program uv: the one that Tandem brings, else that of the PATH.

    Raises:
        UvMissing: there is none.
    """
    name = "uv.exe" if sys.platform == "win32" else "uv"
    others = (Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)
    for folder in (*PLACES, *others):  # shutil.which would look into the working directory, too
        path = folder / name
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise UvMissing(
        tr("uv, which unpacks the engine, is missing."),
        tr("Install Tandem again."),
    )


def unpack(
    lock: Lock, wheels: Path, site: Path, work: Path, is_stopped: IsStopped, told: Told
) -> None:
    """Install the wheels of a lock from a folder into an empty one.

    Args:
        work: folder on the same disk for what uv needs meanwhile, in the store's.

    Raises:
        Cancelled: `is_stopped`.
        NoRoom: the disk is full.
        EngineError: it fails.
    """
    requirements = work / "requirements.txt"
    try:
        requirements.write_text(_requirements(lock), encoding="utf-8")
    except OSError as error:
        raise disk_error(requirements, error) from None
    unpacked, looked = work / "uv", 0.0  # uv unpacks there, then links the files to their place

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked > LOOK_S:
            n_done = min(folder_bytes(unpacked), lock.unpacked_bytes)
            told(InstallProgress(InstallStage.UNPACKING, n_done, lock.unpacked_bytes))
            looked = time.monotonic()

    command = [
        str(find_uv()), "pip", "install", "--no-config", "--offline", "--no-index", "--no-deps",
        "--no-build", "--require-hashes", "--no-progress", "--color", "never",
        "--cache-dir", str(unpacked), "--find-links", str(wheels), "--target", str(site),
        "--python", sys.executable, "--no-python-downloads", "--link-mode", "hardlink",
        "-r", str(requirements),
    ]  # fmt: skip
    try:
        look()  # a quick uv ends before the first look
        ended = run_child(command, _environment(), LIMIT_S, is_stopped, look)
    except OSError as error:
        raise EngineError(
            tr("uv could not be started: {why}.").format(why=error.strerror or error)
        ) from None
    if ended.status != 0:
        raise _failure(ended, work.parent)


def _requirements(lock: Lock) -> str:
    """Return exactly the wheels of a lock as lines that uv reads."""
    return "".join(
        f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.file.sha256}\n"
        for wheel in lock.wheels
    )


def _environment() -> dict[str, str]:
    """Return this process's environment without what would change uv or the Python that it asks."""
    return {
        name: value for name, value in os.environ.items()
        if not name.startswith(("UV_", "PIP_", "PYTHON", "VIRTUAL_ENV", "CONDA"))
    }  # fmt: skip


def _failure(ended: Ended, folder: Path) -> EngineError:
    """Return the sentence for a failed uv."""
    if ended.status is None:
        return EngineError(
            tr("Unpacking the engine took more than {n} minutes.").format(n=f"{LIMIT_S / 60:g}"),
            tr("Look whether the disk works, then try again."),
        )
    if FULL.search(ended.errors) or shutil.disk_usage(folder).free < SPARE:
        return NoRoom(
            tr("The disk of {folder} became full while the engine was unpacked.").format(
                folder=folder
            ),
            tr("Make room, then go on; what was fetched is kept."),
        )
    why = one_line(ended.last_line, 300).rstrip(".")
    return EngineError(
        tr("The engine could not be unpacked: {why}.").format(
            why=why or tr("status {status}").format(status=ended.status)
        ),
        tr("Try again; what was fetched is kept."),
    )
