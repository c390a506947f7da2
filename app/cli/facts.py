"""The subcommands that show facts and load no model: `devices`, `inspect`, `plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict

from app.cli.arguments import add_json, add_model
from app.cli.links import (
    kernels_text,
    measure,
    measured_document,
    measured_text,
    topology_text,
    ways_document,
    ways_text,
)
from app.cli.load_options import add_load, load_params, model_path
from app.cli.output import percent, remedy_here, size, table, write, write_json
from app.cli.split.default_split import choice_document, has_no_choice
from app.cli.split.fit import RoomLeft, room_left, room_text
from app.cli.split.plans import save_plan
from app.cli.split.simulate import (
    add_simulate,
    forecaster_of,
    links_document,
    links_text,
    measure_used,
    speed_document,
    speed_text,
)
from engine import (
    SPLIT_MODES,
    DeviceInfo,
    Inspection,
    LoadParams,
    Plan,
    Planner,
    card_problems,
    choose_machines,
    cuda_status,
    find_gpu_path,
    hidden_gpus,
    inspect_model,
    list_devices,
    read_topology,
)

HELD = {
    "f32": "as F32",
    "packed": "packed, as in the file",
    "kernels": "as small as in the file",
}


def add_devices(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "--measure", action="store_true",
        help="measure devices and links, test all routes between GPUs, and keep the results",
    )  # fmt: skip


def run_devices(args: argparse.Namespace) -> None:
    devices, topology = list_devices(), read_topology()
    if args.measure:
        measure(devices)
    if args.json:
        found = measured_document(devices)
        links = {"pcie": topology.pcie, "links": topology.links}
        gpu = find_gpu_path(devices)
        status = {"cuda": cuda_status(), "hidden": hidden_gpus()}
        document = {"devices": devices, **status, "gpu": gpu, **links}
        document["kernel_problems"] = card_problems(devices)
        write_json({**document, "ways": ways_document(devices, topology), "measured": found})
        return
    rows = [
        (d.id, d.name, size(d.total_bytes), size(d.free_bytes), "" if d.usable else d.reason)
        for d in devices
    ]
    write(table(("DEVICE", "NAME", "MEMORY", "FREE", ""), rows, frozenset({2, 3})))
    about = (
        kernels_text(devices), topology_text(topology), ways_text(devices, topology),
        measured_text(devices),
    )  # fmt: skip
    for text in (hidden_gpus(), *about, *_notes(devices)):
        if text:
            write("\n" + text)
    write("\n" + find_gpu_path(devices).sentence)
    for text in _remedies(devices):
        write("\n" + text)


def _notes(devices: Sequence[DeviceInfo]) -> list[str]:
    """Return what is not proven about devices, a line for each sentence."""
    by_note = _grouped(devices, lambda device: device.note)
    return [f"{', '.join(ids)}: {note}" for note, ids in by_note.items()]


def _remedies(devices: Sequence[DeviceInfo]) -> list[str]:
    """Return commands that make devices usable, each on a line of its own to be copied."""
    by_command = _grouped(devices, lambda device: remedy_here(device.remedy))
    return [f"To use {', '.join(ids)}:\n  {command}" for command, ids in by_command.items()]


def _grouped(
    devices: Sequence[DeviceInfo], text_of: Callable[[DeviceInfo], str]
) -> dict[str, list[str]]:
    """Return the ids of devices by a text of theirs; without those whose text is empty."""
    found: dict[str, list[str]] = {}
    for device in devices:
        if text := text_of(device):
            found.setdefault(text, []).append(device.id)
    return found


def add_inspect(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_json(parser)
    parser.add_argument("--metadata", action="store_true", help="list all metadata")
    parser.add_argument("--tensors", action="store_true", help="list all tensors")


def run_inspect(args: argparse.Namespace) -> None:
    found = inspect_model(model_path(args.model))
    if args.json:
        write_json({**_info(found), "metadata": dict(found.metadata), "tensors": found.tensors})
        return
    write(table(("", ""), [(k, str(v)) for k, v in _summary(found)], frozenset()).lstrip())
    for warning in found.warnings:
        write(warning)
    if args.metadata:
        write("\n" + table(("KEY", "VALUE"), found.metadata, frozenset()))
    if args.tensors:
        rows = [
            (t.name, t.type, " × ".join(map(str, t.shape)), size(t.n_bytes)) for t in found.tensors
        ]
        write("\n" + table(("TENSOR", "TYPE", "SHAPE", "SIZE"), rows, frozenset({3})))


def _info(found: Inspection) -> dict[str, object]:
    info = found.info
    return {
        "path": info.path,
        "files": found.files,
        "gguf_version": found.version,
        "name": info.name,
        "architecture": info.architecture,
        "supported": info.supported,
        "quant": info.quant,
        "n_bytes": info.n_bytes,
        "n_params": info.n_params,
        "n_layer": info.n_layer,
        "n_embd": info.n_embd,
        "n_head": info.n_head,
        "n_head_kv": info.n_head_kv,
        "n_vocab": info.n_vocab,
        "n_ctx_train": info.n_ctx_train,
        "has_chat_template": info.has_chat_template,
        "tensor_types": dict(info.tensor_types),
        "warnings": found.warnings,
        "problem": found.problem,
        "split": {
            "modes": () if found.problem else SPLIT_MODES,
            "parts": found.parts,
        },
    }


def _summary(found: Inspection) -> list[tuple[str, object]]:
    info = found.info
    types = ", ".join(f"{name} × {n}" for name, n in info.tensor_types)
    parts = f" in {len(found.files)} parts" if len(found.files) > 1 else ""
    return [
        ("name", info.name),
        ("file", f"{size(info.n_bytes)}{parts}, GGUF v{found.version}"),
        ("architecture", info.architecture + ("" if info.supported else " (not supported yet)")),
        ("parameters", f"{info.n_params / 1e6:,.1f} million"),
        ("quantisation", f"{info.quant} ({types or 'no tensors'})"),
        ("layers", f"{info.n_layer}, width {info.n_embd}"),
        ("heads", f"{info.n_head} queries, {info.n_head_kv} keys and values"),
        ("vocabulary", info.n_vocab),
        ("context", f"{info.n_ctx_train} tokens"),
        ("chat template", "yes" if info.has_chat_template else "none: prompts are plain text"),
        ("can be run", f"no: {found.problem}" if found.problem else "yes"),
        *_how_to_split(found),
    ]


def _how_to_split(found: Inspection) -> list[tuple[str, str]]:
    """Return into how many pieces the model can be cut, by layer and by tensor."""
    if found.problem:
        return []
    lines = [("split by layer", f"{found.info.n_layer} blocks")]
    for part in found.parts:
        where = f", in {part.n_layer} blocks" if part.n_layer else ""
        pieces = f"{part.name}: {part.n_pieces} pieces of {part.unit}{where}"
        lines.append(("" if len(lines) > 1 else "split by tensor", pieces))
    return lines


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_load(parser)
    add_simulate(parser)
    parser.add_argument("--save", metavar="NAME", help="save these options as a plan")
    add_json(parser)


def run_plan(args: argparse.Namespace) -> None:
    is_unchosen = has_no_choice(args)
    machine = forecaster_of(args)
    params, free, choice = load_params(args), machine.free_bytes, None
    with closing(Planner(params.path)) as planner:
        if is_unchosen:
            choice = choose_machines(planner, params, machine)
            params = params if args.simulate else choice.params
        evaluation, quant = planner.evaluate(params, free), planner.info.quant
        room = room_left(planner.fit(machine.rooms), params)
    if args.save is not None:
        save_plan(args.save, params)
    if args.measure and args.simulate is None:
        machine = measure_used(machine, params, sorted(evaluation.load.kinds))
    plan = evaluation.plan
    speed = machine.forecast(evaluation, params, quant, args.prompt)
    short = plan.shortages(free)
    if args.json:
        document = _plan_document(plan, params, free, short)
        document |= asdict(room) | {"speed": speed and speed_document(speed)}
        document |= links_document(args.simulate, evaluation, plan.n_batch)
        write_json({**document, "choice": choice and choice_document(choice)})
        return
    _write_plan(plan, short, room)
    if choice is not None:
        write(f"Default split: {choice.reason}")
    if speed is not None:
        text = speed_text(speed) + links_text(args.simulate, evaluation, plan.n_batch)
        how = "" if args.simulate is None else " (simulated: assumes Tandem's kernels)"
        write(("" if short else "It fits.\n") + f"Predicted speed{how}:\n" + text)


def _write_plan(plan: Plan, short: Mapping[str, int], room: RoomLeft) -> None:
    """Write the bytes on each device and how much room is left, for people."""
    rows = [
        (
            str(d.rank), d.device, percent(d.asked), percent(d.effective), size(d.memory.weights),
            size(d.memory.kv), size(d.memory.compute), size(d.memory.padding),
            size(d.memory.total),
        )
        for d in plan.devices
    ]  # fmt: skip
    headers = ("RANK", "DEVICE", "ASKED", "GETS", "WEIGHTS", "KV", "COMPUTE", "ROUNDING", "TOTAL")
    write(table(headers, rows, frozenset(range(2, 9))))
    held = ", ".join(HELD[storage] for storage in plan.storage.split(" + "))
    write(f"{plan.n_ctx} tokens of context, weights held {held}")
    write(f"Room at once for {rooms_text(plan)}")
    write(f"Prompts are computed {min(plan.n_batch, plan.n_ctx)} tokens at a time")
    if on_host := sum(d.memory.host_kv for d in plan.devices):
        write(f"{size(on_host)} of keys and values are kept in host memory")
    for d in plan.devices:
        if d.memory.draft:
            write(f"{size(d.memory.draft)} of {d.device} are for the draft model, in its total")
        if d.memory.pictures:
            write(f"{size(d.memory.pictures)} of {d.device} are for pictures, in its total")
    if plan.pictures_apart:
        write(f"{size(plan.pictures_apart)} of cpu are for pictures")
    if pinned := sum(d.memory.pinned for d in plan.devices):
        write(f"{size(pinned)} of host memory are for copies from and to GPUs")
    for device, n_bytes in plan.overhead().items():
        write(f"CUDA itself takes {size(n_bytes)} more of {device}")
    for device, n_bytes in plan.reserve:
        write(f"{size(n_bytes)} of {device} are kept free")
    for warning in plan.warnings:
        write(warning)
    for device, missing in short.items():
        write(f"{device} is {size(missing)} short.")
    write(room_text(room))


def rooms_text(plan: Plan) -> str:
    """Return how many requests run at once at which length."""
    first, *others = plan.rooms
    told = [f"{first.n} {'request' if first.n == 1 else 'requests'} of {first.n_tokens:,} tokens"]
    return ", or ".join([*told, *(f"{room.n} of {room.n_tokens:,}" for room in others)])


def _plan_document(
    plan: Plan, params: LoadParams, free: dict[str, int], short: dict[str, int]
) -> dict[str, object]:
    return {
        "devices": [
            {
                "rank": d.rank,
                "device": d.device,
                "asked": d.asked,
                "effective": d.effective,
                "weights": d.memory.weights,
                "kv": d.memory.kv,
                "compute": d.memory.compute,
                "total": d.memory.total,
                "host_kv": d.memory.host_kv,
                "padding": d.memory.padding,
                "draft": d.memory.draft,
                "pictures": d.memory.pictures,
                "pinned": d.memory.pinned,
                "free": free.get(d.device),
            }
            for d in plan.devices
        ],
        "pictures_device": plan.pictures_device,
        "pictures_apart": plan.pictures_apart,
        "split_mode": plan.split_mode,
        "groups": params.group_sizes,
        "n_cpu_blocks": params.n_cpu_blocks,
        "n_cpu_moe": params.n_cpu_moe,
        "kv_on_host": params.kv_on_host,
        "overrides": params.overrides,
        "reserve": dict(params.reserve),
        "n_ctx": plan.n_ctx,
        "parallel": plan.parallel,
        "rooms": [{"requests": room.n, "tokens": room.n_tokens} for room in plan.rooms],
        "n_batch": plan.n_batch,
        "kv_type": plan.kv_type,
        "storage": plan.storage,
        "overhead": plan.overhead(),
        "total_bytes": plan.total_bytes,
        "fits": not short,
        "short": short,
        "warnings": plan.warnings,
    }
