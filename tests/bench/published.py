"""Predicted speed beside what others have published for several GPUs.

    python -m tests.bench.published

Rows stand in `published_rows`, engines in `engines`. An engine is calibrated with one speed on one
GPU, or of blocks on one GPU after the other. What it does on several GPUs is predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache

from engine.planning.speed.prediction import Prediction
from engine.planning.speed.rigs import parse_rig
from engine.planning.speed.speed_model import SpeedModel
from tests.bench.engines import LAUNCH_S, EngineLinks, Pace
from tests.bench.published_rows import ROWS, Case, Row

NEAR = 0.25


AS_EXPECTED = Pace()


def is_near(ratio: float) -> bool:
    """Whether it is within a quarter."""
    return abs(ratio - 1) <= NEAR


def predicted(case: Case, pace: Pace = AS_EXPECTED) -> Prediction:
    """What was run, without what the host needs to start kernels."""
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
    """Its speed; the host may be what limits it."""
    found = predicted(case, pace)
    n_gpu = len(parse_rig(case.rig).devices) - 1 if case.mode == "tensor" else 1
    started = case.model.n_layer * case.engine.n_start * n_gpu * LAUNCH_S
    return found.n_tokens / max(found.seconds, started)


LEAST, MOST, STEPS = 0.01, 100.0, 40
"""What an engine does is within these of what is expected; found by halving what lies between."""


@cache
def pace_of(row: Row) -> Pace:
    """The pace with which a row's own speed is predicted.

    What is not known of an engine is how fast it multiplies (prompts), how fast it reads
    (generating), or what its operations cost (where tokens go to experts, as they read little).
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
    """Predicted tokens/s, or how many times the speed of what it is compared with."""
    pace = pace_of(row.paced_by) if row.paced_by else AS_EXPECTED
    speed = tokens_per_s(row.case, pace)
    return speed / tokens_per_s(row.over, pace) if row.over else speed


def lines() -> Iterator[str]:
    """The table."""
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
