"""Installation of an engine pack: download, unpack, test, activate."""

from __future__ import annotations

import json
import os
import platform
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import engine
from app.core.translation import tr
from app.core.units import decimal
from app.models.downloads.transfer.part_file import SPARE, NoRoom
from app.models.downloads.transfer.transfer import Patience
from app.setup.engine_pack import activation, fetching
from app.setup.engine_pack.children.running import run_child
from app.setup.engine_pack.fetching import (
    InstallProgress,
    InstallStage,
    Report,
    check_folder,
    fetch_wheels,
    n_fetched,
)
from app.setup.engine_pack.lock import Lock
from app.setup.engine_pack.store import SITE, Pack, PackStore, disk_error, folder_bytes
from engine import Cancelled, EngineError, one_line, temporary_folder

LIMIT_S = 300.0  # time limit in seconds; the first read from disk takes most of the time

BYTECODE = "PYTHONDONTWRITEBYTECODE"  # environment variable that stops Python from writing bytecode

MODULE = "app.setup.engine_pack.children.smoke_program"


class PackFails(EngineError):
    """Error raised if the engine does not work with a pack."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A working pack's PyTorch version, and why it cannot use GPUs ("" if it can)."""

    version: str
    gpu_problem: str


def try_pack(
    folders: Sequence[str],
    is_stopped: Callable[[], bool] = lambda: False,
    command: Sequence[str] | None = None,
    *,
    writes_bytecode: bool = True,
) -> Tried:
    """Generate an answer in a child process with the libraries in `folders`.

    Args:
        command: command to run instead of `MODULE`.
        writes_bytecode: whether Python writes bytecode, which halves later import times.

    Raises:
        Cancelled: `is_stopped` returned True.
        PackFails: the test failed.
    """
    variables = {"TANDEM_ENGINE_PACK": os.pathsep.join(folders)}
    environment = engine.child_environment(variables) | {BYTECODE: "1"}
    if writes_bytecode:
        del environment[BYTECODE]
    try:
        ended = run_child(
            command or engine.program_command(MODULE), environment, LIMIT_S, is_stopped
        )
    except OSError as error:
        raise _failure(error.strerror or str(error)) from None
    if ended.status is None:
        raise _failure(tr("it took more than {n} minutes").format(n=f"{LIMIT_S / 60:g}"))
    try:
        answer = json.loads(ended.output.splitlines()[-1])
        if ended.status == 0 and answer["n_tokens"] > 0:
            return Tried(str(answer["version"]), str(answer["gpu_problem"]))
    except (ValueError, IndexError, KeyError, TypeError):
        pass
    raise _failure(ended.last_line or tr("status {status}").format(status=ended.status))


def _failure(why: str) -> PackFails:
    return PackFails(
        tr("The new engine does not work: {why}.").format(why=one_line(why, 300).rstrip(".")),
        tr("It will not be used."),
    )


@dataclass(frozen=True, slots=True)
class Installed:
    """The pack now in use, and why it cannot use GPUs ("" if it can)."""

    pack: Pack
    gpu_problem: str


class Installation:
    """Installation of one pack.

    `run` works on any thread and can resume after a stop or a failure, even in another process,
    because downloaded files are kept until `discard`.

    Args:
        store: where to install; None for the user's store.
        wheels: folder with all of the lock's wheels; None to download them.
        report: receives the progress, on the thread that calls `run`.
    """

    def __init__(
        self,
        lock: Lock,
        store: PackStore | None = None,
        wheels: Path | None = None,
        report: Report = lambda _: None,
        *,
        patience: Patience | None = None,
        attempt: Callable[..., Tried] = try_pack,
    ) -> None:
        self._lock, self._store, self._wheels = lock, store or PackStore(), wheels
        self._report, self._patience, self._attempt = report, patience, attempt
        self._stopped = threading.Event()

    @property
    def n_fetched(self) -> int:
        """Number of downloaded bytes; 0 if the wheels come from a folder."""
        return 0 if self._wheels else n_fetched(self._lock, self._store.fetched)

    @property
    def needed_bytes(self) -> int:
        """Maximum disk space that the rest of the installation needs, in bytes."""
        missing = 0 if self._wheels else self._lock.n_bytes - self.n_fetched
        return missing + self._lock.unpacked_bytes

    def stop(self) -> None:
        """Make `run` raise Cancelled soon; thread-safe."""
        self._stopped.set()

    def discard(self) -> None:
        """Delete the downloaded files; call this after `run` has returned or raised.

        Raises:
            EngineError: another window or command is installing.
        """
        self._store.discard_fetched()

    def run(self) -> Installed:
        """Install the pack and use it in this process and in child processes started later.

        Raises:
            Cancelled: `stop` was called.
            EngineError: the installation failed; the current engine stays in use.
        """
        self._stopped.clear()
        self._check_fit()
        fetching.find_uv()  # fail before gigabytes are downloaded
        with self._store.locked():
            self._report(InstallProgress(InstallStage.CHECKING))  # sweeping may take a while
            self._store.sweep_left_over()
            self._check_room()
            wheels = self._ready_wheels()
            installed = self._make(wheels)
            shutil.rmtree(self._store.fetched, ignore_errors=True)
        activation.activate()
        return installed

    def _check_fit(self) -> None:
        if not self._lock.is_for_here:
            raise EngineError(
                tr("This engine is for {system} and Python {python}.").format(
                    system=self._lock.system, python=self._lock.python
                ),
                tr("Choose one for this computer."),
            )
        macos = platform.mac_ver()[0].partition(".")[0]
        if macos.isdecimal() and int(macos) < self._lock.least_macos:
            raise EngineError(
                tr("This engine needs macOS {n} or newer.").format(n=self._lock.least_macos),
                tr("Update macOS, or use a Python environment with an older PyTorch."),
            )

    def _check_room(self) -> None:
        folder = self._store.folder
        free = max(shutil.disk_usage(folder).free - SPARE, 0)
        if self.needed_bytes > free:
            raise NoRoom(
                tr("{folder} has {free} GB free, but the engine needs {wanted} GB.").format(
                    folder=folder,
                    free=decimal(f"{free / 1e9:.1f}"),
                    wanted=decimal(f"{self.needed_bytes / 1e9:.1f}"),
                ),
                tr("Free some space, then try again."),
            )

    def _ready_wheels(self) -> Path:
        if self._wheels is not None:
            check_folder(self._lock, self._wheels, self._stopped, self._report)
            return self._wheels
        fetch_wheels(self._lock, self._store.fetched, self._stopped, self._report, self._patience)
        return self._store.fetched

    def _make(self, wheels: Path) -> Installed:
        try:
            with temporary_folder(self._store.folder) as work:
                made = work / "pack"
                site = made / SITE
                site.mkdir(parents=True)
                fetching.unpack(self._lock, wheels, site, work, self._stopped.is_set, self._report)
                self._report(InstallProgress(InstallStage.TRYING))
                tried = self._attempt([str(site)], self._stopped.is_set)
                if self._stopped.is_set():
                    raise Cancelled("The installation")
                pack = Pack(
                    name="", backend=self._lock.backend, version=self._lock.version,
                    python=self._lock.python, folders=(SITE,), digest=self._lock.digest,
                    n_bytes=folder_bytes(site),
                )  # fmt: skip
                flush_disks()
                return Installed(self._store.adopt(made, pack), tried.gpu_problem)
        except OSError as error:
            raise disk_error(self._store.folder, error) from None


def flush_disks() -> None:
    """Flush the system's disk buffers, so that files stay complete after a power failure."""
    if hasattr(os, "sync"):
        os.sync()
