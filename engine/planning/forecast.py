"""How fast a planned split would be: prompt and answer, and what limits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.planning.facts import DeviceFacts, Links
from engine.planning.prediction import Prediction
from engine.planning.speed import SpeedModel

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.planning.evaluator import Evaluation

PROMPT_TOKENS = 512
"""Of a prompt that is predicted where nobody says how long."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted times.

    Attributes:
        prefill: of a prompt in an empty cache.
        decode: of one token after it.
    """

    prefill: Prediction
    decode: Prediction


def forecast(
    evaluation: Evaluation,
    params: LoadParams,
    facts: Mapping[str, DeviceFacts],
    links: Links,
    n_prompt: int | None = None,
) -> Forecast:
    """Predict the speed of an evaluated split.

    Args:
        facts: of every device of the plan, by its id.
        n_prompt: tokens of the prompt; None for `PROMPT_TOKENS`, or less where the context is.
    """
    plan = evaluation.plan
    speed = SpeedModel([facts[d.device] for d in plan.devices], links, params.cpu_threads)
    n = min(n_prompt or PROMPT_TOKENS, max(1, plan.n_ctx - 1))
    return Forecast(
        prefill=speed.prefill(evaluation.load, n, min(params.n_batch, n)),
        decode=speed.decode(evaluation.load, n),
    )
