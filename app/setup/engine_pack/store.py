"""The folder of the engine packs.

    engines/
      current.json            names of the current and the previous pack; replaced atomically
      cuda13-2.15.0-4/        a pack: pack.json, site/ with the unpacked wheels, and in-use,
                              which is open in the processes that use it
      environment-5/          an existing Python environment: only pack.json
      fetched/                complete and partial downloads of wheels
      .tandem-….tmp/          a pack being installed
      lock                    held during changes

`current.json` only ever names complete packs that were tested.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import engine
from app.core.paths import engines_dir
from app.core.translation import tr, tr_later
from app.setup.engine_pack.lock import Lock, find_locks, this_python
from engine import (
    EngineError,
    delete_pack,
    exposure,
    leave_pack,
    make_holdable,
    make_private,
    read_file,
    replace_json,
    sweep_temporaries,
)

POINTER = "current.json"
MANIFEST = "pack.json"
SITE = "site"
FETCHED = "fetched"
LOCK = "lock"
MAX_BYTES = 1 << 20
IS_WINDOWS = os.name == "nt"
TEXTS = ("backend", "version", "python", "digest", "source")  # strings in a pack's manifest

MOVE_TRIES = 10
MOVE_PAUSE_S = 0.3
"""Retries of moving a folder, as virus scanners briefly hold new files open."""


class PackBusy(EngineError):
    """Error while another window or command is changing the engine."""


@dataclass(frozen=True, slots=True)
class Pack:
    """An engine pack.

    Attributes:
        name: name of its folder in the store.
        backend: kind of PyTorch, such as "cpu", or "environment".
        version: version of PyTorch.
        python: version of Python, such as "3.11".
        folders: folders to import from.
        digest: digest of its lock; "" for an environment.
        n_bytes: size on the disk; 0 for an environment.
        source: Python executable of an environment, else "".
    """

    name: str
    backend: str
    version: str
    python: str
    folders: tuple[str, ...]
    digest: str = ""
    n_bytes: int = 0
    source: str = ""

    @property
    def is_environment(self) -> bool:
        """Whether the pack is an existing Python environment."""
        return bool(self.source)

    @property
    def is_usable(self) -> bool:
        """Whether its folders exist and are for this version of Python."""
        if self.python != this_python():
            return False
        try:
            return all(Path(one).is_dir() for one in self.folders)
        except (OSError, ValueError):  # too long, or with a null character
            return False


class PackStore:
    """The packs in a folder, by default `paths.engines_dir()`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or engines_dir()

    @property
    def is_private(self) -> bool:
        """Whether no other user can write to its packs."""
        return not exposure(self.folder)

    @property
    def fetched(self) -> Path:
        """Folder of downloaded wheels."""
        return self.folder / FETCHED

    @property
    def current(self) -> Pack | None:
        """Current pack, if any; see `Pack.is_usable`."""
        return self._read(self._names()[0])

    @property
    def previous(self) -> Pack | None:
        """Pack before the current one, if any."""
        return self._read(self._names()[1])

    def n_bytes(self) -> int:
        """Return the size of all packs and wheels on the disk; slow."""
        return folder_bytes(self.folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder; the end of the process releases it, too.

        Raises:
            PackBusy: it is locked.
            EngineError: the folder cannot be written.
        """
        try:
            make_private(self.folder)
            handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise disk_error(self.folder, error) from None
        try:
            if why := exposure(self.folder):
                raise EngineError(
                    tr("Other users could change the engine: {why}.").format(why=why),
                    tr("Make the folder private, or set TANDEM_HOME to another one."),
                )
            if not _try_to_lock(handle):
                raise PackBusy(
                    tr("Another window or command is changing the engine."),
                    tr("Wait until it has finished."),
                )
            yield
        finally:
            os.close(handle)

    def adopt(self, made: Path, pack: Pack) -> Pack:
        """Move a complete pack into the store and use it; call it with the lock held.

        Args:
            made: its folder, on the same disk.
            pack: its manifest; `name` and relative folders are completed.

        Raises:
            EngineError: the folder cannot be written; nothing has changed.
        """
        number = 1 + max((_number(path.name) for path in self.folder.iterdir()), default=0)
        name = f"{pack.backend}-{pack.version}-{number}"
        home = self.folder / name
        folders = tuple(str(home / folder) for folder in pack.folders)  # absolute ones stay
        pack = replace(pack, name=name, folders=folders)
        old = self.current
        try:
            make_holdable(made)
            replace_json(made / MANIFEST, asdict(pack))
            _move(made, home)
            self._point(name, old.name if old else "")
        except OSError as error:
            shutil.rmtree(home, ignore_errors=True)
            raise disk_error(self.folder, error) from None
        self.sweep_left_over()
        return pack

    def roll_back(self) -> Pack:
        """Swap the current and the previous pack.

        Raises:
            EngineError: there is none, or the folder cannot be written.
        """
        with self.locked():
            current, previous = self._names()
            pack = self._read(previous)
            if pack is None or not pack.is_usable:
                raise EngineError(tr("There is no previous engine."))
            try:
                self._point(previous, current)
            except OSError as error:
                raise disk_error(self.folder, error) from None
            return pack

    def remove(self) -> None:
        """Delete all packs and wheels, but not environments, and use none from now on.

        Packs in use by other processes are deleted by a later sweep.

        Raises:
            EngineError: something cannot be deleted.
        """
        with self.locked():
            try:
                (self.folder / POINTER).unlink(missing_ok=True)
            except OSError as error:
                raise disk_error(self.folder, error) from None
            leave_pack()
            self.sweep_left_over()
            shutil.rmtree(self.fetched, ignore_errors=True)

    def discard_fetched(self) -> None:
        """Delete the downloaded wheels.

        Raises:
            PackBusy: they are being downloaded.
        """
        with self.locked():
            shutil.rmtree(self.fetched, ignore_errors=True)

    def sweep(self) -> None:
        """Delete remains of killed installations unless one is running."""
        if self.folder.is_dir():
            with suppress(EngineError), self.locked():
                self.sweep_left_over()

    def sweep_left_over(self) -> None:
        """Delete all packs except the current, the previous and those in use by processes.

        Call it with the lock held.
        """
        sweep_temporaries(self.folder)
        kept = self._names()
        for path in self.folder.iterdir():
            if path.is_dir() and _number(path.name) and path.name not in kept:
                delete_pack(path)

    def _names(self) -> tuple[str, str]:
        """Return the names of the current and previous pack, or ""."""
        pointer = _read_json(self.folder / POINTER)
        names = (str(pointer.get(key) or "") for key in ("current", "previous"))
        current, previous = (name if _number(name) else "" for name in names)
        return current, previous

    def _point(self, current: str, previous: str) -> None:
        replace_json(self.folder / POINTER, {"current": current, "previous": previous})

    def _read(self, name: str) -> Pack | None:
        found = _read_json(self.folder / name / MANIFEST) if name else {}
        is_whole = (
            isinstance(found.get("folders"), list)
            and isinstance(found.get("n_bytes"), int)
            and all(isinstance(found.get(key), str) for key in TEXTS)
        )
        if not is_whole:
            return None
        folders = tuple(map(str, found["folders"]))
        texts: dict[str, Any] = {key: found[key] for key in TEXTS}
        return Pack(name=name, folders=folders, n_bytes=found["n_bytes"], **texts)


def folder_bytes(folder: Path) -> int:
    """Return the size of the files in a folder and its subfolders; unreadable ones count 0."""
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    total += folder_bytes(Path(entry.path))
                else:
                    total += entry.stat(follow_symlinks=False).st_size
    return total


def disk_error(path: Path, error: OSError) -> EngineError:
    """Return an error of the disk as `EngineError`."""
    return EngineError(
        tr("{path} cannot be written: {why}.").format(path=path, why=error.strerror or error),
        tr("Check its permissions and the free disk space."),
    )


def _number(name: str) -> int:
    """Return the number at the end of a pack's name, or 0 if the name is invalid."""
    backend, _, number = name.rpartition("-")
    is_name = bool(backend) and not name.startswith(".") and "/" not in name and "\\" not in name
    return int(number) if is_name and number.isdecimal() and len(number) < 10 else 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_file(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _move(source: Path, target: Path) -> None:
    for left in range(MOVE_TRIES, -1, -1):
        try:
            source.rename(target)
            return
        except PermissionError:
            if not left or not IS_WINDOWS:
                raise
            time.sleep(MOVE_PAUSE_S)


def _try_to_lock(handle: int) -> bool:
    module: Any = import_module("msvcrt" if IS_WINDOWS else "fcntl")
    try:
        if IS_WINDOWS:
            module.locking(handle, module.LK_NBLCK, 1)
        else:
            module.flock(handle, module.LOCK_EX | module.LOCK_NB)
    except OSError:
        return False
    return True


TITLES = {
    "cpu": tr_later("CPU only"),
    "cuda13": tr_later("NVIDIA GPUs (CUDA 13)"),
    "cuda12": tr_later("NVIDIA GPUs (CUDA 12)"),
    "rocm": tr_later("AMD GPUs (ROCm)"),
    "environment": tr_later("an existing environment"),
}
"""Names of the kinds of PyTorch."""


@dataclass(frozen=True, slots=True)
class PackOffer:
    """A pack that can be installed here."""

    lock: Lock
    is_recommended: bool  # the best offer for this machine
    uses_gpus: bool  # whether it can use GPUs of this machine

    @property
    def backend(self) -> str:
        """Kind of PyTorch, such as "cpu"."""
        return self.lock.backend

    @property
    def title(self) -> str:
        """Name of the kind of PyTorch."""
        return title_of(self.lock.backend)


def title_of(backend: str) -> str:
    """Return the name of a kind of PyTorch in the window's language."""
    return tr(TITLES[backend]) if backend in TITLES else backend


def find_offers(folder: Path | None = None) -> tuple[PackOffer, ...]:
    """Return the packs that can be installed here, best first; queries drivers, up to a second.

    Without a CPU-only lock, a pack for GPUs is recommended, as all of them run on the CPU, too.

    Args:
        folder: folder of lock files; None for the bundled ones.

    Raises:
        EngineError: a lock file is invalid.
    """
    locks = find_locks(folder)
    suitable: tuple[str, ...] = engine.suitable_torch()

    def rank(lock: Lock) -> tuple[int, int]:
        known = lock.backend in suitable
        return (suitable.index(lock.backend) if known else len(suitable), lock.n_bytes)

    return tuple(
        PackOffer(lock, number == 0, lock.backend != "cpu" and lock.backend in suitable)
        for number, lock in enumerate(sorted(locks, key=rank))
    )


def find_update(pack: Pack | None, offers: Sequence[PackOffer]) -> PackOffer | None:
    """Return the newer offer of the kind in use, if any."""
    if pack is None or pack.is_environment:
        return None
    offer = next((offer for offer in offers if offer.backend == pack.backend), None)
    is_newer = offer is not None and (offer.lock.digest != pack.digest or not pack.is_usable)
    return offer if is_newer else None
