"""The subcommands that load no model: `devices`, `inspect` and `plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from app.cli.arguments import add_json, add_model
from app.cli.load_options import add_load, load_params, model_path
from app.cli.output import microseconds, note, percent, remedy_here, size, table, write, write_json
from app.cli.split.default_split import (
    RoomLeft,
    choice_document,
    has_no_choice,
    room_left,
    room_text,
)
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
from app.devices.interconnect.interconnect import (
    measure_links,
    proven_routes,
    route_text,
    slot_text,
)
from engine import (
    SPLIT_MODES,
    DeviceFacts,
    DeviceInfo,
    Inspection,
    Link,
    LinkFacts,
    LoadParams,
    MachineFile,
    Pcie,
    Plan,
    Planner,
    Topology,
    card_problems,
    choose_machines,
    cuda_status,
    find_gpu_path,
    hidden_gpus,
    inspect_model,
    list_devices,
    read_topology,
    record_document,
)

UNTRIED = (
    "Routes between GPUs are tested when a model is first loaded on them; "
    "'tandem devices --measure' tests them now."
)


def kernels_text(devices: Sequence[DeviceInfo]) -> str:
    """Return one line per GPU on which Tandem's kernels failed their test."""
    return "\n".join(
        f"PyTorch is used on {gpu} instead of Tandem's kernels: {why}."
        for gpu, why in card_problems(devices).items()
    )


def topology_text(topology: Topology) -> str:
    """Return PCIe slots and links as tables; "" if there are none."""
    parts = []
    if topology.pcie:
        slots = [(device, _slot(pcie)) for device, pcie in topology.pcie.items()]
        parts.append(table(("GPU", "PCIE NOW (MAX)"), slots, frozenset()))
    if topology.links:
        links = [(link.a, link.b, _way(link), link.ancestor or "?") for link in topology.links]
        parts.append(table(("FROM", "TO", "LINK", "BOTH ON"), links, frozenset()))
    return "\n\n".join(parts)


def ways_text(devices: Sequence[DeviceInfo], topology: Topology) -> str:
    """Return the tested routes between GPUs and their problems; "" if there are none."""
    ways = proven_routes(devices, topology, MachineFile.of_user())
    rows = [
        (
            way.source, way.goal, way.small, way.large, way.record.date,
            microseconds(way.speed.latency_s) if way.speed else "?",
            f"{way.speed.bytes_per_s / 1e9:.2f} GB/s" if way.speed else "?",
        )
        for way in ways
    ]  # fmt: skip
    headers = ("FROM", "TO", "SMALL MESSAGES", "LARGE MESSAGES", "PROVEN", "LATENCY", "BANDWIDTH")
    parts = [table(headers, rows, frozenset({5, 6}))] if rows else []
    problems = dict.fromkeys(text for way in ways for text in way.problems)
    if problems:
        parts.append("\n".join(problems))
    untried = len(topology.links) * 2 - len(ways)
    if untried > 0:
        parts.append(UNTRIED)
    return "\n\n".join(parts)


def ways_document(devices: Sequence[DeviceInfo], topology: Topology) -> list[dict[str, Any]]:
    """Return the routes between GPUs, with all their tests, as JSON-ready dictionaries."""
    return [
        {
            "from": way.source, "to": way.goal, "small": way.small, "large": way.large,
            "latency_s": way.speed and way.speed.latency_s,
            "bytes_per_s": way.speed and way.speed.bytes_per_s,
            "problems": way.problems, **record_document(way.record),
        }
        for way in proven_routes(devices, topology, MachineFile.of_user())
    ]  # fmt: skip


def _slot(pcie: Pcie) -> str:
    most = slot_text(pcie.max_generation, pcie.max_width)
    return f"{slot_text(pcie.generation, pcie.width)} ({most})"


def _way(link: Link) -> str:
    problem = f": {link.peer_problem}" if link.peer_problem and not link.n_nvlink else ""
    return route_text(link) + problem


def measured_text(devices: Sequence[DeviceInfo]) -> str:
    """Return the devices' and links' measured speeds as tables; "" if there are none."""
    document = measured_document(devices)
    facts: dict[str, DeviceFacts] = document["devices"]
    speeds = [
        (
            device, f"{found.bytes_per_s / 1e9:.1f} GB/s", f"{found.flop_per_s / 1e12:.2f} TFLOP/s",
            ", ".join(found.rates),
        )
        for device, found in facts.items()
    ]  # fmt: skip
    links = [
        (
            link["a"], link["b"], microseconds(link["latency_s"]),
            f"{link['bytes_per_s'] / 1e9:.2f} GB/s",
        )
        for link in document["links"]
    ]  # fmt: skip
    parts = []
    if speeds:
        headers = ("MEASURED", "READS", "MULTIPLIES", "WEIGHTS")
        parts.append(table(headers, speeds, frozenset({1, 2})))
    if links:
        parts.append(table(("FROM", "TO", "LATENCY", "BANDWIDTH"), links, frozenset({2, 3})))
    return "\n\n".join(parts)


def measured_document(devices: Sequence[DeviceInfo]) -> dict[str, Any]:
    """Return the devices' and links' measured speeds, ready for JSON."""
    file = MachineFile.of_user()
    facts = {device.id: file.device(device) for device in devices}
    links: dict[tuple[str, str], LinkFacts] = file.links(devices)
    return {
        "devices": {device: found for device, found in facts.items() if found is not None},
        "links": [
            {"a": a, "b": b, "latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
            for (a, b), link in links.items()
        ],
    }


STORED = {"f32": "as F32", "packed": "packed, as in the file", "kernels": "as small as in the file"}


def add_devices(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "--measure", action="store_true",
        help="measure devices and links, test all routes between GPUs, and save the results",
    )  # fmt: skip


def run_devices(args: argparse.Namespace) -> None:
    devices, topology = list_devices(), read_topology()
    if args.measure:
        measure_links(devices, note)
    if args.json:
        measured = measured_document(devices)
        links = {"pcie": topology.pcie, "links": topology.links}
        gpu = find_gpu_path(devices)
        status = {"cuda": cuda_status(), "hidden": hidden_gpus()}
        document = {"devices": devices, **status, "gpu": gpu, **links}
        document["kernel_problems"] = card_problems(devices)
        write_json({**document, "ways": ways_document(devices, topology), "measured": measured})
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
    by_note = _grouped(devices, lambda device: device.note)
    return [f"{', '.join(ids)}: {note}" for note, ids in by_note.items()]


def _remedies(devices: Sequence[DeviceInfo]) -> list[str]:
    by_command = _grouped(devices, lambda device: remedy_here(device.remedy))
    return [f"To use {', '.join(ids)}:\n  {command}" for command, ids in by_command.items()]


def _grouped(
    devices: Sequence[DeviceInfo], text_of: Callable[[DeviceInfo], str]
) -> dict[str, list[str]]:
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
        "split": {"modes": () if found.problem else SPLIT_MODES, "parts": found.parts},
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
    stored = ", ".join(STORED[storage] for storage in plan.storage.split(" + "))
    write(f"{plan.n_ctx} tokens of context, weights stored {stored}")
    write(f"Room at the same time for {rooms_text(plan)}")
    write(f"Prompts are processed {min(plan.n_batch, plan.n_ctx)} tokens at a time")
    if on_host := sum(d.memory.host_kv for d in plan.devices):
        write(f"{size(on_host)} of KV cache is in host memory")
    for d in plan.devices:
        if d.memory.draft:
            write(f"{size(d.memory.draft)} on {d.device} is for the draft model (in its total)")
        if d.memory.pictures:
            write(f"{size(d.memory.pictures)} on {d.device} is for images (in its total)")
    if plan.pictures_apart:
        write(f"{size(plan.pictures_apart)} on cpu is for images")
    if pinned := sum(d.memory.pinned for d in plan.devices):
        write(f"{size(pinned)} of host memory is for copies to and from GPUs")
    for device, n_bytes in plan.overhead().items():
        write(f"CUDA itself takes another {size(n_bytes)} on {device}")
    for device, n_bytes in plan.reserve:
        write(f"{size(n_bytes)} on {device} is kept free")
    for warning in plan.warnings:
        write(warning)
    for device, missing in short.items():
        write(f"{device} is {size(missing)} short.")
    write(room_text(room))


def rooms_text(plan: Plan) -> str:
    """Describe how many parallel requests fit, and how long they can be."""
    first, *others = plan.rooms
    text = f"{first.n} {'request' if first.n == 1 else 'requests'} of {first.n_tokens:,} tokens"
    return ", or ".join([text, *(f"{room.n} of {room.n_tokens:,}" for room in others)])


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
