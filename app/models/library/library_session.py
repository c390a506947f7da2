"""The models on this machine: found in the background; their folders are watched."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PySide6.QtCore import QFileSystemWatcher, QObject, QTimer, Signal, Slot

import engine
from app.core.settings import Settings
from app.core.translation import reason_of, tr, tr_n, translated
from app.core.units import context_text, decimal_size
from app.devices.split.planning import PlannerFactory, suggestion
from app.devices.split.settings import SplitSettings
from app.models.library.scan import FileIdentity, FoundModel, Place, file_identity, scan
from engine import EngineError, ModelInfo

if TYPE_CHECKING:
    from engine import Forecaster


@dataclass(frozen=True, slots=True)
class Prospect:
    """Prediction for a model that uses the suggested split.

    Attributes:
        n_ctx: context length in tokens.
        devices: ids of the devices it would use.
        tokens_per_s: predicted decode speed; 0 if unknown.
    """

    fits: bool
    n_ctx: int
    devices: tuple[str, ...]
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """A model on disk.

    Attributes:
        info: the model's header; None if not read or not readable.
        problem: sentence that says why it cannot be opened, or "".
        prospect: prediction; None if there is none.
        is_judged: whether a prediction was attempted.
    """

    found: FoundModel
    info: ModelInfo | None = None
    problem: str = ""
    prospect: Prospect | None = None
    is_judged: bool = False


@dataclass(frozen=True, slots=True)
class Situation:
    """The current devices, for predictions on another thread.

    Attributes:
        settings: default settings for all devices.
        free_bytes: free memory by device.
        forecaster: creates a forecaster that no other thread uses; None if there are no devices.
    """

    settings: SplitSettings
    free_bytes: Mapping[str, int]
    forecaster: Callable[[], Forecaster] | None
    factory: PlannerFactory


def read_entry(found: FoundModel) -> LibraryEntry:
    """Return a model with its header, or with the reason why it cannot be opened."""
    if found.missing:
        several, one = tr("{file} and {n} more are missing."), tr("{file} is missing.")
        n_more = len(found.missing) - 1
        text = (several if n_more else one).format(file=found.missing[0], n=n_more)
        return LibraryEntry(found, problem=text)
    try:
        info = engine.read_model_info(found.path)
    except EngineError as error:
        return LibraryEntry(found, problem=translated(str(error)))
    except OSError as error:
        return LibraryEntry(found, problem=reason_of(error))
    text = tr("The architecture {name} is not supported.").format(name=info.architecture)
    problem = "" if info.supported else text
    return LibraryEntry(found, info, problem)


def prospect_of(info: ModelInfo, situation: Situation) -> Prospect | None:
    """Predict how a model would run; return None if it cannot be planned."""
    if situation.forecaster is None or not situation.settings.ranks:
        return None
    try:
        with closing(situation.factory(info.path)) as planner:
            free = situation.free_bytes
            choice = suggestion(info, situation.settings, free, planner, situation.forecaster)
            if choice is None:
                return None
            evaluation = planner.evaluate(choice.params, free)
            forecast = situation.forecaster().forecast(evaluation, choice.params, info.quant)
    except (EngineError, OSError):
        return None
    plan = evaluation.plan
    rate = forecast.decode.tokens_per_s if forecast else 0.0
    return Prospect(not plan.shortages(free), plan.n_ctx, choice.params.all_devices, rate)


log = logging.getLogger(__name__)

SETTLE_MS = 1500  # milliseconds without changes before folders are searched again

JOIN_S = 5.0
MAX_WATCHED = 200  # maximum number of watched folders, because systems limit watches

Known = dict[tuple[Path, int, float], LibraryEntry]


class LibrarySession(QObject):
    """The models on this machine; nothing is read before `refresh` is called.

    Args:
        places: returns the folders to search.
        situation: returns the devices for which to predict.
    """

    listed = Signal(object)  # list of LibraryEntry: all models, with cached details
    described = Signal(object)  # LibraryEntry with new details
    finished = Signal()

    _passed_on = Signal(int, str, object)

    def __init__(
        self,
        places: Callable[[], Sequence[Place]],
        situation: Callable[[], Situation],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._places, self._situation = places, situation
        self._known: Known = {}
        self._number = 0
        self._is_busy = False
        self._threads: list[threading.Thread] = []  # the newest, and older ones still stopping
        self._watcher = QFileSystemWatcher(self)
        self._watcher.directoryChanged.connect(self._on_changed)
        self._settle = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._settle.timeout.connect(self.refresh)
        self._passed_on.connect(self._on_passed)

    @property
    def is_busy(self) -> bool:
        """Whether a search is running."""
        return self._is_busy

    @Slot()
    def refresh(self) -> None:
        """Search for models again; details of unchanged files are kept."""
        self._number += 1  # a running search stops at its next model
        number, places, situation = self._number, list(self._places()), self._situation()

        def work() -> None:
            self._look(number, places, situation)

        thread = threading.Thread(target=work, name="tandem-library", daemon=True)
        self._threads = [*(old for old in self._threads if old.is_alive()), thread]
        self._is_busy = True
        thread.start()

    def close(self) -> None:
        """Stop searching and watching."""
        self._settle.stop()
        self._number += 1
        for thread in self._threads:
            thread.join(JOIN_S)
        if watched := self._watcher.directories():
            self._watcher.removePaths(watched)

    # on the thread

    def _look(self, number: int, places: list[Place], situation: Situation) -> None:
        def is_over() -> bool:
            return number != self._number

        entries = [
            self._known.get(_key(found), LibraryEntry(found)) for found in scan(places, is_over)
        ]
        if is_over():
            return
        self._passed_on.emit(number, "listed", entries)
        infos: list[tuple[LibraryEntry, ModelInfo]] = []
        for entry in entries:
            if is_over():
                return
            described = entry
            if entry.info is None and not entry.problem:
                described = read_entry(entry.found)
                self._passed_on.emit(number, "described", described)
            if described.info is not None and not described.problem:
                infos.append((described, described.info))
        if situation.forecaster is None:  # the devices are not known yet
            infos.clear()
        for entry, info in sorted(infos, key=lambda pair: pair[0].found.n_bytes):
            if is_over():
                return
            judged = replace(entry, prospect=prospect_of(info, situation), is_judged=True)
            if judged != entry:
                self._passed_on.emit(number, "described", judged)
        self._passed_on.emit(number, "finished", None)

    # on the GUI thread

    @Slot(int, str, object)
    def _on_passed(self, number: int, what: str, result: object) -> None:
        if number != self._number:
            return
        if what == "finished":
            self._is_busy = False
            self.finished.emit()
        elif isinstance(result, LibraryEntry):
            self._known[_key(result.found)] = result
            self.described.emit(result)
        elif isinstance(result, list):
            self._watch([entry.found for entry in result])
            self.listed.emit(result)

    def _watch(self, found: Sequence[FoundModel]) -> None:
        places = self._places()
        folders = [str(place.path) for place in places if place.layout != "file"]
        folders += [str(model.path.parent) for model in found]
        wanted = set(list(dict.fromkeys(folders))[:MAX_WATCHED])
        now = set(self._watcher.directories())
        if now - wanted:
            self._watcher.removePaths(sorted(now - wanted))
        if wanted - now:
            self._watcher.addPaths(sorted(wanted - now))

    @Slot(str)
    def _on_changed(self, folder: str) -> None:
        log.info("models may have changed in %s", folder)
        self._settle.start()


def _key(found: FoundModel) -> tuple[Path, int, float]:
    return found.path, found.n_bytes, found.modified


@dataclass(frozen=True, slots=True)
class LastUse:
    """The last use of a model.

    Attributes:
        plan: its split as text; "" if it was never loaded.
        tokens_per_s: measured speed of the last answer; 0 if there is none.
    """

    plan: str = ""
    tokens_per_s: float = 0.0


def last_use(settings: Settings, path: str) -> LastUse:
    """Return the last use of the model at `path`."""
    plan, speed = settings.plans.get(path), settings.speeds.get(path)
    rate = float(speed) if isinstance(speed, int | float) and 0 < speed < 1e9 else 0.0
    return LastUse(_plan_text(plan) if isinstance(plan, Mapping) else "", rate)


def _plan_text(plan: Mapping[str, object]) -> str:
    """Return "Tensor 60 : 40 · context 32k"; invalid parts are omitted."""
    modes = {
        "single": tr("One device"), "tensor": tr("Tensor"), "layer": tr("Layers"),
        "groups": tr("Groups"),
    }  # fmt: skip
    mode, ranks, n_ctx = plan.get("mode"), plan.get("ranks"), plan.get("n_ctx")
    parts = [modes.get(mode, "") if isinstance(mode, str) else ""]
    shares = [_share(rank) for rank in ranks] if isinstance(ranks, list) else []
    if mode != "single" and (on := [share for share in shares if share]):
        parts[0] += " " + " : ".join(f"{100 * share:.0f}" for share in on)
    if type(n_ctx) is int and n_ctx > 0:
        parts.append(tr("context {size}").format(size=context_text(n_ctx)))
    return " · ".join(part.strip() for part in parts if part.strip())


def _share(rank: object) -> float:
    """Return the rank's share; 0 if it is inactive or invalid."""
    if not isinstance(rank, Mapping) or rank.get("on") is not True:
        return 0.0
    share = rank.get("share")
    return share if isinstance(share, float) and 0 <= share <= 1 else 0.0


def files_of(found: FoundModel, all_models: Iterable[FoundModel]) -> list[Path]:
    """Return a model's files: its parts, and helpers that no other model needs."""
    others = [other for other in all_models if other.path != found.path]
    needed = {path for other in others for path in (other.projector, other.draft)}
    helpers = (found.projector, found.draft)
    return [*found.parts, *(path for path in helpers if path is not None and path not in needed)]


def question_of(found: FoundModel, files: list[Path]) -> str:
    """Return the question that confirms moving files to the trash."""
    n_bytes = sum(path.stat().st_size for path in files if path.exists())
    return tr("Move {name} to the trash ({files}, {size})?").format(
        name=found.name, files=tr_n("{n} file", "{n} files", len(files)), size=decimal_size(n_bytes)
    )


def move_to_trash(files: Iterable[Path]) -> list[Path]:
    """Move files to the trash; return those that could not be moved."""
    from send2trash import send2trash  # imported here because it starts a service on some systems

    kept = []
    for path in files:
        try:
            send2trash(path)
        except OSError as error:
            log.info("%s was not moved: %s", path.name, error.strerror or type(error).__name__)
            kept.append(path)
    return kept


Mark = Literal["", "loaded", "loading"]  # a library model's state in the engine


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """An open model file; `identity` is None if the model is remote or the file is missing."""

    path: str
    identity: FileIdentity | None

    @classmethod
    def at(cls, path: str) -> OpenedFile:
        """Return the file at a path or remote address."""
        return cls(path, file_identity(path))

    def is_of(self, found: FoundModel) -> bool:
        """Return whether this is `found`, possibly under another path."""
        is_same = self.identity is not None and self.identity == found.identity
        return is_same or self.path == str(found.path)


@dataclass(frozen=True, slots=True)
class RunningModel:
    """The model that is loaded and the one being loaded."""

    loaded: OpenedFile | None = None
    loading: OpenedFile | None = None

    @classmethod
    def at(cls, loaded: str, loading: str) -> RunningModel:
        """Return the models at these paths; "" means none."""
        return cls(
            OpenedFile.at(loaded) if loaded else None, OpenedFile.at(loading) if loading else None
        )

    def mark(self, found: FoundModel) -> Mark:
        """Return a model's state in the engine."""
        if self.loading is not None and self.loading.is_of(found):
            return "loading"
        return "loaded" if self.loaded is not None and self.loaded.is_of(found) else ""
