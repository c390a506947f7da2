"""Tuning results as text and graph points for the window; no Qt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from app.core.translation import tr, tr_later, tr_n, translated
from app.core.units import decimal
from app.devices.split.figures import rank_labels
from engine import LoadParams

if TYPE_CHECKING:
    from engine import Goal, Trial, TuneEstimate, TuneResult

Shape = Literal["single", "tensor", "layer", "groups"]
SHAPES: Final[tuple[Shape, ...]] = ("tensor", "layer", "groups", "single")
SHAPE_TEXTS: Final[dict[Shape, str]] = {
    "tensor": tr_later("Tensor"), "layer": tr_later("Layers"), "groups": tr_later("Groups"),
    "single": tr_later("One device"),
}  # fmt: skip
GOAL_TEXTS: Final = {
    "chat": (tr_later("Chat"), tr_later("Prompts and answers of similar length")),
    "prompts": (tr_later("Long prompts"), tr_later("Long documents with short answers")),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A trial as a point in the graph.

    Attributes:
        share: the first device's share, 0 to 1.
        tokens_per_s: speed over the goal's prompt and answer together; 0 if it cannot run.
        text: the split as text.
    """

    share: float
    tokens_per_s: float
    shape: Shape
    text: str

    @property
    def can_run(self) -> bool:
        """Whether the trial ran."""
        return self.tokens_per_s > 0


def point_of(trial: Trial, goal: Goal, devices: Sequence[str]) -> Point:
    """Return a trial as a point; `devices` are all devices that the search may use."""
    first = devices[0] if devices else ""
    share = sum(
        part for device, part in zip(trial.devices, trial.shares, strict=False) if device == first
    )
    if devices.count(first) > 1:  # virtual ranks on one device: the first rank's share
        share = trial.shares[0] if trial.shares else 0.0
    return Point(share, request_rate(trial, goal), shape_of(trial.params), trial_text(trial))


def request_rate(trial: Trial, goal: Goal) -> float:
    """Return tokens/s over the goal's prompt and answer together; 0 if it cannot run."""
    if trial.sample is None:
        return 0.0
    return (goal.n_prompt + goal.n_gen) / trial.seconds(goal)


def shape_of(params: LoadParams) -> Shape:
    """Return how these load parameters split the model."""
    if len(params.devices) == 1:
        return "single"
    return next((shape for shape in SHAPES if shape == params.split_mode), "tensor")


def trial_text(trial: Trial) -> str:
    """Return a trial's split as "Tensor: GPU 0 62.5 %, GPU 1 37.5 %"."""
    shape = tr(SHAPE_TEXTS[shape_of(trial.params)])
    labels = rank_labels(trial.devices)
    if len(labels) == 1:
        return f"{shape}: {labels[0]}"
    parts = [
        f"{label} {decimal(f'{100 * part:.1f}')} %"
        for label, part in zip(labels, trial.shares, strict=False)
    ]
    return f"{shape}: {', '.join(parts)}"


def estimate_text(estimate: TuneEstimate) -> str:
    """Return a search's number of trials and duration as text."""
    n = estimate.n_choices
    return tr_n(
        "Tries {n} combination of devices and modes, in about {n_runs} runs of {run_s} s each. "
        "This takes {total} in total, {limit} at most.",
        "Tries {n} combinations of devices and modes, in about {n_runs} runs of {run_s} s each. "
        "This takes {total} in total, {limit} at most.",
        n,
        n_runs=estimate.n_trials,
        run_s=decimal(f"{estimate.trial_s:.1f}"),
        total=duration_text(estimate.seconds),
        limit=duration_text(estimate.budget_s),
    )


def duration_text(seconds: float) -> str:
    """Return a duration as "45 s", "3 min" or "2 min 30 s"."""
    whole = max(1, round(seconds))
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def result_text(result: TuneResult) -> str:
    """Return a search's result in a sentence or two."""
    winner = result.winner
    if winner is None:
        return translated(result.reason) or tr("No split could be run.")
    ended = "" if result.is_complete else tr("The search ended early.")
    parts = (
        tr("Best split: “{split}”.").format(split=trial_text(winner)),
        translated(result.reason),
        translated(result.note),
        ended,
    )
    return " ".join(filter(None, parts))
