"""A measured search in words and points: what the window shows of it; no Qt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from app.split.figures import rank_labels
from engine import Goal, LoadParams, Region, Trial, TuneEstimate, TuneResult

Shape = Literal["single", "tensor", "layer", "groups"]
SHAPES: Final[tuple[Shape, ...]] = ("tensor", "layer", "groups", "single")
SHAPE_TEXTS: Final[dict[Shape, str]] = {
    "tensor": "Tensor", "layer": "Layers", "groups": "Groups", "single": "One device",
}  # fmt: skip
GOAL_TEXTS: Final = {
    "chat": ("Chat", "Prompts and answers of about the same length"),
    "prompts": ("Long prompts", "Documents with a short answer"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A trial as it is drawn.

    Attributes:
        share: of the first of all devices, 0 to 1.
        tokens_per_s: of the goal's request, prompt and answer together; 0 where it cannot run.
    """

    share: float
    tokens_per_s: float
    shape: Shape
    text: str

    @property
    def can_run(self) -> bool:
        return self.tokens_per_s > 0


def point_of(trial: Trial, goal: Goal, devices: Sequence[str]) -> Point:
    """Where a trial stands in the picture.

    Args:
        devices: all that there are to choose from.
    """
    first = devices[0] if devices else ""
    share = sum(
        part for device, part in zip(trial.devices, trial.shares, strict=False) if device == first
    )
    if devices.count(first) > 1:  # virtual ranks of one device: the first rank
        share = trial.shares[0] if trial.shares else 0.0
    return Point(share, request_rate(trial, goal), shape_of(trial.params), trial_text(trial))


def request_rate(trial: Trial, goal: Goal) -> float:
    """Tokens of the goal's request, prompt and answer, per second; 0 where it cannot run."""
    if trial.sample is None:
        return 0.0
    return (goal.n_prompt + goal.n_gen) / trial.seconds(goal)


def shape_of(params: LoadParams) -> Shape:
    if len(params.devices) == 1:
        return "single"
    return "layer" if params.split_mode == "layer" else _cut(params.split_mode)


def _cut(mode: str) -> Shape:
    return "groups" if mode == "groups" else "tensor"


def trial_text(trial: Trial) -> str:
    """ "Tensor: GPU 0 62.5 %, GPU 1 37.5 %"."""
    shape = SHAPE_TEXTS[shape_of(trial.params)]
    labels = rank_labels(trial.devices)
    if len(labels) == 1:
        return f"{shape}: {labels[0]}"
    parts = [
        f"{label} {100 * part:.1f} %" for label, part in zip(labels, trial.shares, strict=False)
    ]
    return f"{shape}: {', '.join(parts)}"


def estimate_text(estimate: TuneEstimate) -> str:
    """What a person is told before anything happens."""
    choices = (
        "one way to place the model" if estimate.n_choices == 1
        else f"{estimate.n_choices} sets of devices and modes"
    )  # fmt: skip
    return (
        f"Tries {choices}: about {estimate.n_trials} short runs of {estimate.trial_s:.1f} s, "
        f"{duration_text(estimate.seconds)} in all, {duration_text(estimate.budget_s)} at most."
    )


def duration_text(seconds: float) -> str:
    """ "45 s", "3 min", "2 min 30 s"."""
    whole = max(1, round(seconds))
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def region_text(region: Region) -> str:
    """Why nothing is tried there."""
    name = rank_labels(region.devices)[0]
    return f"{name} from {100 * region.start:.0f} to {100 * region.stop:.0f} %: {region.problem}"


def result_text(result: TuneResult) -> str:
    """The outcome in a sentence or two."""
    winner = result.winner
    if winner is None:
        return "Nothing could be run. " + result.reason
    text = f"Best is {trial_text(winner)}. {result.reason}"
    return text if result.is_complete else f"{text} The search ended early."
