"""Predictions in `tandem plan`, for this machine or a simulated rig."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import engine  # modules that need torch are imported on first use
from app.cli.output import microseconds, note, percent, table
from app.devices.interconnect.interconnect import Edge, read_links
from engine import (
    Evaluation,
    Forecast,
    Forecaster,
    LoadParams,
    MachineFile,
    Prediction,
    Rig,
    machine_of,
    machines_of,
    parse_rig,
)

HEADERS = ("RANK", "DEVICE", "READS", "MULTIPLIES", "FIXED", "WAITS", "LINKS", "IDLE", "")
CAUSES = {
    "memory": "limited by memory bandwidth", "compute": "limited by compute",
    "fixed": "limited by the number of operations", "wait": "waits for slower devices",
    "link": "limited by its links", "idle": "waits for its turn",
}  # fmt: skip


def add_simulate(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("predicted speed")
    group.add_argument(
        "--simulate", metavar="RIG",
        help="plan for simulated devices, e.g. 2x3090,1x3060, optionally with links and PCIe "
        "lanes: 4x3090@nvlink, 2x4090@p2p,x8, 2x4090@x16/x4; all of the rig's GPUs are used unless "
        "--devices selects some; separate machines with ' / '",
    )  # fmt: skip
    group.add_argument(
        "--wire", metavar="LINK",
        help="network between simulated machines, e.g. 10gbit,0.1ms (default: 1gbit,0.3ms)",
    )  # fmt: skip
    group.add_argument(
        "--prompt", type=int, metavar="N", help="prompt length in tokens (default: 512)"
    )
    group.add_argument(
        "--measure", action="store_true",
        help="first measure this machine's devices that have not been measured yet",
    )  # fmt: skip


def forecaster_of(args: argparse.Namespace) -> Forecaster:
    """Return the forecaster for this machine or the simulated rig.

    Unless the options give devices or a plan, `args.devices` is set to the rig's `used_devices`.

    Raises:
        EngineError: the rig is invalid.
    """
    if args.simulate is None:
        return Forecaster.of_machine()
    if args.wire is not None:
        args.simulate = f"{args.simulate} ~ {args.wire}"
    rig = parse_rig(args.simulate)
    used = used_devices(rig)
    if args.devices is None and args.plan is None and used:
        args.devices = ",".join(used)
        if len(machines_of(used)) > 1 and args.split_mode is None:
            args.split_mode = "groups"
    return Forecaster.of_rig(rig)


def used_devices(rig: Rig) -> list[str]:
    """Return a rig's GPUs and, if it has several machines, the CPUs of those without GPUs."""
    gpus = [device.id for device in rig.devices if device.kind == "cuda"]
    with_gpus = machines_of(gpus)
    ids = [device.id for device in rig.devices]
    if len(machines_of(ids)) == 1:
        return gpus
    return [i for i in ids if i in gpus or machine_of(i) not in with_gpus]


def measure_used(found: Forecaster, params: LoadParams, kinds: Sequence[str]) -> Forecaster:
    """Measure the devices in use; return this machine's new forecaster."""
    file = MachineFile.of_user()
    for device in found.devices.values():
        if device.id in params.all_devices:
            note(f"Measuring {device.id} …")
            engine.measure_facts(device, kinds, file)
    return Forecaster.of_machine()


def speed_text(found: Forecast) -> str:
    """Format the speeds, what limits them, and how each rank spends its time."""
    lines = [
        f"a prompt of {found.prefill.n_tokens} tokens: {found.prefill.tokens_per_s:.1f} tokens/s. "
        f"{found.prefill.reason}",
        f"an answer after it: {found.decode.tokens_per_s:.1f} tokens/s. {found.decode.reason}",
    ]
    if len(found.decode.ranks) > 1:
        lines += ["", table(HEADERS, _rows(found.decode), frozenset(range(2, 8)))]
    return "\n".join(lines)


def _rows(prediction: Prediction) -> list[tuple[str, ...]]:
    rows = []
    for rank in prediction.ranks:
        seconds = (
            rank.memory_s, rank.compute_s, rank.fixed_s, rank.wait_s, rank.link_s, rank.idle_s,
        )  # fmt: skip
        parts = (percent(prediction.part(part)) for part in seconds)
        rows.append((str(rank.rank), rank.device, *parts, CAUSES[rank.limited_by]))
    return rows


def speed_document(found: Forecast) -> dict[str, object]:
    """Return a forecast as a JSON-ready dictionary."""
    return {"prefill": _prediction(found.prefill), "decode": _prediction(found.decode)}


def _prediction(prediction: Prediction) -> dict[str, object]:
    return {
        "n_tokens": prediction.n_tokens,
        "tokens_per_s": prediction.tokens_per_s,
        "seconds": prediction.seconds,
        "reason": prediction.reason,
        "path": asdict(prediction.path),
        "ranks": [{**asdict(rank), "limited_by": rank.limited_by} for rank in prediction.ranks],
    }


F32_BYTES = 4
HOW = {
    "lane": "one-shot kernels", "copies": "copies", "threads": "CPU threads",
    "machines": "the network",
}  # fmt: skip


def links_document(
    rig_text: str | None, evaluation: Evaluation, n_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """Return a simulated rig's links and the times for a plan's all-reduces; {} if there is no rig.

    Args:
        n_tokens: tokens in a prompt batch; all-reduces for single tokens are listed as well.
    """
    if rig_text is None:
        return {}
    rig, devices = parse_rig(rig_text), [device.device for device in evaluation.plan.devices]
    sums = []
    for ranks in _groups(evaluation):
        ids = [devices[rank] for rank in ranks]
        for n in (1, n_tokens):
            found = rig.links.sums(ids, F32_BYTES * n * evaluation.load.n_embd)
            sums += [
                {"ranks": ranks, "n_tokens": n, "is_used": not at, **way._asdict()}
                for at, way in enumerate(found)
            ]
    edges = read_links(rig.devices, rig).edges
    pairs = {tuple(sorted(pair)) for pair in combinations(devices, 2)}
    links = [_edge_document(edge) for edge in edges if tuple(sorted((edge.a, edge.b))) in pairs]
    return {"links": links, "sums": sums}


def _groups(evaluation: Evaluation) -> Iterator[list[int]]:
    groups = (block.group for block in evaluation.load.blocks if block.n_reduce)
    yield from (list(group) for group in dict.fromkeys(groups) if len(group) > 1)


def _edge_document(edge: Edge) -> dict[str, Any]:
    speeds = {"latency_s": edge.facts.latency_s, "bytes_per_s": edge.facts.bytes_per_s}
    return {"a": edge.a, "b": edge.b, "kind": edge.kind, "way": edge.route, **speeds}


def links_text(rig_text: str | None, evaluation: Evaluation, n_tokens: int) -> str:
    """Format links and all-reduces as tables, each preceded by an empty line."""
    document = links_document(rig_text, evaluation, n_tokens)
    links = [
        (e["a"], e["b"], e["way"], microseconds(e["latency_s"]), _rate(e["bytes_per_s"]))
        for e in document.get("links", [])
    ]
    sums = [
        (
            ", ".join(map(str, found["ranks"])), f"{found['n_tokens']}", HOW[found["how"]],
            found["wire"], microseconds(found["seconds"]), "" if found["is_used"] else "not used",
        )
        for found in document.get("sums", [])
    ]  # fmt: skip
    tables = (
        table(("FROM", "TO", "LINK", "LATENCY", "BANDWIDTH"), links, frozenset({3, 4})),
        table(("ALL-REDUCE OF RANKS", "TOKENS", "BY", "AS", "TAKES", ""), sums, frozenset({1, 4})),
    )
    return "".join("\n\n" + text for text, rows in zip(tables, (links, sums), strict=True) if rows)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"
