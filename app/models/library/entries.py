"""What is known of each model on the disk: its header, and how it would run on these devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import engine
from app.core.engine_sentences import reason_of, translated
from app.core.translation import tr
from app.devices.split.fit import suggestion
from app.devices.split.plan_source import PlannerFactory
from app.devices.split.settings import SplitSettings
from app.models.library.scan import FoundModel
from engine import EngineError, ModelInfo

if TYPE_CHECKING:
    from engine import Forecaster


@dataclass(frozen=True, slots=True)
class Prospect:
    """How a model would run with the split that Tandem suggests for it.

    Attributes:
        fits: whether there is memory for it.
        n_ctx: its context, in tokens.
        devices: ids of the devices that it would use.
        tokens_per_s: predicted speed of answers; 0 where it is unknown.
    """

    fits: bool
    n_ctx: int
    devices: tuple[str, ...]
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """A model on the disk and what is known of it.

    Attributes:
        info: facts of its header; None while they are read, and where they cannot be.
        problem: why it cannot be opened, as a sentence; "" if it can, or nobody knows yet.
        prospect: how it would run; None while that is worked out, and where it cannot be.
        is_judged: whether that was tried.
    """

    found: FoundModel
    info: ModelInfo | None = None
    problem: str = ""
    prospect: Prospect | None = None
    is_judged: bool = False


@dataclass(frozen=True, slots=True)
class Situation:
    """The devices as they are, for predictions on another thread.

    Attributes:
        settings: devices to choose from; the rest is as by default.
        free_bytes: free memory by device.
        forecaster: makes a forecaster that no other thread uses; None while no device is known.
        factory: opens a model file for planning.
    """

    settings: SplitSettings
    free_bytes: Mapping[str, int]
    forecaster: Callable[[], Forecaster] | None
    factory: PlannerFactory


def read_entry(found: FoundModel) -> LibraryEntry:
    """Return a model with the facts of its header, or why it cannot be opened."""
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
    """Predict how a model would run; None where no plan can be made for it."""
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
