"""Installed and available engines, and the running installation; uses threads.

The network is not used before `install` is called.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PySide6.QtCore import QObject, QTimer, Signal, Slot

import engine
from app.core.background import LatestJob
from app.core.translation import error_text, reason_of, tr, tr_later, tr_n
from app.core.units import TransferProgress, amount_text, decimal_size, moving_text, size_text
from app.setup.page.engine_view import ShownEngine
from engine import Cancelled, DeviceInfo, EngineError

if TYPE_CHECKING:
    from app.setup.engine_pack.activation import Origin
    from app.setup.engine_pack.fetching import InstallProgress, InstallStage
    from app.setup.engine_pack.installation import Installation, Installed
    from app.setup.engine_pack.store import Pack, PackOffer

log = logging.getLogger(__name__)

TELL_MS = 300
CLOSE_S = 4.0  # maximum wait for an installation when the window closes, in seconds

InstallState = Literal["idle", "running", "paused", "failed"]


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """A request for an engine: an offer, possibly with local wheels, or an environment."""

    backend: str = ""  # the offer's kind of PyTorch
    wheels: str = ""  # folder of wheels to use instead of downloading
    environment: str = ""  # folder of an existing Python environment

    @property
    def is_fetched(self) -> bool:
        """Whether the engine is downloaded, so that a partial download can be resumed."""
        return bool(self.backend) and not self.wheels


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Installed and available engines on this machine.

    Attributes:
        origin: where the engine in use comes from.
        offers: engines that can be installed, best first.
        problem: why there are no offers, or "".
        current, previous: the pack in use and the previous pack, if any.
        folder: folder that contains the packs.
        free_bytes: free bytes on the folder's disk.
        suitable: kinds of PyTorch that suit this machine's devices, best first.
    """

    origin: Origin
    offers: tuple[PackOffer, ...]
    problem: str
    current: Pack | None
    previous: Pack | None
    folder: str
    free_bytes: int
    suitable: tuple[str, ...]

    def offer(self, backend: str) -> PackOffer | None:
        """Return the offer for a kind of PyTorch, if any."""
        return next((offer for offer in self.offers if offer.backend == backend), None)

    @property
    def update(self) -> PackOffer | None:
        """A newer engine of the same kind as the current one, if any."""
        if self.current is None:
            return None
        offer = self.offer(self.current.backend)
        return offer if offer is not None and offer.lock.digest != self.current.digest else None


class EngineSession(QObject):
    """Facts about engines, and their installation."""

    known = Signal(object)  # EngineFacts
    changed = Signal()  # the installation's state or progress
    installed = Signal(object)  # Installed
    broken = Signal(object)  # EngineError from an installation
    rolled_back = Signal(object)  # Pack
    removed = Signal()
    failed = Signal(object)  # EngineError from a rollback or removal

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self.facts: EngineFacts | None = None
        self.state: InstallState = "idle"
        self.stage: InstallStage | None = None
        self.progress = TransferProgress()
        self.total_bytes = 0
        self.error: EngineError | None = None
        self.request = InstallRequest()
        self._attempt: _Attempt | None = None
        self._ending: Literal["", "pause", "cancel"] = ""
        self._is_closed = False
        self._looking = LatestJob("tandem-engine-look", self)
        self._looking.done.connect(self._on_looked)
        self._installing = LatestJob("tandem-engine-install", self)
        self._installing.done.connect(self._on_installed)
        self._installing.failed.connect(self._on_failed)
        self._changing = LatestJob("tandem-engine-change", self)
        self._changing.done.connect(self._on_changed)
        self._changing.failed.connect(self.failed)
        self._timer = QTimer(self, interval=TELL_MS)
        self._timer.timeout.connect(self.changed)

    def look(self) -> None:
        """Read the facts again; emits `known`."""
        self._looking.run(_look)

    def install(self, request: InstallRequest) -> None:
        """Install an engine or use an environment, unless an installation is running."""
        if self.state == "running" or self._is_closed:
            return
        self.request, self.error, self.stage = request, None, None
        self.progress, self.total_bytes = TransferProgress(), 0
        self._attempt, self._ending = _Attempt(request, self._note), ""
        self._put("running")
        self._timer.start()
        self._installing.run(self._attempt.run)

    def leave_paused(self, request: InstallRequest) -> None:
        """Show an unfinished installation from another window as paused."""
        if self.state == "idle":
            self.request = request
            self._put("paused")

    def resume(self) -> None:
        """Resume a paused or failed installation."""
        if self.state in ("paused", "failed"):
            self.install(self.request)

    def pause(self) -> None:
        """Stop the installation and keep the partial download."""
        self._end("pause")

    def cancel(self) -> None:
        """Stop the installation and delete the partial download."""
        if self.state == "running":
            self._end("cancel")
        else:
            if self.request.is_fetched:
                self._changing.run(_discard)
            self._put("idle")

    def leave(self) -> None:
        """Dismiss a failed installation and keep the partial download."""
        if self.state == "failed":
            self._put("idle")

    def roll_back(self) -> None:
        """Switch back to the previous pack."""
        self._changing.run(_roll_back)

    def remove(self) -> None:
        """Delete all packs; no engine may be running."""
        self._changing.run(_remove)

    def close(self) -> None:
        """Stop a running installation; a later window can resume it."""
        self._is_closed = True
        self._timer.stop()
        if self._attempt is not None:
            self._attempt.stop()
        for job in (self._installing, self._changing, self._looking):
            job.close(CLOSE_S)

    def _end(self, ending: Literal["pause", "cancel"]) -> None:
        if self.state == "running" and self._attempt is not None:
            self._ending = ending
            self._attempt.stop()

    def _put(self, state: InstallState) -> None:
        self.state = state
        if state != "running":
            self._timer.stop()
        self.changed.emit()

    def _note(self, progress: InstallProgress) -> None:
        """Record the progress; called on the installation's thread."""
        is_checking = progress.stage.name == "CHECKING"
        is_same = progress.stage is self.stage or self.total_bytes == progress.n_bytes
        if not is_same:
            self.progress = TransferProgress()
        self.stage, self.total_bytes = progress.stage, progress.n_bytes
        # verifying a downloaded wheel must not make progress go backwards
        n_done = max(progress.n_done, self.progress.n_bytes if is_checking else 0)
        self.progress.note(n_done, is_checking=is_checking)

    @Slot(object)
    def _on_looked(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.known.emit(facts)

    @Slot(object)
    def _on_installed(self, installed: Installed) -> None:
        self._put("idle")
        self.installed.emit(installed)
        self.look()

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        if isinstance(error, Cancelled):
            if self._ending == "cancel" and self.request.is_fetched:
                self._changing.run(_discard)
            self._put("idle" if self._ending == "cancel" else "paused")
            return
        log.info("the engine was not installed: %s", error)
        self.error = error
        self._put("failed")
        self.broken.emit(error)

    @Slot(object)
    def _on_changed(self, what: object) -> None:
        if what == "removed":
            self.removed.emit()
        elif what is not None:
            self.rolled_back.emit(what)
        self.look()


# on threads


def _look() -> EngineFacts:
    from app.setup.engine_pack.activation import activate
    from app.setup.engine_pack.store import PackStore, find_offers

    store = PackStore()
    offers: tuple[PackOffer, ...] = ()
    problem = ""
    try:
        offers = find_offers()
    except EngineError as error:
        problem = error_text(error)
    return EngineFacts(
        activate(), offers, problem, store.current, store.previous, str(store.folder),
        free_bytes(store.folder), engine.suitable_torch(),
    )  # fmt: skip


def free_bytes(folder: Path) -> int:
    """Return the free bytes on a folder's disk (the folder may be missing); 0 if unknown."""
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), folder)
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return 0


class _Attempt:
    def __init__(self, request: InstallRequest, report: Callable[[InstallProgress], None]) -> None:
        self._request, self._report = request, report
        self._stopped = threading.Event()
        self._installation: Installation | None = None

    def stop(self) -> None:
        """Make `run` raise Cancelled soon."""
        self._stopped.set()
        if self._installation is not None:
            self._installation.stop()

    def run(self) -> Installed:
        """Carry out the request.

        Raises:
            EngineError: the installation failed or was stopped.
        """
        try:
            if self._request.environment:
                return self._use_environment(Path(self._request.environment))
            return self._install()
        except EngineError:
            raise
        except Exception as error:  # the window must keep running
            log.exception("the engine cannot be installed")
            why = reason_of(error)
            text = tr("The engine could not be installed: {why}.").format(why=why)
            raise EngineError(text) from None

    def _use_environment(self, place: Path) -> Installed:
        from app.setup.engine_pack.existing import use_environment
        from app.setup.engine_pack.fetching import InstallProgress, InstallStage

        self._tell(InstallProgress(InstallStage.TRYING))
        installed = use_environment(place, is_stopped=self._stopped.is_set)
        with suppress(EngineError):
            _discard()  # an earlier download will not be resumed
        return installed

    def _install(self) -> Installed:
        from app.setup.engine_pack.activation import activate
        from app.setup.engine_pack.installation import Installation, Installed
        from app.setup.engine_pack.store import PackStore, find_offers

        request = self._request
        wheels = Path(request.wheels) if request.wheels else None
        offers = find_offers()
        offer = next((one for one in offers if one.backend == request.backend), None)
        if wheels is not None:  # the wheels may be for another engine
            offer = next((one for one in offers if _has_all(wheels, one)), offer)
        if offer is None:
            raise EngineError(
                tr("This version of Tandem has no such engine for this computer."),
                tr("Choose another one."),
            )
        current = PackStore().current
        if current is not None and current.digest == offer.lock.digest and current.is_usable:
            activate()
            return Installed(current, "")  # another window or command installed it
        self._installation = Installation(offer.lock, wheels=wheels, report=self._tell)
        return self._installation.run()

    def _tell(self, progress: InstallProgress) -> None:
        if self._stopped.is_set() and self._installation is not None:
            self._installation.stop()  # stopped before it started
        self._report(progress)


def _has_all(folder: Path, offer: PackOffer) -> bool:
    return all((folder / wheel.file.name).is_file() for wheel in offer.lock.wheels)


def _discard() -> None:
    from app.setup.engine_pack.store import PackStore

    PackStore().discard_fetched()


def _roll_back() -> Pack:
    from app.setup.engine_pack.store import PackStore

    return PackStore().roll_back()


def _remove() -> str:
    from app.setup.engine_pack.store import PackStore

    PackStore().remove()
    return "removed"


USES = {
    "cpu": tr_later("Runs on the CPU; GPUs are not used."),
    "cuda13": tr_later("For NVIDIA GPUs with driver 580 or newer, and the CPU."),
    "cuda12": tr_later("For NVIDIA GPUs with an older driver, and the CPU."),
    "rocm": tr_later("For AMD GPUs and the CPU."),
}
"""The devices that each kind of PyTorch supports."""


def missing_intro(former: Pack | None) -> str:
    """Return the page's introduction if there is no engine; `former` is an unusable pack."""
    if former is not None:
        text = tr("{engine} can no longer be used: it is for another Python or has been deleted.")
        return (
            f"{text.format(engine=pack_title(former))} {tr('Reinstall it, or choose another one.')}"
        )
    return tr(
        "Models run on an engine, PyTorch, which is installed in a folder that only Tandem uses."
        " Tandem does not use the network until you press Install."
    )


def change_intro(pack: Pack) -> str:
    """Return the page's introduction while an engine is in use."""
    text = tr("In use: {engine}. It is kept until another one works.")
    return text.format(engine=pack_title(pack))


def found_text(devices: Sequence[DeviceInfo]) -> str:
    """Return this machine's devices in one line."""
    if not devices:
        return tr("Detecting devices …")
    return tr("Found: {devices}").format(devices=" · ".join(map(_device_text, devices)))


def _device_text(device: DeviceInfo) -> str:
    if device.kind == "cpu":
        cores = tr_n("{n} core", "{n} cores", device.n_cores)
        return f"{device.name} ({cores}, {size_text(device.total_bytes)})"
    return f"{device.name} ({size_text(device.total_bytes)})" if device.total_bytes else device.name


def without_commands(device: DeviceInfo, origin: Origin) -> DeviceInfo:
    """Return the device with pip commands replaced by advice that suits packs."""
    if origin == "own" or device.usable or device.remedy.partition(" ")[0] != "pip":
        return device
    if origin == "none":
        return replace(device, reason=tr("It needs an engine; none is installed."), remedy="")
    return replace(device, remedy=tr("Choose another engine in the settings."))


def shown_engines(facts: EngineFacts) -> list[ShownEngine]:
    """Return the page's rows: offers, and suitable kinds of PyTorch that are not offered."""
    from app.setup.engine_pack.store import title_of as backend_title

    shown = [shown_offer(offer, facts.current) for offer in facts.offers]
    for backend in facts.suitable:
        if facts.offer(backend) is None:
            problem = tr(
                "This version of Tandem cannot install it, but you can use a Python environment"
                " with this PyTorch."
            )
            shown.append(ShownEngine(backend, backend_title(backend), "", problem))
    return shown


def shown_offer(offer: PackOffer, current: Pack | None) -> ShownEngine:
    """Return an offer as a row on the page."""
    lock = offer.lock
    sizes = tr("Download {download}, {disk} on disk · PyTorch {version}").format(
        version=lock.version,
        download=decimal_size(lock.n_bytes),
        disk=decimal_size(lock.unpacked_bytes),
    )
    if current is not None and current.digest == lock.digest:
        sizes = tr("{facts} · in use").format(facts=sizes)
    lines = (tr(USES[offer.backend]) if offer.backend in USES else "", sizes)
    details = "\n".join(line for line in lines if line)
    return ShownEngine(offer.backend, offer.title, details, "", offer.is_recommended)


def room_text(folder: str, free_bytes: int, needed_bytes: int) -> str:
    """Return a text with the free disk space and, if it is too little, the space needed."""
    free = decimal_size(free_bytes)
    if free_bytes < needed_bytes:
        text = tr("Needs {needed} in {folder}, which has {free} free.")
        return text.format(needed=decimal_size(needed_bytes), folder=folder, free=free)
    return tr("{free} free in {folder}.").format(free=free, folder=folder)


def pack_title(pack: Pack) -> str:
    """Return an engine's name: "PyTorch 2.15.0, NVIDIA GPUs (CUDA 13)"."""
    return f"PyTorch {pack.version}, {title_of(pack)}"


def environment_title() -> str:
    """Return the engine's name if it is an existing environment."""
    return tr("existing Python environment")


def title_of(pack: Pack) -> str:
    """Return the name for a pack's kind of PyTorch."""
    from app.setup.engine_pack.store import title_of as backend_title

    return environment_title() if pack.is_environment else backend_title(pack.backend)


def stage_text(stage: InstallStage | None, progress: TransferProgress, total_bytes: int) -> str:
    """Return progress as "Downloading: 1.2 GB of 3.0 GB · 35.0 MB/s · 51 s left"."""
    name = stage.name if stage is not None else ""
    if name == "FETCHING":
        return tr("Downloading: {amount}").format(amount=moving_text(progress, total_bytes))
    amount = amount_text(progress.n_bytes, total_bytes)
    if name == "CHECKING":
        return tr("Verifying: {amount}").format(amount=amount)
    if name == "UNPACKING":
        return tr("Unpacking: {amount}").format(amount=amount)
    if name == "TRYING":
        return tr("Testing it with the demo model …")
    return tr("Starting …")
