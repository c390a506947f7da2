"""The choice between splitting a model over machines and running it on one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import EngineError, Sentence, paragraph
from engine.hardware.devices.topology import Topology
from engine.hardware.devices.types import far_id, local_id, machine_of
from engine.planning.choice import Choice, choose
from engine.planning.evaluation.fit import Fit
from engine.planning.search.estimate import Alternative
from engine.planning.search.results import GOALS, Goal, Speeds
from engine.planning.speed.facts import MESSAGE_BYTES, LinkFacts, percent
from engine.planning.speed.links import GIGABIT, Links, Wires
from engine.planning.speed.rigs import Rig
from engine.planning.speed.rigs import parse_rig as parse_machine

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.planning.planner import Planner
    from engine.planning.speed.forecast import Forecaster

MIN_GAIN = 0.1
"""Minimum fraction of the time that further machines must save, because each can fail."""


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """A model's predicted speed on a set of machines."""

    machines: tuple[int, ...]
    way: Alternative


def machines_of(devices: Sequence[str]) -> tuple[int, ...]:
    """Return the devices' machine numbers, without repetitions, in order."""
    return tuple(dict.fromkeys(machine_of(device) for device in devices))


def rank_counts(devices: Sequence[str]) -> tuple[int, ...]:
    """Return the number of ranks on each machine, for `LoadParams.machines`."""
    found = [machine_of(device) for device in devices]
    return tuple(found.count(machine) for machine in machines_of(devices))


def choose_machines(
    planner: Planner, params: LoadParams, forecaster: Forecaster, goal: Goal = GOALS["chat"],
    free_bytes: Mapping[str, int] | None = None,
) -> Choice:  # fmt: skip
    """Choose one of several machines, or a split over all of them, by the predicted time.

    A split over machines gives each machine whole blocks, or cuts every block over all ranks. For a
    single machine, this is the same as `choose`.

    Args:
        params: context and other settings; devices and split are ignored.

    Raises:
        EngineError: the model cannot be run.
    """
    numbers = machines_of(list(forecaster.devices))
    if len(numbers) == 1:
        return choose(planner, params, forecaster, goal, free_bytes)
    free = dict(forecaster.free_bytes if free_bytes is None else free_bytes)
    alone = {number: _alone(planner, params, forecaster, number, goal, free) for number in numbers}
    found = [
        MachineSpeed((number,), one.alternatives[0])
        for number, one in alone.items()
        if one is not None and one.alternatives
    ]
    fastest = min(found, key=lambda one: one.way.seconds, default=None)
    split = _over_all(planner, params, forecaster, goal, free)
    if split is None:
        if fastest is None:
            return choose(planner, params, forecaster.on_machine(numbers[0]), goal)
        why = paragraph(_alone_text(fastest), Sentence("No split over the machines fits."))
        return Choice(fastest.way.params, why, tuple(one.way for one in found))
    ways = sorted([*found, split], key=lambda one: one.way.seconds)
    is_worth = fastest is None or split.way.seconds < (1 - MIN_GAIN) * fastest.way.seconds
    best = split if fastest is None or is_worth else fastest
    return Choice(
        best.way.params, reason_for_machines(split, fastest, best), tuple(one.way for one in ways)
    )


def _alone(
    planner: Planner, params: LoadParams, forecaster: Forecaster, number: int, goal: Goal,
    free: Mapping[str, int],
) -> Choice | None:  # fmt: skip
    # devices in the result have their global ids
    machine = forecaster.on_machine(number)
    own = {local_id(device): n for device, n in free.items() if machine_of(device) == number}
    with suppress(EngineError):
        found = choose(planner, replace(params, machines=()), machine, goal, own)
        near = [_far(one, number) for one in found.alternatives if one.params == found.params]
        far = replace(found.params, devices=_far_ids(found.params, number))
        return Choice(far, found.reason, tuple(near))
    return None


def _far(one: Alternative, number: int) -> Alternative:
    return replace(one, params=replace(one.params, devices=_far_ids(one.params, number)))


def _far_ids(params: LoadParams, number: int) -> tuple[str, ...]:
    return tuple(far_id(number, device) for device in params.devices)


def _over_all(
    planner: Planner, params: LoadParams, forecaster: Forecaster, goal: Goal,
    free: Mapping[str, int],
) -> MachineSpeed | None:  # fmt: skip
    numbers = machines_of(list(forecaster.devices))
    devices = tuple(device for number in numbers for device in _used(forecaster, number))
    sizes, base = rank_counts(devices), replace(params, split=None, n_cpu_blocks=0, n_cpu_moe=0)
    rooms = [replace(room, free_bytes=free.get(room.device, 0)) for room in forecaster.rooms]
    fit = Fit(
        lambda params, room: planner.evaluate(params, room).plan, rooms,
        planner.info.n_ctx_train, planner.info.n_layer,
    )  # fmt: skip
    found = []
    for mode, groups in (("groups", sizes), ("tensor", None)):
        several = replace(base, devices=devices, split_mode=mode, groups=groups, machines=sizes)
        with suppress(EngineError):
            balanced = fit.balanced(several)
            if balanced is not None:
                evaluation = planner.evaluate(balanced, free)
                forecast = forecaster.forecast(evaluation, balanced, planner.info.quant)
                if forecast is not None:
                    speeds = Speeds(forecast.prefill.tokens_per_s, forecast.decode.tokens_per_s)
                    seconds = goal.seconds(speeds.prefill_ts, speeds.decode_ts)
                    decode = forecast.decode
                    found.append(
                        Alternative(
                            balanced, speeds, seconds, 0, 0.0, decode.path.link_s, decode.reason
                        )
                    )
    best = min(found, key=lambda one: one.seconds, default=None)
    return None if best is None else MachineSpeed(numbers, best)


def _used(forecaster: Forecaster, number: int) -> list[str]:
    # the machine's GPUs, or else its CPU
    own = [room.device for room in forecaster.rooms if machine_of(room.device) == number]
    gpus = [device for device in own if forecaster.devices[device].kind != "cpu"]
    return gpus or own


def reason_for_machines(
    split: MachineSpeed, fastest: MachineSpeed | None, best: MachineSpeed
) -> str:
    """Return why these machines were chosen, and how much time the network takes."""
    n = len(split.machines)
    network = Sentence(
        "Both machines together: {rate} tok/s; links take {part} of the time."
        if n == 2
        else "All {n} machines together: {rate} tok/s; links take {part} of the time.",
        n=n, rate=_rate(split), part=percent(split.way.link_s * split.way.speeds.decode_ts),
    )  # fmt: skip
    if fastest is None:
        return paragraph(Sentence("No single machine can hold the model."), network)
    if best is split:
        return paragraph(network, _alone_text(fastest))
    return paragraph(
        Sentence(
            "Do not split over this link; run a copy on each machine that can hold the model."
        ),
        _alone_text(fastest),
        network,
    )


def _alone_text(one: MachineSpeed) -> Sentence:
    return Sentence("Machine {n} alone: {rate} tok/s.", n=one.machines[0] + 1, rate=_rate(one))


def _rate(one: MachineSpeed) -> float:
    return round(one.way.speeds.decode_ts, 1)


MAX_MACHINES = 16

BETWEEN = re.compile(r"\s/\s")
"""Separator between machines; the slash between the lanes of slots has no spaces around it."""

SPEED = re.compile(r"(\d+(?:\.\d+)?)([mg])bit(?:/s)?")
LATENCY = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs)")

PAYLOAD = 0.94
"""Fraction of Ethernet's bits that belong to a TCP stream: 1448 of 1538 bytes per packet."""

UNITS = {"m": 1e6, "g": 1e9, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def parse_rig(text: str) -> Rig:
    """Return the simulated machine for a text, or several machines if separated by " / ".

    The network between machines follows a ~: its speed, the latency of a message, or both. Devices
    on the second and further machines have ids such as "1/cuda:0".

    Raises:
        EngineError: a part of the text is unknown, or there are too many machines.
    """
    machines_text, _, wire = text.partition("~")
    parts = BETWEEN.split(machines_text)
    if len(parts) == 1:
        if wire.strip():
            raise EngineError(
                "A network needs at least two machines.",
                "Write ' / ' between them: 1x3090 / 1x4090.",
            )
        return parse_machine(machines_text)
    if len(parts) > MAX_MACHINES:
        raise EngineError(
            "At most {n} machines are allowed.", "List fewer of them.", n=MAX_MACHINES
        )
    rigs = [parse_machine(part) for part in parts]
    return _joined(text.strip(), rigs, Wires(other=parse_wire(wire) if wire.strip() else GIGABIT))


def parse_wire(text: str) -> LinkFacts:
    """Return the link for a text such as "1gbit,0.3ms"; defaults are those of Gigabit Ethernet.

    Raises:
        EngineError: the text is invalid.
    """
    found = GIGABIT
    for word in text.lower().replace(" ", "").split(","):
        if match := SPEED.fullmatch(word):
            rate = float(match[1]) * UNITS[match[2]] / 8 * PAYLOAD
            found = replace(found, bytes_per_s=rate) if rate else found
        elif match := LATENCY.fullmatch(word):
            found = replace(found, latency_s=float(match[1]) * UNITS[match[2]])
        else:
            raise EngineError(
                "'{word}' is not a network.",
                "Specify its speed and latency, for example 1gbit,0.3ms.",
                word=word[:40],
            )
    return replace(found, covered_bytes=MESSAGE_BYTES)


def _joined(text: str, rigs: Sequence[Rig], wires: Wires) -> Rig:
    devices = tuple(
        replace(device, id=far_id(number, device.id), uuid=f"{device.uuid}-{number}")
        for number, rig in enumerate(rigs)
        for device in rig.devices
    )
    facts = {
        far_id(number, device): replace(found, device=far_id(number, device))
        for number, rig in enumerate(rigs)
        for device, found in rig.facts.items()
    }
    links = Links.of_machines([rig.links for rig in rigs], wires)
    pcie = {
        far_id(number, device): slot
        for number, rig in enumerate(rigs)
        for device, slot in rig.topology.pcie.items()
    }
    joined = tuple(
        replace(link, a=far_id(number, link.a), b=far_id(number, link.b))
        for number, rig in enumerate(rigs)
        for link in rig.topology.links
    )
    return Rig(text, devices, facts, links, Topology(pcie, joined))
