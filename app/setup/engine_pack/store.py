"""The folder that stores the engine packs.

    engines/
      current.json            names of the current and previous packs; replaced atomically
      cuda13-2.15.0-4/        a pack: pack.json, site/ with the unpacked wheels, and in-use,
                              which is open in the processes that use it
      environment-5/          an existing Python environment: only pack.json
      fetched/                complete and partial wheel downloads
      .tandem-….tmp/          a pack being installed
      lock                    held during changes

`current.json` names only complete, tested packs.
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
"""Retries when moving a folder, because virus scanners briefly keep new files open."""


class PackBusy(EngineError):
    """Error raised if another window or command is changing the engine."""


@dataclass(frozen=True, slots=True)
class Pack:
    """An engine pack.

    Attributes:
        name: folder name in the store.
        backend: kind of PyTorch, for example "cpu", or "environment".
        version: PyTorch version.
        python: Python version, for example "3.11".
        folders: folders to import from.
        digest: the lock's digest; "" for an environment.
        n_bytes: size on disk; 0 for an environment.
        source: Python executable if the pack is an environment, else "".
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
        """Whether the pack's folders exist and are for this Python version."""
        if self.python != this_python():
            return False
        try:
            return all(Path(one).is_dir() for one in self.folders)
        except (OSError, ValueError):  # path too long or with a null character
            return False


class PackStore:
    """The packs stored in a folder, by default `paths.engines_dir()`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or engines_dir()

    @property
    def is_private(self) -> bool:
        """Whether no other user can modify the packs."""
        return not exposure(self.folder)

    @property
    def fetched(self) -> Path:
        """Folder for downloaded wheels."""
        return self.folder / FETCHED

    @property
    def current(self) -> Pack | None:
        """Current pack, if any; it may be unusable."""
        return self._read(self._names()[0])

    @property
    def previous(self) -> Pack | None:
        """Previous pack, if any."""
        return self._read(self._names()[1])

    def n_bytes(self) -> int:
        """Return the disk space used by all packs and wheels; slow."""
        return folder_bytes(self.folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder; the lock is also released when the process exits.

        Raises:
            PackBusy: the folder is already locked.
            EngineError: the folder cannot be written to.
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
                    tr("Make the folder private, or set TANDEM_HOME to another folder."),
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
        """Move a complete pack into the store and make it current; call this with the lock held.

        Args:
            made: the pack's folder, on the same disk.
            pack: the manifest; `name` is filled in, and folders are made absolute.

        Raises:
            EngineError: the folder cannot be written to; nothing has changed.
        """
        number = 1 + max((_number(path.name) for path in self.folder.iterdir()), default=0)
        name = f"{pack.backend}-{pack.version}-{number}"
        home = self.folder / name
        folders = tuple(str(home / folder) for folder in pack.folders)  # absolute paths stay
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
            EngineError: there is no previous pack, or the folder cannot be written to.
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
        """Delete all packs and wheels, but not environments, and leave no pack in use.

        Packs that other processes are using are deleted by a later sweep.

        Raises:
            EngineError: the folder cannot be written to.
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
            PackBusy: wheels are being downloaded.
        """
        with self.locked():
            shutil.rmtree(self.fetched, ignore_errors=True)

    def sweep(self) -> None:
        """Delete what killed installations left, unless an installation is running."""
        if self.folder.is_dir():
            with suppress(EngineError), self.locked():
                self.sweep_left_over()

    def sweep_left_over(self) -> None:
        """Delete all packs except the current one, the previous one and those in use by processes.

        Call this with the lock held.
        """
        sweep_temporaries(self.folder)
        kept = self._names()
        for path in self.folder.iterdir():
            if path.is_dir() and _number(path.name) and path.name not in kept:
                delete_pack(path)

    def _names(self) -> tuple[str, str]:
        """Return the names of the current and previous packs; "" if there is none."""
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
    """Return the total size of the files in a folder and its subfolders; skip unreadable ones."""
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
    """Return the `EngineError` for a disk error."""
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
"""Names for the kinds of PyTorch."""


@dataclass(frozen=True, slots=True)
class PackOffer:
    """A pack that can be installed here."""

    lock: Lock
    is_recommended: bool  # the best offer for this machine
    uses_gpus: bool  # whether it can use this machine's GPUs

    @property
    def backend(self) -> str:
        """Kind of PyTorch, for example "cpu"."""
        return self.lock.backend

    @property
    def title(self) -> str:
        """Name for the kind of PyTorch."""
        return title_of(self.lock.backend)


def title_of(backend: str) -> str:
    """Return the name for a kind of PyTorch, in the window's language."""
    return tr(TITLES[backend]) if backend in TITLES else backend


def find_offers(folder: Path | None = None) -> tuple[PackOffer, ...]:
    """Return the packs that can be installed here, best first; querying drivers takes up to 1 s.

    If there is no CPU-only lock, a pack for GPUs is recommended, because all packs can use the CPU.

    Args:
        folder: folder with lock files; None for the bundled files.

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
    """Return an offer that is newer than `pack` and of the same kind, if any."""
    if pack is None or pack.is_environment:
        return None
    offer = next((offer for offer in offers if offer.backend == pack.backend), None)
    is_newer = offer is not None and (offer.lock.digest != pack.digest or not pack.is_usable)
    return offer if is_newer else None
