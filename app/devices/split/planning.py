"""Plans of the selected model, the longest context that fits, and the split a model starts with.

A plan fits into a frame and is made in place; the other two take many plans and run on threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

import engine
from app.core.background import LatestJob
from app.devices.split.settings import SplitSettings
from engine import LOAD_DEFAULTS, SHARED_LOAD_OPTIONS, EngineError, LoadParams, ModelInfo, is_cpu

if TYPE_CHECKING:
    from engine import Choice, Evaluation, Forecaster, Plan, Planner, Positions, Remedy

MAX_KNOWN: Final = 64
"""Number of (parameters, handle) pairs whose positions are remembered."""
FREE_STEP: Final = 256 << 20
"""Step in bytes to which free memory is rounded, so that its flicker needs no new plans."""


PlannerFactory = Callable[[str], "Planner"]
"""Opens the model file at a path for planning."""


def open_planner(path: str) -> Planner:
    """Open a model file with the engine's planner."""
    return engine.Planner(path)


class PlanSource:
    """Plans splits of one model at a time.

    Args:
        factory: opens a model file, as `engine.Planner` does.

    Attributes:
        info: the selected model.
    """

    def __init__(self, factory: PlannerFactory) -> None:
        self._factory = factory
        self._planner: Planner | None = None
        self._lock = threading.Lock()
        self._offered: tuple[str, Planner] | None = None
        self._known: tuple[LoadParams, Evaluation] | None = None
        self._positions: dict[tuple[LoadParams, int], Positions] = {}
        self._free: dict[str, int] = {}
        self.info: ModelInfo | None = None

    @property
    def free(self) -> Mapping[str, int]:
        """Free bytes by device id that plans are made with, in steps of `FREE_STEP`."""
        return self._free

    def open(self, info: ModelInfo | None) -> None:
        """Use another model, or none.

        Raises:
            EngineError: no plan can be made for the model.
        """
        if self._planner is not None:
            self._planner.close()
        self.info, self._planner = info, None
        self._forget()
        if info is not None:
            self._planner = self._take(info.path) or self._factory(info.path)

    def offer(self, path: str, planner: Planner | None) -> None:
        """Give a planner of a file to the next `open`; for other threads, which read headers."""
        with self._lock:
            old, self._offered = self._offered, (path, planner) if planner else None
        if old is not None:
            old[1].close()

    def _take(self, path: str) -> Planner | None:
        """Return what was offered for a file, if anything."""
        with self._lock:
            if self._offered is None or self._offered[0] != path:
                return None
            (_, planner), self._offered = self._offered, None
            return planner

    def set_free(self, free: Mapping[str, int]) -> None:
        """Set the free bytes by device id; they decide how weights are stored."""
        rounded = {device: size // FREE_STEP * FREE_STEP for device, size in free.items()}
        if rounded != self._free:
            self._free = rounded
            self._forget()

    def evaluate(self, settings: SplitSettings) -> Evaluation | None:
        """Return what the settings take; None without a model.

        Raises:
            EngineError: the split cannot be made.
        """
        if self._planner is None or self.info is None:
            return None
        params = settings.load_params(self.info.path)
        if self._known is None or self._known[0] != params:
            self._known = params, self._planner.evaluate(params, self._free)
        return self._known[1]

    def plan(self, settings: SplitSettings) -> Plan | None:
        """Return the bytes on each device; see `evaluate`."""
        evaluation = self.evaluate(settings)
        return evaluation.plan if evaluation else None

    def positions(self, settings: SplitSettings, handle: int) -> Positions | None:
        """Return where the boundary after active rank number `handle` can be; None without a model.

        The positions stay the same while the boundary moves, so they are remembered.

        Raises:
            EngineError: the present split cannot be made.
        """
        if self._planner is None or self.info is None:
            return None
        params = settings.load_params(self.info.path)
        at_end = settings.with_boundary(handle, 1.0).shares  # the same wherever the handle is
        key = replace(params, split=tuple(round(share, 9) for share in at_end)), handle
        if key not in self._positions:
            if len(self._positions) >= MAX_KNOWN:
                self._positions.clear()
            self._positions[key] = self._planner.positions(params, handle, self._free)
        return self._positions[key]

    def boundary(self, settings: SplitSettings, handle: int) -> float:
        """Return where a boundary is in the plan, 0 to 1; without a model, in the settings."""
        plan = self.plan(settings)
        if plan is None:
            return settings.boundary(handle)
        return sum(device.effective for device in plan.devices[: handle + 1])

    def dragged(self, settings: SplitSettings, handle: int, position: float) -> SplitSettings:
        """Return settings with a boundary at the possible place nearest to `position`."""
        with suppress(EngineError):  # without a plan, any place is possible
            positions = self.positions(settings, handle)
            if positions is not None and settings.can_move(handle):
                return settings.with_split(positions[positions.nearest(position)].split)
        return settings.with_boundary(handle, position)

    def stepped(self, settings: SplitSettings, handle: int, notches: int) -> SplitSettings:
        """Return settings with a boundary moved by `notches` possible places."""
        if not settings.can_move(handle):
            return settings
        with suppress(EngineError):
            positions = self.positions(settings, handle)
            if positions is not None:
                index = positions.nearest(self.boundary(settings, handle))
                if abs(notches) >= len(positions):
                    index = len(positions) - 1 if notches > 0 else 0
                else:
                    for _ in range(abs(notches)):
                        index = positions.after(index) if notches > 0 else positions.before(index)
                return settings.with_split(positions[index].split)
        return settings.with_boundary(handle, settings.boundary(handle) + notches / 100)

    def _forget(self) -> None:
        self._known = None
        self._positions.clear()


Rooms = tuple[tuple[str, int, float], ...]
"""Device id, free bytes, and read speed in bytes per second of each device."""


@dataclass(frozen=True, slots=True)
class FitQuestion:
    """A load whose longest context and remedies are wanted.

    Attributes:
        params: the load.
        rooms: free memory and speed of the devices.
        n_ctx_train: longest context that the model was trained for; 0 is unknown.
        n_layer: number of blocks of the model.
    """

    params: LoadParams
    rooms: Rooms
    n_ctx_train: int
    n_layer: int


@dataclass(frozen=True, slots=True)
class FitAnswer:
    """The answer to a `FitQuestion`.

    Attributes:
        n_ctx: longest context that fits, in tokens; None where the split cannot be made.
        remedies: changes that make the load fit, where it does not.
    """

    question: FitQuestion
    n_ctx: int | None
    remedies: tuple[Remedy, ...]


class _StoppedError(Exception):
    """The question is out of date."""


def find_out(
    question: FitQuestion, factory: PlannerFactory, stopped: threading.Event
) -> FitAnswer | None:
    """Answer a question with a planner of its own; return None once `stopped` is set."""
    try:
        with closing(factory(question.params.path)) as planner:
            return _answer(question, planner, stopped)
    except _StoppedError:
        return None
    except (EngineError, OSError):
        return FitAnswer(question, None, ())


def _answer(question: FitQuestion, planner: Planner, stopped: threading.Event) -> FitAnswer:
    def plan(params: LoadParams, free: Mapping[str, int]) -> Plan:
        if stopped.is_set():
            raise _StoppedError
        return planner.evaluate(params, free).plan

    rooms = [engine.Room(*room) for room in question.rooms]
    fit = engine.Fit(plan, rooms, question.n_ctx_train, question.n_layer)
    n_ctx = fit.largest_context(question.params)
    return FitAnswer(question, n_ctx, tuple(fit.remedies(question.params)))


def first_plan(
    info: ModelInfo,
    settings: SplitSettings,
    free_bytes: Mapping[str, int],
    factory: PlannerFactory,
    forecaster: Callable[[], Forecaster] | None,
) -> tuple[Planner | None, Choice | None]:
    """Open a model's file and plan the split that it will start with.

    Args:
        forecaster: see `suggestion`; None keeps the split of `settings`.

    Returns:
        The planner, None if the file cannot be planned for; and what was chosen, if anything.
    """
    try:
        planner = factory(info.path)
    except (EngineError, OSError):
        return None, None
    chosen = None
    if forecaster is not None:
        chosen = suggestion(info, settings, free_bytes, planner, forecaster)
    with suppress(EngineError, OSError):  # it is said when the split is shown
        planner.evaluate(chosen.params if chosen else settings.load_params(info.path), free_bytes)
    return planner, chosen


def suggestion(
    info: ModelInfo,
    settings: SplitSettings,
    free_bytes: Mapping[str, int],
    planner: Planner,
    forecaster: Callable[[], Forecaster],
) -> Choice | None:
    """Choose devices and split for a model that nobody has chosen them for.

    Context and the other settings are those of `settings`; a context that nobody has chosen is the
    longest that fits comfortably.

    Args:
        planner: plans for the model.
        forecaster: makes a forecaster that no other thread uses.

    Returns:
        The choice; None where no plan can be made for the model.
    """
    if not settings.ranks:
        return None
    params = settings.load_params(info.path)
    own = {n: LOAD_DEFAULTS[n] for n, one in SHARED_LOAD_OPTIONS.items() if one.of_model}
    clean = replace(
        params, split=None, split_mode="tensor", groups=None, **own,
        n_ctx=min(params.n_ctx, info.n_ctx_train or params.n_ctx) if params.n_ctx else None,
        mmproj_device=params.mmproj_device if is_cpu(params.mmproj_device) else "auto",
    )  # fmt: skip
    try:
        choice = engine.choose_machines(planner, clean, forecaster(), free_bytes=free_bytes)
        if params.n_ctx is not None:
            return choice
        n_ctx = _comfortable_context(info, choice.params, free_bytes, planner)
        return replace(choice, params=replace(choice.params, n_ctx=n_ctx))
    except (EngineError, OSError):
        return None


def _comfortable_context(
    info: ModelInfo, params: LoadParams, free_bytes: Mapping[str, int], planner: Planner
) -> int | None:
    """Return the longest context that leaves memory for others; None for the engine's default.

    Raises:
        EngineError: the split cannot be made.
    """
    fit = engine.Fit.comfortable(
        lambda load, free: planner.evaluate(load, free).plan,
        free_bytes, info.n_ctx_train, info.n_layer,
    )  # fmt: skip
    n_ctx = fit.largest_context(params)
    return n_ctx if n_ctx > params.context_for(info.n_ctx_train) else None


PAUSE_MS = 150
"""Milliseconds without another question after which a question is looked into."""


class FitFinder(QObject):
    """Answers the last question that was asked, on a thread with its own planner.

    Args:
        planner_factory: opens a model file for planning.
    """

    found = Signal(object)  # FitAnswer

    def __init__(self, planner_factory: PlannerFactory, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._factory = planner_factory
        self._wanted: FitQuestion | None = None
        self._is_stopped = threading.Event()
        self._job = LatestJob("tandem-fit", self)
        self._job.done.connect(self._on_done)
        self._timer = QTimer(self, singleShot=True, interval=PAUSE_MS)
        self._timer.timeout.connect(self._start)

    def ask(self, question: FitQuestion | None) -> None:
        """Look into `question` in a moment, in place of any earlier one; None asks nothing."""
        if question == self._wanted:
            return
        self._wanted = question
        self._is_stopped.set()
        self._job.drop()
        if question is None:
            self._timer.stop()
        else:
            self._timer.start()

    def stop(self) -> None:
        """Drop the question and wait for the thread."""
        self.ask(None)
        self._job.close()

    @Slot()
    def _start(self) -> None:
        question, factory = self._wanted, self._factory
        if question is not None:
            stopped = self._is_stopped = threading.Event()
            self._job.run(lambda: find_out(question, factory, stopped))

    @Slot(object)
    def _on_done(self, answer: FitAnswer | None) -> None:
        if answer is not None and answer.question == self._wanted:
            self.found.emit(answer)
