"""The devices that a plan is for, here or simulated, and how fast it would be."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

import engine  # names that need torch are resolved when they are used
from app.cli.output import note, percent, table
from engine import Forecast, Forecaster, LoadParams, MachineFile, Prediction, parse_rig

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
        help="plan for devices that are not here, such as 2x3090,1x3060 or 4x4090@p2p; "
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
