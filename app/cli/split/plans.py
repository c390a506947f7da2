"""The subcommand `plans`, and the saving of plans."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path

from app.cli.arguments import add_json, add_model
from app.cli.load_options import command_for, model_path, options_for
from app.cli.output import table, write, write_json
from engine import (
    LOAD_OPTIONS,
    DeviceInfo,
    EngineError,
    LoadParams,
    PlanBadge,
    Planner,
    PlanStore,
    SavedPlan,
    export_plan,
    import_plan,
    list_devices,
    model_key,
)

HEADERS = ("PLAN", "PROMPTS", "ANSWERS", "CONTEXT", "MEASURED", "NOW", "OPTIONS")
RIGHT = frozenset({1, 2, 3})


def add_plans(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--delete", metavar="NAME", help="delete a plan")
    what.add_argument("--export", metavar="NAME", help="write a plan to a file")
    what.add_argument(
        "--import", metavar="FILE", dest="import_file", help="import an exported plan"
    )
    what.add_argument("--command", metavar="NAME", help="print the command that loads a plan")
    parser.add_argument("--to", metavar="FILE", help="file for --export (default: NAME.json)")
    add_json(parser)


def run_plans(args: argparse.Namespace) -> None:
    path = model_path(args.model)
    store, key = PlanStore.of_user(), model_key(path)
    if args.delete is not None:
        store.delete(key, args.delete)
    elif args.export is not None:
        plan = store.find(key, args.export)
        export_plan(plan, Path(args.to or f"{plan.name.replace('/', '-')}.json"))
    elif args.import_file is not None:
        store.save(key, import_plan(Path(args.import_file)))
    elif args.command is not None:
        write(command_for(store.find(key, args.command).resolved(path, list_devices())))
        return
    _list(path, store.plans(key), is_json=args.json)


def _list(path: str, plans: Sequence[SavedPlan], *, is_json: bool) -> None:
    devices = list_devices()
    with closing(Planner(path)) as planner:
        found = [_document(plan, path, planner, devices) for plan in plans]
    if is_json:
        write_json({"plans": found})
    elif not plans:
        write("There are no plans. Save one with: tandem plan MODEL [options] --save NAME")
    else:
        rows = [_row(plan, document) for plan, document in zip(plans, found, strict=True)]
        write(table(HEADERS, rows, RIGHT))


def _document(
    plan: SavedPlan, path: str, planner: Planner, devices: Sequence[DeviceInfo]
) -> dict[str, object]:
    free = {device.id: device.free_bytes for device in devices}
    problem, command, n_ctx = "", "", 0
    try:
        params = plan.resolved(path, devices)
        command = command_for(params)
        evaluated = planner.plan(params, free)
        n_ctx = evaluated.n_ctx
        if evaluated.shortages(free):
            problem = "It does not fit into the free memory."
    except EngineError as error:
        problem = str(error)
    return {
        "name": plan.name,
        "params": {name: asdict(plan.params)[name] for name in LOAD_OPTIONS},
        "devices": plan.devices,
        "badge": plan.badge,
        "n_ctx": n_ctx,
        "fits": not problem,
        "problem": problem,
        "command": command,
    }


def _row(plan: SavedPlan, document: dict[str, object]) -> tuple[str, ...]:
    badge = plan.badge
    speeds = (f"{badge.prefill_ts:.0f} t/s", f"{badge.decode_ts:.1f} t/s") if badge else ("-", "-")
    when = badge.when[:10] if badge else "-"
    state = "fits" if document["fits"] else str(document["problem"])
    options = " ".join(options_for(plan.params)) or "-"
    return (plan.name, *speeds, str(document["n_ctx"] or "-"), when, state, options)


def save_plan(name: str, params: LoadParams, badge: PlanBadge | None = None) -> None:
    """Save load parameters as a plan.

    Args:
        badge: measured speeds; None to keep the saved ones if the parameters are unchanged.

    Raises:
        EngineError: the name is invalid, or writing failed.
    """
    store, key = PlanStore.of_user(), model_key(params.path)
    plan = SavedPlan.of(name, params, list_devices(), badge)
    with suppress(EngineError):
        old = store.find(key, name)
        if badge is None and old.params == plan.params:
            plan = replace(plan, badge=old.badge)
    store.save(key, plan)
