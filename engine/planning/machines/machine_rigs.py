"""Simulated machines with a network between them: "2x3090 / 1x4090 ~ 1gbit,0.3ms"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from engine.errors import EngineError
from engine.hardware.devices.links import Topology
from engine.hardware.devices.places import far_id
from engine.planning.speed.facts import MESSAGE_BYTES, LinkFacts
from engine.planning.speed.machine_links import Links
from engine.planning.speed.rigs import Rig
from engine.planning.speed.rigs import parse_rig as parse_machine
from engine.planning.speed.wires import GIGABIT, Wires

MOST_MACHINES = 16
"""Most machines of a rig."""

BETWEEN = re.compile(r"\s/\s")
"""What stands between two machines; lanes of slots have no spaces around theirs."""

SPEED = re.compile(r"(\d+(?:\.\d+)?)([mg])bit(?:/s)?")
LATENCY = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs)")

PAYLOAD = 0.94
"""Part of Ethernet's bits that are a TCP stream's own: 1448 of 1538 bytes of a packet."""

UNITS = {"m": 1e6, "g": 1e9, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def parse_rig(text: str) -> Rig:
    """Return the simulated machine for a text, or several machines with " / " between them.

    Behind a ~ stands the network between machines: its speed, the latency of a message, or both.
    Devices of the second machine and further ones have ids such as "1/cuda:0".

    Raises:
        EngineError: a part of the text is unknown, or there are too many machines.
    """
    machines_text, _, wire = text.partition("~")
    parts = BETWEEN.split(machines_text)
    if len(parts) == 1:
        if wire.strip():
            raise EngineError(
                "A network needs two machines.", "Write ' / ' between them: 1x3090 / 1x4090."
            )
        return parse_machine(machines_text)
    if len(parts) > MOST_MACHINES:
        raise EngineError(f"There are at most {MOST_MACHINES} machines.", "Write fewer of them.")
    rigs = [parse_machine(part) for part in parts]
    return _joined(text.strip(), rigs, Wires(other=parse_wire(wire) if wire.strip() else GIGABIT))


def parse_wire(text: str) -> LinkFacts:
    """Return the link of a text such as "1gbit,0.3ms"; what it lacks is that of Gigabit Ethernet.

    Raises:
        EngineError: it is no such text.
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
                f"'{word[:40]}' is no network.", "Write its speed and latency, such as 1gbit,0.3ms."
            )
    return replace(found, covered_bytes=MESSAGE_BYTES)


def _joined(text: str, rigs: Sequence[Rig], wires: Wires) -> Rig:
    """Return several machines as one rig."""
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
    told = tuple(
        replace(link, a=far_id(number, link.a), b=far_id(number, link.b))
        for number, rig in enumerate(rigs)
        for link in rig.topology.links
    )
    return Rig(text, devices, facts, links, Topology(pcie, told))
