"""Table of predicted and published speeds on several GPUs.

    python -m tests.bench.published

The rows are in `published_rows`, the engines in `engines`. An engine is calibrated with one speed
on one GPU, or of blocks on one GPU after the other; its speed on several GPUs is predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache

from engine.planning.speed.facts import Prediction
from engine.planning.speed.rigs import parse_rig
from engine.planning.speed.speed_model import SpeedModel
from tests.bench.engines import LAUNCH_S, EngineLinks, Pace
from tests.bench.published_rows import ROWS, Case, Row

NEAR = 0.25
"""Largest error of a prediction that counts as near."""

AS_EXPECTED = Pace()


def is_near(ratio: float) -> bool:
    """Return whether a ratio of predicted to published speed is within a quarter of 1."""
    return abs(ratio - 1) <= NEAR


def predicted(case: Case, pace: Pace = AS_EXPECTED) -> Prediction:
    """Return the prediction for a case, without the host's time to start kernels."""
    rig = parse_rig(case.rig)
    gpus = [device for device in rig.devices if device.kind == "cuda"]
    facts = [case.engine.facts(rig.facts[gpu.id], gpu.name, pace) for gpu in gpus]
    shares = case.shares or (1 / len(gpus),) * len(gpus)
    speed = SpeedModel(facts, EngineLinks(rig.links, case.engine))
    load = case.model.load(shares, case.mode, is_prompt=case.n_prompt > 0)
    if case.n_prompt:
        return speed.prefill(load, case.n_prompt, case.n_prompt, case.context)
    return speed.decode(load, case.context)


def tokens_per_s(case: Case, pace: Pace = AS_EXPECTED) -> float:
    """Return the predicted speed of a case, which the host's time to start kernels may limit."""
    found = predicted(case, pace)
    n_gpu = len(parse_rig(case.rig).devices) - 1 if case.mode == "tensor" else 1
    started = case.model.n_layer * case.engine.n_start * n_gpu * LAUNCH_S
    return found.n_tokens / max(found.seconds, started)


LEAST, MOST, STEPS = 0.01, 100.0, 40
"""Bounds of a pace and number of steps of the search for it, which halves the range each time."""


@cache
def pace_of(row: Row) -> Pace:
    """Return the pace with which the prediction for a row is its published speed.

    Each kind of row tells one property of an engine: prompts how fast it multiplies, decode how
    fast it reads, and decode of routed models what its operations cost, as these read little.
    """
    is_routed = row.case.model.all_experts > 0
    name = "multiplies" if row.case.n_prompt else "starts" if is_routed else "reads"
    low, high = LEAST, MOST
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        is_slow = predicted(row.case, Pace(**{name: middle})).tokens_per_s < row.published
        low, high = (middle, high) if is_slow else (low, middle)
    return Pace(**{name: high})


def speed_of(row: Row) -> float:
    """Return the predicted tokens per second of a row, or its ratio to the speed of `row.over`."""
    pace = pace_of(row.paced_by) if row.paced_by else AS_EXPECTED
    speed = tokens_per_s(row.case, pace)
    return speed / tokens_per_s(row.over, pace) if row.over else speed


def lines() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| source, model | rig, split | published | predicted | ratio | not within 25 %, as |"
    yield "|---|---|---|---|---|---|"
    for row in ROWS:
        found = speed_of(row)
        cells = (
            row.name, f"{row.case.rig}, {row.case.mode}", f"{row.published:g}", f"{found:.4g}",
            f"{found / row.published:.2f}", row.why,
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
