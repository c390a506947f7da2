"""The wheels of a lock are fetched into a folder, resumed, or taken from one; with progress."""

from __future__ import annotations

import hashlib
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
from app.models.downloads.transfer.part_file import SPARE, NoRoom, PartFile, WrongBytes
from app.models.downloads.transfer.source import Source
from app.models.downloads.transfer.transfer import FileTransfer, Patience
from app.setup.engine_pack.children.running import Ended, run_child
from app.setup.engine_pack.lock import Lock, Wheel
from app.setup.engine_pack.store import disk_error, folder_bytes
from engine import Cancelled, EngineError, one_line


class InstallStage(Enum):
    """Stages of an installation, in their order."""

    FETCHING = auto()
    CHECKING = auto()
    UNPACKING = auto()
    TRYING = auto()


@dataclass(frozen=True, slots=True)
class InstallProgress:
    """How far an installation is.

    Attributes:
        stage: what it is doing; `InstallStage.TRYING` has no numbers.
        n_done: bytes of this stage that are done.
        n_bytes: bytes of this stage; 0 where they are unknown.
        name: file that it is busy with, "" for none.
    """

    stage: InstallStage
    n_done: int = 0
    n_bytes: int = 0
    name: str = ""


Told = Callable[[InstallProgress], None]
IsStopped = Callable[[], bool]


HASH_BYTES = 1 << 20
MAGIC = b"PK"
"""Bytes with which a wheel begins, as any archive of its kind."""


class MissingWheels(EngineError):
    """Error of a folder that does not have the wheels of a lock."""


class LackingWheels(MissingWheels):
    """Error of a folder that lacks some wheels altogether."""


class MissingAddresses(EngineError):
    """Error of a lock whose wheels cannot be fetched, only taken from a folder."""


def n_fetched(lock: Lock, folder: Path) -> int:
    """Return how many bytes of a lock's wheels have arrived in a folder."""
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
    lock: Lock, folder: Path, stopped: threading.Event, told: Told, patience: Patience | None = None
) -> None:
    """Fetch the wheels of a lock that a folder lacks; wheels of other locks there are deleted.

    Raises:
        Cancelled: `stopped` was set; what has arrived is kept.
        EngineError: it cannot go on; what has arrived is kept if it is of use.
    """
    _check_addresses(lock)
    _delete_others(lock, folder)
    source = Source("https://files.pythonhosted.org")
    n_before = 0
    try:
        for wheel in sorted(lock.wheels, key=lambda one: one.file.n_bytes):
            _fetch(wheel, folder, source, stopped, _Counter(lock, wheel, n_before, told), patience)
            n_before += wheel.file.n_bytes
    finally:
        source.close()


class _Counter:
    """Callback that reports one wheel's progress as a part of that of all wheels."""

    def __init__(self, lock: Lock, wheel: Wheel, n_before: int, told: Told) -> None:
        self._n_bytes, self._name = lock.n_bytes, wheel.file.name
        self._n_before, self._told = n_before, told

    def __call__(self, n_done: int, is_checking: bool) -> None:
        stage = InstallStage.CHECKING if is_checking else InstallStage.FETCHING
        self._told(InstallProgress(stage, self._n_before + n_done, self._n_bytes, self._name))


def _fetch(
    wheel: Wheel,
    folder: Path,
    source: Source,
    stopped: threading.Event,
    told: _Counter,
    patience: Patience | None,
) -> None:
    """Fetch one wheel, unless it is there."""
    part = PartFile(folder / wheel.file.name, wheel.file, MAGIC)
    if part.path.is_file():
        if part.is_whole_already(stopped.is_set, told):
            return
        part.path.unlink(missing_ok=True)
    try:
        FileTransfer(part, source, stopped, told, patience).run()
    except (Cancelled, NoRoom):
        raise
    except WrongBytes:
        raise WrongBytes(
            tr("{name} is not what Tandem's list of wheels names: its hash differs.").format(
                name=wheel.file.name
            ),
            tr("It was deleted. Try again; if it happens again, another network may help."),
        ) from None
    except EngineError as error:
        raise EngineError(
            tr("{name} could not be fetched: {why}").format(name=wheel.file.name, why=error),
            tr("Go on when the connection is better; what has arrived is kept."),
        ) from None


def _check_addresses(lock: Lock) -> None:
    if not lock.is_complete:
        raise MissingAddresses(
            tr("This engine cannot be fetched: there are no addresses of its wheels."),
            tr("Use a folder that has its wheels."),
        )


def _delete_others(lock: Lock, folder: Path) -> None:
    """Delete what belongs to other locks, so that old versions do not fill the disk."""
    own = {wheel.file.name for wheel in lock.wheels}
    if folder.is_dir():
        for path in folder.iterdir():
            name = path.name.removesuffix(".json").removesuffix(".part")
            if path.is_file() and name not in own:
                path.unlink(missing_ok=True)


def check_folder(lock: Lock, folder: Path, stopped: threading.Event, told: Told) -> None:
    """Check that a folder has all wheels of a lock, with the right hashes.

    Raises:
        Cancelled: `stopped` was set.
        MissingWheels: some are missing, or are other builds than those of the lock.
    """
    missing = [wheel for wheel in lock.wheels if not (folder / wheel.file.name).is_file()]
    if missing:
        raise _missing(missing, folder)
    n_before = 0
    for wheel in lock.wheels:
        if _hash(folder / wheel.file.name, stopped, _Counter(lock, wheel, n_before, told)) != (
            wheel.file.sha256
        ):
            raise MissingWheels(
                tr("{path} is damaged or another build: its hash is not the expected one.").format(
                    path=folder / wheel.file.name
                ),
                tr("Copy it again."),
            )
        n_before += wheel.file.n_bytes


def _missing(missing: Sequence[Wheel], folder: Path) -> MissingWheels:
    """Return the sentence for missing wheels; it names another version that is there."""
    first = missing[0]
    prefix = f"{first.name.replace('-', '_')}-"
    others = sorted(path.name for path in folder.glob("*.whl"))
    found = next((name for name in others if name.lower().startswith(prefix)), None)
    if found is not None:
        return MissingWheels(
            tr("{folder} has {found}, but {wanted} is needed.").format(
                folder=folder, found=one_line(found, 100), wanted=first.file.name
            ),
            tr("Put exactly that file there."),
        )
    names = ", ".join(wheel.file.name for wheel in missing[:3])
    return LackingWheels(
        tr_n(
            "{folder} lacks {n} wheel: {names}.", "{folder} lacks {n} wheels, such as {names}.",
            len(missing), folder=folder, names=names,
        ),
        tr("Put all wheels of this engine there."),
    )  # fmt: skip


def _hash(path: Path, stopped: threading.Event, told: _Counter) -> str:
    """Return the SHA-256 of a file; "" if it cannot be read.

    Raises:
        Cancelled: `stopped` was set.
    """
    found, n_read = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(HASH_BYTES):
                if stopped.is_set():
                    raise Cancelled("The installation")
                found.update(block)
                n_read += len(block)
                told(n_read, True)
    except OSError:
        return ""
    return found.hexdigest()


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
    raise UvMissing(tr("uv, which unpacks the engine, is missing."), tr("Install Tandem again."))


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
