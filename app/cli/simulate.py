"""The devices that a plan is for, here or simulated, and how fast it would be."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import engine  # names that need torch are resolved when they are used
from app.cli.output import note, percent, table
from engine import (
    DeviceFacts,
    DeviceInfo,
    Forecast,
    Links,
    LoadParams,
    MachineFile,
    Prediction,
    known_facts,
    known_links,
    list_devices,
    parse_rig,
    read_topology,
)

HEADERS = ("RANK", "DEVICE", "READS", "MULTIPLIES", "FIXED", "WAITS", "LINKS", "IDLE", "")
CAUSES = {
    "memory": "limited by memory bandwidth", "compute": "limited by compute",
    "fixed": "limited by the number of operations", "wait": "waits for slower devices",
    "link": "limited by its links", "idle": "waits for its turn",
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What plans are made for.

    Attributes:
        facts: by device, of all of them.
        is_simulated: the devices are not here.
    """

    devices: Sequence[DeviceInfo]
    facts: Mapping[str, DeviceFacts]
    links: Links
    is_simulated: bool

    @property
    def free_bytes(self) -> dict[str, int]:
        """Free memory by device."""
        return {device.id: device.free_bytes for device in self.devices}


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--simulate", metavar="RIG",
        help="plan for devices that are not here, such as 2x3090,1x3060 or 4x4090@p2p; "
        "without --devices for all its GPUs",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", type=int, metavar="N", help="tokens of the prompt whose speed is predicted"
    )
    parser.add_argument(
        "--measure", action="store_true",
        help="measure this machine's devices first, where that was not done before",
    )  # fmt: skip


def machine_of(args: argparse.Namespace) -> Machine:
    """The devices that are meant; of a rig all GPUs, where `args.devices` is left as it is.

    Raises:
        EngineError: the rig cannot be understood.
    """
    if args.simulate is None:
        return this_machine()
    rig = parse_rig(args.simulate)
    gpus = [device.id for device in rig.devices if device.kind == "cuda"]
    if args.devices == "cpu" and gpus:
        args.devices = ",".join(gpus)
    return Machine(rig.devices, rig.facts, rig.links, is_simulated=True)


def this_machine() -> Machine:
    """The devices that are here, with what is known of them."""
    devices, file = list_devices(), MachineFile.of_user()
    facts = {device.id: known_facts(device, file) for device in devices}
    return Machine(devices, facts, known_links(devices, read_topology(), file), is_simulated=False)


def measured(machine: Machine, params: LoadParams, kinds: Sequence[str]) -> Machine:
    """The machine with what was measured now of the devices in use."""
    if machine.is_simulated:
        return machine
    file = MachineFile.of_user()
    for device in machine.devices:
        if device.id in params.devices:
            note(f"Measuring {device.id} …")
            engine.measure_facts(device, kinds, file)
    return this_machine()


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
    return [
        (
            str(rank.rank), rank.device,
            *(
                percent(prediction.part(seconds))
                for seconds in (
                    rank.memory_s, rank.compute_s, rank.fixed_s, rank.wait_s, rank.link_s,
                    rank.idle_s,
                )
            ),
            CAUSES[rank.limited_by],
        )
        for rank in prediction.ranks
    ]  # fmt: skip


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
