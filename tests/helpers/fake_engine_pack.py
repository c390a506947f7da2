"""Engine packs without a network: locks of no real wheels, and an installation from a script."""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.setup.engine_pack import activation
from app.setup.engine_pack.fetching import InstallProgress, InstallStage
from app.setup.engine_pack.installation import Installed
from app.setup.engine_pack.lock import Lock, this_python, this_system
from app.setup.engine_pack.store import Pack, PackStore
from engine import Cancelled, EngineError, temporary_folder

SIZES = {"cpu": (210_000_000, 900_000_000), "cuda13": (2_900_000_000, 7_100_000_000)}
"""Bytes of a download and of what it becomes on the disk."""

LOCK = """lock-version = "1.0"
created-by = "tests"

[[packages]]
name = "torch"
version = "{version}"

[[packages.wheels]]
name = "torch-{version}-{backend}.whl"
url = "https://example.invalid/torch-{version}-{backend}.whl"
size = {n_bytes}
hashes = {{ sha256 = "{digest}" }}

[tool.tandem]
backend = "{backend}"
system = "{system}"
python = "{python}"
unpacked-bytes = {unpacked_bytes}
"""


def write_lock(folder: Path, backend: str, version: str = "2.15.0") -> None:
    """Write a lock file for this system, in place of another one of its kind."""
    folder.mkdir(parents=True, exist_ok=True)
    n_bytes, unpacked_bytes = SIZES[backend]
    text = LOCK.format(
        backend=backend, version=version, n_bytes=n_bytes, unpacked_bytes=unpacked_bytes,
        digest="ab" * 32, system=this_system(), python=this_python(),
    )  # fmt: skip
    (folder / f"pylock.{backend}.toml").write_text(text)


@dataclass
class PackScript:
    """The script of installations.

    Attributes:
        n_steps: steps of the download.
        hold_at: step that waits for `go_on`; None for none.
        error: what the next installation ends with; it is used once.
        gpu_problem: what the installed engine says of GPUs.
        site: folder that packs import from.
        wheels: folders of wheels that were asked for.
        begun: steps at which installations have begun, as bytes arrive once.
    """

    site: Path
    n_steps: int = 4
    hold_at: int | None = None
    error: EngineError | None = None
    gpu_problem: str = ""
    go_on: threading.Event = field(default_factory=threading.Event)
    wheels: list[Path | None] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    n_arrived: int = 0


class FakeInstallation:
    """An installation with the interface of the real one, which takes nothing from the network."""

    script: PackScript

    def __init__(
        self, lock: Lock, store: PackStore | None = None, wheels: Path | None = None,
        report: Callable[[InstallProgress], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._lock, self._store, self._report = lock, store or PackStore(), report
        self._stopped = threading.Event()
        self.script.wheels.append(wheels)

    def stop(self) -> None:
        self._stopped.set()
        self.script.go_on.set()

    def run(self) -> Installed:
        script, n_bytes = self.script, self._lock.n_bytes
        with self._store.locked():
            script.begun.append(script.n_arrived)
            while script.n_arrived < script.n_steps:
                done = n_bytes * script.n_arrived // script.n_steps
                self._report(InstallProgress(InstallStage.FETCHING, done, n_bytes))
                if script.hold_at == script.n_arrived:
                    script.go_on.wait(60)
                if self._stopped.is_set():
                    raise Cancelled("The installation")
                script.n_arrived += 1
            error, script.error = script.error, None
            if error is not None:
                raise error
            self._report(InstallProgress(InstallStage.TRYING))
            installed = Installed(self._adopt(), script.gpu_problem)
        activation.activate()
        return installed

    def _adopt(self) -> Pack:
        lock = self._lock
        with temporary_folder(self._store.folder) as work:
            (work / "pack").mkdir()
            pack = Pack(
                name="", backend=lock.backend, version=lock.version, python=lock.python,
                folders=(str(self.script.site),), digest=lock.digest, n_bytes=lock.unpacked_bytes,
            )  # fmt: skip
            return self._store.adopt(work / "pack", pack)


def no_own_engine(
    set_attribute: Callable[[str, object], None], folder: Path, backends: Sequence[str] = ("cpu",)
) -> PackScript:
    """Have this process look as if Tandem had been installed without torch.

    Args:
        set_attribute: changes what a dotted name stands for, for as long as it is needed.
        folder: place for locks and for the pack, which is this Python's own libraries.

    Returns:
        The script of the installations.
    """
    site = folder / "site"
    folder.mkdir(parents=True, exist_ok=True)
    site.symlink_to(sysconfig.get_path("purelib"), target_is_directory=True)
    for backend in backends:
        write_lock(folder / "locks", backend)
    script = PackScript(site)
    made = type("ScriptedInstallation", (FakeInstallation,), {"script": script})
    set_attribute("app.setup.engine_pack.lock.locks_dir", lambda: folder / "locks")
    set_attribute("app.setup.engine_pack.activation.has_own_engine", lambda: False)
    set_attribute("app.setup.engine_pack.installation.Installation", made)
    return script
