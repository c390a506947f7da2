"""The plan for a measured search and its expected duration, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import EngineError, Sentence, either
from engine.load_params import SPLIT_MODES, LoadParams
from engine.planning.search.model_space import ModelSpace
from engine.planning.search.results import GOALS, Goal
from engine.planning.search.split_search import expected_trials

if TYPE_CHECKING:
    from engine.planning.planner import Planner
    from engine.planning.search.results import Speeds
    from engine.planning.speed.forecast import Forecaster

LOAD_BYTES_PER_S = 5e8
"""Bytes/s at which a cached file is loaded to devices, or one split is turned into another."""

N_PROMPT, MIN_PROMPT = 256, 128
N_GEN, MIN_GEN = 32, 16
"""Prompt and generated tokens per trial; the smaller numbers if a trial would exceed `LONG_S`."""

REPETITIONS = 2

N_WARM_UP = 4
"""Number of tokens that a trial generates before the measurement."""

LONG_S = 4.0
"""Duration above which a trial is shortened, in seconds."""

MIN_S, MAX_S = 20.0, 600.0
"""Bounds for the default budget, in seconds."""

SPARE = 1.25
"""Ratio of the default budget to the expected duration."""


@dataclass(frozen=True, slots=True)
class TrialSize:
    """Numbers of prompt and generated tokens in a trial, each measured `REPETITIONS` times."""

    n_prompt: int
    n_gen: int

    def seconds(self, prefill_ts: float, decode_ts: float) -> float:
        """Return the duration of a trial at these speeds, in seconds."""
        n_decoded = REPETITIONS * self.n_gen + N_WARM_UP
        return REPETITIONS * self.n_prompt / prefill_ts + n_decoded / decode_ts

    def fitting(self, prefill_ts: float, decode_ts: float) -> TrialSize:
        """Return this size, or a smaller one if a trial would take long."""
        if self.seconds(prefill_ts, decode_ts) <= LONG_S:
            return self
        return TrialSize(min(self.n_prompt, MIN_PROMPT), min(self.n_gen, MIN_GEN))


@dataclass(frozen=True, slots=True)
class TuneEstimate:
    """Expected extent of a search, shown before it starts; `budget_s` limits the search."""

    n_trials: int
    trial_s: float
    budget_s: float
    n_choices: int
    size: TrialSize

    @property
    def seconds(self) -> float:
        """Expected duration of the search, in seconds."""
        return min(self.budget_s, self.n_trials * self.trial_s)

    @property
    def sentence(self) -> Sentence:
        """The estimate as a sentence for the user."""
        return Sentence(
            "About {n} trials of {trial_s:.1f} s each; {budget_s:.0f} s at most.",
            n=self.n_trials, trial_s=self.trial_s, budget_s=self.budget_s,
        )  # fmt: skip


class TunePlan:
    """A search that is about to start: its splits and its expected extent.

    Args:
        params: parameters that all trials share; its devices are the candidates.
        budget_s: maximum duration in seconds; None means the expected one, within bounds.

    Raises:
        EngineError: nothing fits, or a device does not exist on this machine.
    """

    def __init__(
        self, planner: Planner, params: LoadParams, forecaster: Forecaster, goal: str = "chat",
        budget_s: float | None = None, free_bytes: Mapping[str, int] | None = None,
        modes: Sequence[str] = SPLIT_MODES,
    ) -> None:  # fmt: skip
        self.goal: Goal = goal_named(goal)
        if budget_s is not None and not 0 < budget_s <= 86400:  # false for NaN as well
            raise EngineError("The time for a search must be between 1 and 86400 seconds.")
        self.params = params
        self.n_ctx = planner.plan(params).n_ctx
        if self.n_ctx < 2:
            raise EngineError("A search needs a context of at least 2 tokens.")
        self.space = ModelSpace(planner, params, self.goal, forecaster, free_bytes, modes)
        self.estimate = self._estimate(planner.info.n_bytes, budget_s)

    def _estimate(self, n_bytes: int, budget_s: float | None) -> TuneEstimate:
        families = self.space.families()
        if not families:
            raise EngineError(
                "No split of this model fits into the free memory of these devices.",
                "Choose a smaller context, or more devices.",
            )
        speeds = self.space.expected(families[0])
        load_s = n_bytes / LOAD_BYTES_PER_S
        size = TrialSize(min(N_PROMPT, self.n_ctx), min(N_GEN, self.n_ctx))
        size = size.fitting(speeds.prefill_ts, speeds.decode_ts)
        trial_s = load_s + size.seconds(speeds.prefill_ts, speeds.decode_ts)
        n_trials = expected_trials(families)
        if budget_s is None:
            budget_s = min(MAX_S, max(MIN_S, SPARE * n_trials * trial_s))
        n_possible = max(1, int(budget_s / trial_s))
        return TuneEstimate(min(n_trials, n_possible), trial_s, budget_s, len(families), size)


def goal_named(name: str) -> Goal:
    """Return a goal by its name.

    Raises:
        EngineError: there is no such goal.
    """
    if name not in GOALS:
        raise EngineError(
            "There is no goal '{name}'.", "Use {names}.", name=name, names=either(tuple(GOALS))
        )
    return GOALS[name]


@dataclass(frozen=True, slots=True)
class Alternative:
    """A split with its predicted speed.

    Attributes:
        n_sum: number of all-reduces per token, over all groups.
        sum_s: seconds that the slowest all-reduce takes.
        link_s: seconds per token spent on links.
        limit: sentence that names the bottleneck in decoding.
        why: that bottleneck as the end of another sentence.
    """

    params: LoadParams
    speeds: Speeds
    seconds: float
    n_sum: int
    sum_s: float
    link_s: float
    limit: str
    why: str = ""
