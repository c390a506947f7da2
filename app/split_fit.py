"""What fits, found out beside the window: it takes many plans, too many for one frame."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.plan_source import PlannerFactory, PlannerLike
from app.split_settings import SplitSettings
from engine import EngineError, Fit, LoadParams, ModelInfo, Plan, Remedy, Room

log = logging.getLogger(__name__)

Rooms = tuple[tuple[str, int, float], ...]
"""Device, free bytes, and bytes/s at which it reads, of each."""

PAUSE_MS = 150
"""A question is looked into when no other one came for that long."""

JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class FitQuestion:
    """What to find out: about what is to be loaded, and where."""

    params: LoadParams
    rooms: Rooms
    n_ctx_train: int
    n_layer: int


@dataclass(frozen=True, slots=True)
class FitAnswer:
    """What was found out.

    Attributes:
        n_ctx: the longest context that fits; None where the split cannot be made.
        remedies: what to do where the settings do not fit.
    """

    question: FitQuestion
    n_ctx: int | None
    remedies: tuple[Remedy, ...]


class _StoppedError(Exception):
    """Nobody wants to know any more."""


class FitFinder(QObject):
    """Answers the last question that was asked, with a planner of its own.

    Args:
        planner_factory: opens a model file for planning.
    """

    found = Signal(object)  # FitAnswer

    _ended = Signal(object)  # FitAnswer or None, from the thread

    def __init__(self, planner_factory: PlannerFactory, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._factory = planner_factory
        self._wanted: FitQuestion | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()
        self._timer = QTimer(self, singleShot=True, interval=PAUSE_MS)
        self._timer.timeout.connect(self._start)
        self._ended.connect(self._on_ended)

    def ask(self, question: FitQuestion | None) -> None:
        """Find this out in a moment, unless another question comes; None is nothing."""
        if question == self._wanted:
            return
        self._wanted = question
        self._is_stopped.set()
        if question is None:
            self._timer.stop()
        else:
            self._timer.start()

    def stop(self) -> None:
        """Give up, and wait for the thread."""
        self.ask(None)
        if self._thread is not None:
            self._thread.join(JOIN_S)

    @Slot()
    def _start(self) -> None:
        if self._thread is not None or self._wanted is None:
            return  # when it ends, the next one begins
        question = self._wanted
        stopped = self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=lambda: self._ended.emit(self._answer(question, stopped)),
            name="tandem-fit",
            daemon=True,
        )
        self._thread.start()

    @Slot(object)
    def _on_ended(self, answer: FitAnswer | None) -> None:
        self._thread = None
        if answer is not None and answer.question == self._wanted:
            self.found.emit(answer)
        elif self._wanted is not None and not self._timer.isActive():
            self._start()

    def _answer(self, question: FitQuestion, stopped: threading.Event) -> FitAnswer | None:
        """On the thread; None where it was stopped."""
        try:
            with closing(self._factory(question.params.path)) as planner:
                return _answer(question, planner, stopped)
        except _StoppedError:
            return None
        except Exception:  # the panel goes on without it
            log.exception("what fits could not be found out")
            return FitAnswer(question, None, ())


def _answer(question: FitQuestion, planner: PlannerLike, stopped: threading.Event) -> FitAnswer:
    def plan(params: LoadParams, free: Mapping[str, int]) -> Plan:
        if stopped.is_set():
            raise _StoppedError
        return planner.evaluate(params, free).plan

    rooms = [Room(*room) for room in question.rooms]
    fit = Fit(plan, rooms, question.n_ctx_train, question.n_layer)
    try:
        n_ctx = fit.largest_context(question.params)
        remedies = fit.remedies(question.params)
    except EngineError:
        return FitAnswer(question, None, ())
    return FitAnswer(question, n_ctx, tuple(remedies))


def suggestion(
    info: ModelInfo, settings: SplitSettings, rooms: Rooms, factory: PlannerFactory
) -> LoadParams | None:
    """Where to put a model if nobody says, with the context and the rest of `settings`; None where
    no plan can be made for it."""
    if not settings.ranks:
        return None
    try:
        with closing(factory(info.path)) as planner:
            fit = Fit(
                lambda params, free: planner.evaluate(params, free).plan,
                [Room(*room) for room in rooms],
                info.n_ctx_train,
                info.n_layer,
            )
            params = settings.load_params(info.path)
            n_ctx = min(params.n_ctx, info.n_ctx_train or params.n_ctx) if params.n_ctx else None
            clean = LoadParams(
                info.path,
                params.devices,
                n_ctx=n_ctx,
                kv_type=params.kv_type,
                cpu_threads=params.cpu_threads,
                reserve=params.reserve,
            )
            return fit.default_split(clean)
    except (EngineError, OSError):
        return None
