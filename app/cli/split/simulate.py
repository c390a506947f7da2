"""The devices that a plan is for, here or simulated, and how fast it would be."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import engine  # names that need torch are resolved when they are used
from app.cli.output import note, percent, table
from app.links.links import Edge, read_links
from engine import Evaluation, Forecast, Forecaster, LoadParams, MachineFile, Prediction, parse_rig

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
        help="plan for devices that are not here, such as 2x3090,1x3060, or with how GPUs reach "
        "each other and the lanes of their slots: 4x3090@nvlink, 2x4090@p2p,x8, 2x4090@x16/x4; "
        "without --devices for all its GPUs",
    )  # fmt: skip
    group.add_argument(
        "--prompt", type=int, metavar="N", help="tokens of the prompt (default: 512)"
    )
    group.add_argument(
        "--measure", action="store_true",
        help="measure this machine's devices first, where that was not done before",
    )  # fmt: skip


def forecaster_of(args: argparse.Namespace) -> Forecaster:
    """The devices that are meant; of a rig all GPUs, where `args.devices` is not given.

    Raises:
        EngineError: the rig cannot be understood.
    """
    if args.simulate is None:
        return Forecaster.of_machine()
    rig = parse_rig(args.simulate)
    gpus = [device.id for device in rig.devices if device.kind == "cuda"]
    if args.devices is None and args.plan is None and gpus:
        args.devices = ",".join(gpus)
    return Forecaster.of_rig(rig)


def measured(found: Forecaster, params: LoadParams, kinds: Sequence[str]) -> Forecaster:
    """This machine once more, when the devices in use have been measured."""
    file = MachineFile.of_user()
    for device in found.devices.values():
        if device.id in params.all_devices:
            note(f"Measuring {device.id} …")
            engine.measure_facts(device, kinds, file)
    return Forecaster.of_machine()


def speed_text(found: Forecast) -> str:
    """For people: the speeds, what limits them, and where each rank's time goes."""
    lines = [
        f"a prompt of {found.prefill.n_tokens} tokens: {found.prefill.tokens_per_s:.1f} tokens/s. "
        f"{found.prefill.reason}",
        f"an answer after it: {found.decode.tokens_per_s:.1f} tokens/s. {found.decode.reason}",
    ]
    if len(found.decode.ranks) > 1:
        lines += ["", table(HEADERS, _rows(found.decode), frozenset(range(2, 8)))]
    return "\n".join(lines)


def _rows(prediction: Prediction) -> list[tuple[str, ...]]:
    """Where the time of a token goes."""
    rows = []
    for rank in prediction.ranks:
        seconds = (
            rank.memory_s, rank.compute_s, rank.fixed_s, rank.wait_s, rank.link_s, rank.idle_s,
        )  # fmt: skip
        parts = (percent(prediction.part(part)) for part in seconds)
        rows.append((str(rank.rank), rank.device, *parts, CAUSES[rank.limited_by]))
    return rows


def speed_document(found: Forecast) -> dict[str, object]:
    """The same for programs."""
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
    "lane": "kernels that write to each other", "copies": "copies", "threads": "threads of the CPU",
}  # fmt: skip


def links_document(
    rig_text: str | None, evaluation: Evaluation, n_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """How a simulated rig's devices reach each other, and what sums over those of a plan take.

    Args:
        rig_text: None where nothing is simulated: then there is nothing to say.
        n_tokens: of a prompt's batch; a sum of one token is told as well.
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
    """Ranks that add up, in the order of their blocks."""
    groups = (block.group for block in evaluation.load.blocks if block.n_reduce)
    yield from (list(group) for group in dict.fromkeys(groups) if len(group) > 1)


def _edge_document(edge: Edge) -> dict[str, Any]:
    speeds = {"latency_s": edge.facts.latency_s, "bytes_per_s": edge.facts.bytes_per_s}
    return {"a": edge.a, "b": edge.b, "kind": edge.kind, "way": edge.way, **speeds}


def links_text(rig_text: str | None, evaluation: Evaluation, n_tokens: int) -> str:
    """The same for people, as tables with an empty line before each."""
    document = links_document(rig_text, evaluation, n_tokens)
    links = [
        (e["a"], e["b"], e["way"], _microseconds(e["latency_s"]), _rate(e["bytes_per_s"]))
        for e in document.get("links", [])
    ]
    sums = [
        (
            ", ".join(map(str, found["ranks"])), f"{found['n_tokens']}", HOW[found["how"]],
            found["wire"], _microseconds(found["seconds"]), "" if found["is_used"] else "not used",
        )
        for found in document.get("sums", [])
    ]  # fmt: skip
    tables = (
        table(("FROM", "TO", "LINK", "SMALL SUM", "BANDWIDTH"), links, frozenset({3, 4})),
        table(("SUM OF RANKS", "TOKENS", "BY", "AS", "TAKES", ""), sums, frozenset({1, 4})),
    )
    return "".join("\n\n" + text for text, rows in zip(tables, (links, sums), strict=True) if rows)


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"
