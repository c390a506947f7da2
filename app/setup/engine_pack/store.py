"""The folder of the engine packs: the one in use, the one before it, and what is left over.

    engines/
      current.json            names the pack in use and the one before it; replaced atomically
      cuda13-2.15.0-4/        a pack: pack.json, site/ with the unpacked wheels, and in-use,
                              which the processes that use it keep open
      environment-5/          an existing Python environment: pack.json alone, which names folders
      fetched/                wheels that have arrived, whole or in part
      .tandem-….tmp/          a pack in the making; deleted with the process that makes it
      lock                    held by whoever changes any of this

A pack is complete, and has answered, before `current.json` names it.
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
TEXTS = ("backend", "version", "python", "digest", "source")
"""Fields of a pack's manifest that are texts."""

MOVE_TRIES = 10
MOVE_PAUSE_S = 0.3
"""Times and pauses of moving a folder: virus scanners hold new files open for a moment."""


class PackBusy(EngineError):
    """Error of an engine that is being installed or removed by another window or command."""


@dataclass(frozen=True, slots=True)
class Pack:
    """An engine pack.

    Attributes:
        name: its folder below the store's.
        backend: kind of PyTorch, such as "cpu"; "environment" for an existing one.
        version: version of PyTorch.
        python: version of Python that it is for, such as "3.11".
        folders: folders to import from.
        digest: that of its lock; "" for an environment.
        n_bytes: size on the disk; 0 for an environment, which is not Tandem's.
        source: Python program of an environment, else "".
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
        """Whether this Python can import from it: its folders are there, for the same version."""
        if self.python != this_python():
            return False
        try:
            return all(Path(one).is_dir() for one in self.folders)
        except (OSError, ValueError):  # a name that is too long, or has a null character
            return False


class PackStore:
    """The packs of this user.

    Args:
        folder: where they are; `paths.engines_dir()` if none is given.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or engines_dir()

    @property
    def is_private(self) -> bool:
        """Whether nobody else on this machine can put code into its packs."""
        return not exposure(self.folder)

    @property
    def fetched(self) -> Path:
        """Folder of the wheels that have arrived."""
        return self.folder / FETCHED

    @property
    def current(self) -> Pack | None:
        """Pack in use; None if there is none. It may not be usable, see `Pack.is_usable`."""
        return self._read(self._names()[0])

    @property
    def previous(self) -> Pack | None:
        """Pack that was in use before the current one; None for none."""
        return self._read(self._names()[1])

    def n_bytes(self) -> int:
        """Return the size of all packs and fetched wheels on the disk; reads all folders."""
        return folder_bytes(self.folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all others from changing anything here; free again with the end of the process.

        Raises:
            PackBusy: somebody else does.
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
                    tr("Make that folder yours alone, or set TANDEM_HOME to another one."),
                )
            if not _try_to_lock(handle):
                raise PackBusy(
                    tr("Another window or command is changing the engine."),
                    tr("Wait until it is done."),
                )
            yield
        finally:
            os.close(handle)

    def adopt(self, made: Path, pack: Pack) -> Pack:
        """Give a finished pack its name and use it; the one in use becomes the previous one.

        The caller holds the lock.

        Args:
            made: its folder, on the same disk, which is moved.
            pack: what is known of it; `name` and a relative folder are completed here.

        Raises:
            EngineError: the folder cannot be written; nothing has changed.
        """
        used = [path.name for path in self.folder.iterdir()]
        number = 1 + max((_number(name) for name in used), default=0)
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
        """Use the previous pack again; the present one becomes the previous one.

        Raises:
            EngineError: there is none, or the folder cannot be written.
        """
        with self.locked():
            current, previous = self._names()
            pack = self._read(previous)
            if pack is None or not pack.is_usable:
                raise EngineError(tr("There is no earlier engine to go back to."))
            try:
                self._point(previous, current)
            except OSError as error:
                raise disk_error(self.folder, error) from None
            return pack

    def remove(self) -> None:
        """Delete all packs and all wheels that have arrived; an environment itself stays.

        This process uses none from now on. One that another uses goes with a later sweep.

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
        """Delete the wheels that have arrived, whole or in part.

        Raises:
            PackBusy: somebody is fetching them.
        """
        with self.locked():
            shutil.rmtree(self.fetched, ignore_errors=True)

    def sweep(self) -> None:
        """Delete what killed installers have left, unless somebody is installing."""
        if self.folder.is_dir():
            with suppress(EngineError), self.locked():
                self.sweep_left_over()

    def sweep_left_over(self) -> None:
        """Delete all packs but the two that are named and those that living processes use.

        The caller holds the lock.
        """
        sweep_temporaries(self.folder)
        kept = self._names()
        for path in self.folder.iterdir():
            if path.is_dir() and _number(path.name) and path.name not in kept:
                delete_pack(path)

    def _names(self) -> tuple[str, str]:
        """Return the names of the pack in use and the one before; "" for none."""
        found = _read_json(self.folder / POINTER)
        names = (str(found.get(key) or "") for key in ("current", "previous"))
        current, previous = (name if _number(name) else "" for name in names)
        return current, previous

    def _point(self, current: str, previous: str) -> None:
        replace_json(self.folder / POINTER, {"current": current, "previous": previous})

    def _read(self, name: str) -> Pack | None:
        """Return a pack as its folder describes it; None if that is gone or damaged."""
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
    """Return the size of the files in a folder and those below it; what vanishes counts as 0."""
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
    """Return the sentence for an error of the disk."""
    return EngineError(
        tr("{path} cannot be written: {why}.").format(path=path, why=error.strerror or error),
        tr("Check its rights and the room on its disk."),
    )


def _number(name: str) -> int:
    """Return the number with which a pack's name ends; 0 if it is none."""
    backend, _, number = name.rpartition("-")
    is_name = bool(backend) and not name.startswith(".") and "/" not in name and "\\" not in name
    return int(number) if is_name and number.isdecimal() and len(number) < 10 else 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_file(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _move(source: Path, goal: Path) -> None:
    """Rename a folder.

    Raises:
        OSError: it cannot be done, not even after some tries.
    """
    for left in range(MOVE_TRIES, -1, -1):
        try:
            source.rename(goal)
            return
        except PermissionError:
            if not left or not IS_WINDOWS:
                raise
            time.sleep(MOVE_PAUSE_S)


def _try_to_lock(handle: int) -> bool:
    """Return whether this process has got the lock of an open file."""
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
    "cpu": tr_later("Processor only"),
    "cuda13": tr_later("NVIDIA GPUs (CUDA 13)"),
    "cuda12": tr_later("NVIDIA GPUs (CUDA 12)"),
    "rocm": tr_later("AMD GPUs (ROCm)"),
    "environment": tr_later("an existing environment"),
}
"""Names of the kinds of PyTorch, translated where they are shown."""


@dataclass(frozen=True, slots=True)
class PackOffer:
    """A pack that can be installed here.

    Attributes:
        lock: its wheels; `lock.n_bytes` is the download, `lock.unpacked_bytes` the disk.
        is_recommended: whether it is the best for this machine; one of all offers is.
        uses_gpus: whether this machine has GPUs that it can use.
    """

    lock: Lock
    is_recommended: bool
    uses_gpus: bool

    @property
    def backend(self) -> str:
        """Kind of PyTorch, such as "cpu"."""
        return self.lock.backend

    @property
    def title(self) -> str:
        """Name of the kind of PyTorch, for a person."""
        return title_of(self.lock.backend)


def title_of(backend: str) -> str:
    """Return the name of a kind of PyTorch, for a person."""
    return tr(TITLES[backend]) if backend in TITLES else backend


def find_offers(folder: Path | None = None) -> tuple[PackOffer, ...]:
    """Return what can be installed here, the best first; asks drivers, so it may take a second.

    Without a lock for the processor alone, a pack for GPUs is recommended: all of them compute on
    the processor, too.

    Args:
        folder: lock files; Tandem's own if none are given.

    Raises:
        EngineError: a lock file is damaged.
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
    """Return the newer offer of the kind in use; None if there is none, or none is in use."""
    if pack is None or pack.is_environment:
        return None
    same = (offer for offer in offers if offer.backend == pack.backend)
    found = next(same, None)
    is_newer = found is not None and (found.lock.digest != pack.digest or not pack.is_usable)
    return found if is_newer else None
