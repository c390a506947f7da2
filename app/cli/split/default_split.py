"""Where a model goes if no option says so: the same as in the window."""

from __future__ import annotations

import argparse
from contextlib import closing

from app.cli.output import note
from engine import Alternative, Choice, Forecaster, LoadParams, Planner, choose

PLACES = (
    "plan", "devices", "split", "split_mode", "groups", "n_cpu_blocks", "n_cpu_moe", "kv_on_host",
    "override",
)  # fmt: skip
"""Options that say where a model goes."""


def is_open(args: argparse.Namespace) -> bool:
    """Whether nobody says where the model goes."""
    return all(getattr(args, name) is None for name in PLACES)


def by_default(args: argparse.Namespace, params: LoadParams) -> LoadParams:
    """What to load: `params`, on the devices that should be fastest where nobody says on which.

    Tells why where there is anything to choose from.

    Raises:
        EngineError: the model cannot be run.
    """
    if not is_open(args):
        return params
    forecaster = Forecaster.of_machine()
    if {room.device for room in forecaster.rooms} <= set(params.devices):
        return params
    with closing(Planner(params.path)) as planner:
        choice = choose(planner, params, forecaster)
    note(choice.reason)
    return choice.params


def choice_document(choice: Choice) -> dict[str, object]:
    """For programs."""
    return {
        "reason": choice.reason,
        **_where(choice.params),
        "alternatives": [_alternative(one) for one in choice.alternatives],
    }


def _alternative(one: Alternative) -> dict[str, object]:
    speeds = {"prefill_ts": one.speeds.prefill_ts, "decode_ts": one.speeds.decode_ts}
    return {**_where(one.params), **speeds, "reason": one.limit}


def _where(params: LoadParams) -> dict[str, object]:
    return {
        "devices": params.devices,
        "split_mode": params.split_mode,
        "split": params.split,
        "groups": params.group_sizes,
        "n_cpu_blocks": params.n_cpu_blocks,
        "n_cpu_moe": params.n_cpu_moe,
    }
