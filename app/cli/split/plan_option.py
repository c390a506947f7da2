"""The argument of `--plan`: a saved plan, an exported plan's file, or the fastest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from engine import (
    AUTO_PLAN,
    EngineError,
    LoadParams,
    PlanBadge,
    Planner,
    PlanStore,
    fastest_plan,
    import_plan,
    list_devices,
    model_key,
)

if TYPE_CHECKING:
    from engine import BenchResult


def plan_params(name: str, path: str) -> LoadParams:
    """Return the load parameters of a plan.

    Args:
        name: name of a plan, file of an exported one, or "auto".
        path: file of the model.

    Raises:
        EngineError: there is no such plan, none fits, or it needs a device that is not here.
    """
    devices = list_devices()
    if _is_file(name):
        return import_plan(Path(name)).resolved(path, devices)
    store, key = PlanStore.of_user(), model_key(path)
    if name.lower() != AUTO_PLAN:
        return store.find(key, name).resolved(path, devices)
    with closing(Planner(path)) as planner:
        best = fastest_plan(store.plans(key), planner, path, devices)
    if best is None:
        raise EngineError(
            f"{key.name} has no plan that fits into the free memory.",
            "Save one with: tandem plan MODEL --save NAME.",
        )
    return best.resolved(path, devices)


def _is_file(name: str) -> bool:
    return name.lower().endswith(".json")


def note_speed(name: str, path: str, results: Sequence[BenchResult]) -> None:
    """Record measured speeds of prompts and generation in a saved plan.

    Nothing happens if one of them was not measured, or `name` is not a saved plan.
    """
    if _is_file(name) or name.lower() == AUTO_PLAN:
        return
    prefill = [r for r in results if not r.test.n_gen and not r.test.n_depth]
    decode = [r for r in results if not r.test.n_prompt]
    if not prefill or not decode:
        return
    store, key = PlanStore.of_user(), model_key(path)
    n_ctx = max(r.test.n_ctx for r in (prefill[0], decode[0]))
    badge = PlanBadge(prefill[0].avg_ts, decode[0].avg_ts, n_ctx, now())
    store.save(key, replace(store.find(key, name), badge=badge))


def now() -> str:
    """Return the present time, UTC in ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
