"""The default split, the same as in the window."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import engine  # its device list and planner are imported on first use
from app.cli.output import note, remedy_here
from engine import LOAD_OPTIONS, LoadParams

if TYPE_CHECKING:
    from engine import Alternative, Choice, Fit, Remedy

PLACES = (
    "plan", "devices", "split", "split_mode", "groups", "n_cpu_blocks", "n_cpu_moe", "kv_on_host",
    "override",
)  # fmt: skip
"""Options that determine where the model is placed."""


def has_no_choice(args: argparse.Namespace) -> bool:
    """Return whether no option determines where the model is placed."""
    return all(getattr(args, name) is None for name in PLACES)


def with_default_split(args: argparse.Namespace, params: LoadParams) -> LoadParams:
    """Return `params` on the devices predicted to be fastest, unless an option places the model.

    Write the reason for a choice to stderr; if no GPU is usable, also write how to enable one.

    Raises:
        EngineError: the model cannot be run.
    """
    if not has_no_choice(args):
        return params
    devices = engine.list_devices()
    gpu = engine.find_gpu_path(devices)
    if gpu.remedy:
        note(f"{gpu.sentence}\nTo use it: {remedy_here(gpu.remedy)}")
    if {device.id for device in devices if device.usable} <= set(params.devices):
        return params
    with closing(engine.Planner(params.path)) as planner:
        choice = engine.choose(planner, params, engine.Forecaster.of_machine())
    note(choice.reason)
    return choice.params


def with_comfortable_context(args: argparse.Namespace, params: LoadParams) -> LoadParams:
    """Return `params` with the longest context that leaves memory for other programs.

    As in the window, the model's own context is the limit. Since requests share the cache, parallel
    requests are added only afterwards, as far as they fit. `params` are unchanged if an option sets
    the context, or if nothing longer than the default fits.
    """
    if args.ctx is not None or args.plan is not None:
        return params
    info = engine.read_model_info(params.path)
    n_train = round(info.n_ctx_train * max(1.0, params.rope_factor))
    with closing(engine.Planner(params.path)) as planner:
        fit = engine.Fit.comfortable(
            planner.plan, engine.Forecaster.of_machine().free_bytes, n_train, info.n_layer
        )
        least = params.parallel if args.parallel is not None else 1
        n_ctx = fit.largest_context(replace(params, parallel=least))
        if n_ctx <= params.context_for(n_train):
            return params
        longest = replace(params, n_ctx=n_ctx)
        parallel = next(
            (
                n
                for n in range(params.parallel, least, -1)
                if fit.fits(replace(longest, parallel=n))
            ),
            least,
        )
    return replace(longest, parallel=parallel)


def choice_document(choice: Choice) -> dict[str, object]:
    """Return a choice as a JSON-ready dictionary."""
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


@dataclass(frozen=True, slots=True)
class RoomLeft:
    """The longest context that fits, and how to make the plan fit.

    Attributes:
        max_ctx: longest context that fits with this split, in tokens; 0 if none fits.
        remedies: ways to make the plan fit, ready for JSON; empty if it already fits.
    """

    max_ctx: int
    remedies: tuple[dict[str, object], ...]


def room_left(fit: Fit, params: LoadParams) -> RoomLeft:
    """Compute how much room `params` leave.

    Raises:
        EngineError: the split is impossible.
    """
    remedies = tuple(_document(remedy, params) for remedy in fit.remedies(params))
    return RoomLeft(fit.largest_context(params), remedies)


def _document(remedy: Remedy, asked: LoadParams) -> dict[str, object]:
    pairs = [(name, getattr(remedy.params, name)) for name in LOAD_OPTIONS]
    changes = {name: value for name, value in pairs if value != getattr(asked, name)}
    return {"kind": remedy.kind, "sentence": remedy.sentence, "changes": changes}


def room_text(room: RoomLeft) -> str:
    """Describe the remaining room in sentences."""
    longest = f"The longest context that fits is {room.max_ctx:,} tokens."
    lines = [longest if room.max_ctx else "No context fits with this split."]
    if room.remedies:
        lines.append("To make it fit, do one of these:")
        lines += [f"- {remedy['sentence']}" for remedy in room.remedies]
    return "\n".join(lines)
