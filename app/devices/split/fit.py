"""The longest context that fits, remedies where nothing does, and the split a model starts with.

Each takes many plans, too many for one frame: this runs on threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer, Signal, Slot

import engine
from app.core.background import LatestJob
from app.devices.split.plan_source import PlannerFactory, SplitPlanner
from app.devices.split.settings import SplitSettings
from engine import (
    LOAD_DEFAULTS,
    SHARED_LOAD_OPTIONS,
    EngineError,
    LoadParams,
    ModelInfo,
    is_cpu,
)

if TYPE_CHECKING:
    from engine import Choice, Forecaster, Plan, Remedy

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


def _answer(question: FitQuestion, planner: SplitPlanner, stopped: threading.Event) -> FitAnswer:
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
) -> tuple[SplitPlanner | None, Choice | None]:
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
    planner: SplitPlanner,
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
    info: ModelInfo, params: LoadParams, free_bytes: Mapping[str, int], planner: SplitPlanner
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
