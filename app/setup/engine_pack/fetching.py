"""Downloads, verifies and unpacks a lock's wheels."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from app.core.translation import tr, tr_n
from app.models.downloads.transfer.part_file import SPARE, NoRoom, PartFile, WrongBytes, file_hash
from app.models.downloads.transfer.source import Source
from app.models.downloads.transfer.transfer import FileTransfer, Patience
from app.setup.engine_pack.children.running import Ended, run_child
from app.setup.engine_pack.lock import Lock, Wheel
from app.setup.engine_pack.store import disk_error, folder_bytes
from engine import Cancelled, EngineError, one_line


class InstallStage(Enum):
    """Stages of an installation, in order."""

    FETCHING = auto()
    CHECKING = auto()
    UNPACKING = auto()
    TRYING = auto()


@dataclass(frozen=True, slots=True)
class InstallProgress:
    """Progress of an installation.

    Attributes:
        stage: current stage; `InstallStage.TRYING` has no byte counts.
        n_done: bytes completed in this stage.
        n_bytes: total bytes in this stage; 0 if unknown.
        name: current file, or "".
    """

    stage: InstallStage
    n_done: int = 0
    n_bytes: int = 0
    name: str = ""


Report = Callable[[InstallProgress], None]
IsStopped = Callable[[], bool]


MAGIC = b"PK"  # first bytes of a wheel, which is a ZIP archive


class MissingWheels(EngineError):
    """Error raised if a folder does not have the right wheels."""


class LackingWheels(MissingWheels):
    """Error raised if wheels are missing from a folder."""


class MissingAddresses(EngineError):
    """Error raised if a lock has no addresses for its wheels."""


def n_fetched(lock: Lock, folder: Path) -> int:
    """Return how many bytes of a lock's wheels are already downloaded."""
    total = 0
    for wheel in lock.wheels:
        part = PartFile(folder / wheel.file.name, wheel.file, MAGIC)
        if part.path.is_file():
            total += min(part.path.stat().st_size, wheel.file.n_bytes)
        else:
            part.look()
            total += part.n_done
    return total


def fetch_wheels(
    lock: Lock,
    folder: Path,
    stopped: threading.Event,
    report: Report,
    patience: Patience | None = None,
) -> None:
    """Download a lock's missing wheels to a folder and delete other wheels there.

    Raises:
        Cancelled: `stopped` was set; the partial download is kept.
        EngineError: the download failed; the partial file is kept if it is still valid.
    """
    _check_addresses(lock)
    _delete_others(lock, folder)
    source = Source("https://files.pythonhosted.org")
    n_before = 0
    try:
        for wheel in sorted(lock.wheels, key=lambda one: one.file.n_bytes):
            _fetch(
                wheel, folder, source, stopped, _Counter(lock, wheel, n_before, report), patience
            )
            n_before += wheel.file.n_bytes
    finally:
        source.close()


class _Counter:
    """Callback that converts one wheel's progress to progress over all wheels."""

    def __init__(self, lock: Lock, wheel: Wheel, n_before: int, report: Report) -> None:
        self._n_bytes, self._name = lock.n_bytes, wheel.file.name
        self._n_before, self._report = n_before, report

    def __call__(self, n_done: int, is_checking: bool) -> None:
        stage = InstallStage.CHECKING if is_checking else InstallStage.FETCHING
        self._report(InstallProgress(stage, self._n_before + n_done, self._n_bytes, self._name))


def _fetch(
    wheel: Wheel,
    folder: Path,
    source: Source,
    stopped: threading.Event,
    report: _Counter,
    patience: Patience | None,
) -> None:
    part = PartFile(folder / wheel.file.name, wheel.file, MAGIC)
    if part.path.is_file():
        if part.is_verified(stopped.is_set, report):
            return
        part.path.unlink(missing_ok=True)
    try:
        FileTransfer(part, source, stopped, report, patience).run()
    except (Cancelled, NoRoom):
        raise
    except WrongBytes:
        raise WrongBytes(
            tr("{name} is corrupted: its checksum does not match Tandem's list.").format(
                name=wheel.file.name
            ),
            tr("It was deleted. Try again; if it fails again, try another network."),
        ) from None
    except EngineError as error:
        raise EngineError(
            tr("{name} could not be downloaded: {why}").format(name=wheel.file.name, why=error),
            tr("Resume when the connection is better; the partial download is kept."),
        ) from None


def _check_addresses(lock: Lock) -> None:
    if not lock.is_complete:
        raise MissingAddresses(
            tr("This engine cannot be downloaded: its wheels have no addresses."),
            tr("Use a folder that contains its wheels."),
        )


def _delete_others(lock: Lock, folder: Path) -> None:
    own = {wheel.file.name for wheel in lock.wheels}
    if folder.is_dir():
        for path in folder.iterdir():
            name = path.name.removesuffix(".json").removesuffix(".part")
            if path.is_file() and name not in own:
                path.unlink(missing_ok=True)


def check_folder(lock: Lock, folder: Path, stopped: threading.Event, report: Report) -> None:
    """Check that a folder has all of a lock's wheels, with the right hashes.

    Raises:
        Cancelled: `stopped` was set.
        MissingWheels: wheels are missing or have different hashes.
    """
    missing = [wheel for wheel in lock.wheels if not (folder / wheel.file.name).is_file()]
    if missing:
        raise _missing(missing, folder)
    n_before = 0
    for wheel in lock.wheels:
        path, counter = folder / wheel.file.name, _Counter(lock, wheel, n_before, report)
        if _hash(path, stopped, counter) != wheel.file.sha256:
            raise MissingWheels(
                tr(
                    "{path} is corrupted or from another build: its checksum does not match."
                ).format(path=path),
                tr("Copy it again."),
            )
        n_before += wheel.file.n_bytes


def _missing(missing: Sequence[Wheel], folder: Path) -> MissingWheels:
    """Return the error for missing wheels; if the folder has another version, name it."""
    first = missing[0]
    prefix = f"{first.name.replace('-', '_')}-"
    others = sorted(path.name for path in folder.glob("*.whl"))
    found = next((name for name in others if name.lower().startswith(prefix)), None)
    if found is not None:
        return MissingWheels(
            tr("{folder} has {found}, but {wanted} is needed.").format(
                folder=folder, found=one_line(found, 100), wanted=first.file.name
            ),
            tr("Put that exact file there."),
        )
    names = ", ".join(wheel.file.name for wheel in missing[:3])
    return LackingWheels(
        tr_n(
            "{folder} lacks {n} wheel: {names}.", "{folder} lacks {n} wheels, including {names}.",
            len(missing), folder=folder, names=names,
        ),
        tr("Put all wheels of this engine there."),
    )  # fmt: skip


def _hash(path: Path, stopped: threading.Event, report: _Counter) -> str:
    try:
        return file_hash(path, MAGIC, stopped.is_set, lambda n_read: report(n_read, True))
    except OSError:
        return ""


LIMIT_S = 3600.0  # time limit in seconds; allows for slow disks

LOOK_S = 1.0  # seconds between progress reports while unpacking

FULL = re.compile(r"os error (28|112|122)\b")  # uv's message for a full disk or quota

PLACES = (Path(__file__).resolve().parents[4] / "bin", Path(sys.executable).parent)
"""Folders to search for uv: Tandem's program folder and this Python's folder."""


class UvMissing(EngineError):
    """Error raised if Tandem has no uv."""


def find_uv() -> Path:
    """Return the path to uv: the bundled uv if there is one, else uv from the PATH.

    Raises:
        UvMissing: uv was not found.
    """
    name = "uv.exe" if sys.platform == "win32" else "uv"
    others = (Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)
    for folder in (*PLACES, *others):  # not shutil.which: it also searches the working directory
        path = folder / name
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise UvMissing(tr("uv, which unpacks the engine, is missing."), tr("Reinstall Tandem."))


def unpack(
    lock: Lock, wheels: Path, site: Path, work: Path, is_stopped: IsStopped, report: Report
) -> None:
    """Install a lock's wheels from the folder `wheels` into the empty folder `site`.

    Args:
        work: folder in the store for temporary files.

    Raises:
        Cancelled: `is_stopped` returned True.
        NoRoom: the disk is full.
        EngineError: unpacking failed.
    """
    requirements = work / "requirements.txt"
    try:
        requirements.write_text(_requirements(lock), encoding="utf-8")
    except OSError as error:
        raise disk_error(requirements, error) from None
    unpacked, looked = work / "uv", 0.0  # uv unpacks here, then creates hard links

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked > LOOK_S:
            n_done = min(folder_bytes(unpacked), lock.unpacked_bytes)
            report(InstallProgress(InstallStage.UNPACKING, n_done, lock.unpacked_bytes))
            looked = time.monotonic()

    command = [
        str(find_uv()), "pip", "install", "--no-config", "--offline", "--no-index", "--no-deps",
        "--no-build", "--require-hashes", "--no-progress", "--color", "never",
        "--cache-dir", str(unpacked), "--find-links", str(wheels), "--target", str(site),
        "--python", sys.executable, "--no-python-downloads", "--link-mode", "hardlink",
        "-r", str(requirements),
    ]  # fmt: skip
    try:
        look()  # uv may finish before the first poll
        ended = run_child(command, _environment(), LIMIT_S, is_stopped, look)
    except OSError as error:
        raise EngineError(
            tr("uv could not be started: {why}.").format(why=error.strerror or error)
        ) from None
    if ended.status != 0:
        raise _failure(ended, work.parent)


def _requirements(lock: Lock) -> str:
    return "".join(
        f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.file.sha256}\n"
        for wheel in lock.wheels
    )


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items()
        if not name.startswith(("UV_", "PIP_", "PYTHON", "VIRTUAL_ENV", "CONDA"))
    }  # fmt: skip


def _failure(ended: Ended, folder: Path) -> EngineError:
    if ended.status is None:
        return EngineError(
            tr("Unpacking the engine took more than {n} minutes.").format(n=f"{LIMIT_S / 60:g}"),
            tr("Check the disk, then try again."),
        )
    if FULL.search(ended.errors) or shutil.disk_usage(folder).free < SPARE:
        return NoRoom(
            tr("The disk with {folder} filled up while the engine was being unpacked.").format(
                folder=folder
            ),
            tr("Free some space, then resume; the downloaded files are kept."),
        )
    why = one_line(ended.last_line, 300).rstrip(".")
    return EngineError(
        tr("The engine could not be unpacked: {why}.").format(
            why=why or tr("status {status}").format(status=ended.status)
        ),
        tr("Try again; the downloaded files are kept."),
    )
