"""What fits, and where a model goes if nobody says: it takes many plans, too many for one frame."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from app.split.plan_source import PlannerFactory, SplitPlanner
from app.split.settings import SplitSettings
from engine import (
    Choice,
    EngineError,
    Fit,
    Forecaster,
    LoadParams,
    ModelInfo,
    Plan,
    Remedy,
    Room,
    choose,
)

Rooms = tuple[tuple[str, int, float], ...]
"""Device, free bytes, and bytes/s at which it reads, of each."""


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


def find_out(
    question: FitQuestion, factory: PlannerFactory, stopped: threading.Event
) -> FitAnswer | None:
    """Answer a question with a planner of its own; None once nobody wants to know any more."""
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

    rooms = [Room(*room) for room in question.rooms]
    fit = Fit(plan, rooms, question.n_ctx_train, question.n_layer)
    n_ctx = fit.largest_context(question.params)
    return FitAnswer(question, n_ctx, tuple(fit.remedies(question.params)))


def suggestion(
    info: ModelInfo,
    settings: SplitSettings,
    free_bytes: Mapping[str, int],
    factory: PlannerFactory,
    forecaster: Callable[[], Forecaster],
) -> Choice | None:
    """Where to put a model if nobody says, with the context and the rest of `settings`; None where
    no plan can be made for it.

    Args:
        forecaster: makes one that no other thread uses.
    """
    if not settings.ranks:
        return None
    params = settings.load_params(info.path)
    clean = LoadParams(
        info.path,
        params.devices,
        n_ctx=min(params.n_ctx, info.n_ctx_train or params.n_ctx) if params.n_ctx else None,
        kv_type=params.kv_type,
        cpu_threads=params.cpu_threads,
        reserve=params.reserve,
        p2p=params.p2p,
    )
    try:
        with closing(factory(info.path)) as planner:
            return choose(planner, clean, forecaster(), free_bytes=free_bytes)
    except (EngineError, OSError):
        return None
