"""What connects the devices: as the driver tells it, and as it was measured. Slow; for a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from typing import Final

import engine  # names that need torch are resolved when they are used
from engine import (
    DeviceInfo,
    EngineError,
    Link,
    LinkFacts,
    Links,
    MachineFile,
    Pcie,
    Rig,
    Topology,
    known_links,
    read_topology,
)

LINK_NAMES: Final = {
    "nvlink": "NVLink", "p2p": "PCIe, directly", "host": "by the host's memory",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """A device.

    Attributes:
        slot: "4.0 x16"; "" for the CPU, or where the driver does not tell.
        slot_at_most: what it could be where that is more, else "".
    """

    device: str
    slot: str = ""
    slot_at_most: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """What connects two devices; the same one twice for ranks that share it.

    Attributes:
        kind: of the link of two GPUs; "host" for others.
        way: in words.
        facts: measured, or else expected.
        detail: what both hang on, and why there is nothing faster, in words; may be empty.
    """

    a: str
    b: str
    kind: str
    way: str
    facts: LinkFacts
    is_measured: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LinksPicture:
    """All devices and all pairs of them."""

    nodes: tuple[Node, ...] = ()
    edges: tuple[Edge, ...] = ()


def read_links(devices: Sequence[DeviceInfo], rig: Rig | None = None) -> LinksPicture:
    """What is known of the links between these devices, or between those of a simulated rig."""
    if rig is not None:
        return links_picture(rig.devices, rig.topology, rig.links, {})
    usable = [device for device in devices if device.usable]
    file, topology = MachineFile.of_user(), read_topology()
    return links_picture(usable, topology, known_links(usable, topology, file), file.links(usable))


def links_picture(
    devices: Sequence[DeviceInfo],
    topology: Topology,
    links: Links,
    measured: dict[tuple[str, str], LinkFacts],
) -> LinksPicture:
    """Put together what is known.

    Args:
        links: what is measured or expected of every pair.
        measured: the pairs of which something was measured.
    """
    told = {(link.a, link.b): link for link in topology.links}
    ids = [device.id for device in devices]
    pairs = [(a, b) for a, b in combinations(ids, 2)] + [(a, a) for a in ids if a == "cpu"]
    known = {frozenset(pair) for pair in measured}
    edges = []
    for a, b in pairs:
        link = told.get((a, b)) or told.get((b, a))
        is_measured = frozenset((a, b)) in known
        edges.append(_edge(a, b, link, links.between(a, b), is_measured=is_measured))
    slots = topology.pcie
    return LinksPicture(tuple(_node(device, slots.get(device)) for device in ids), tuple(edges))


def _node(device: str, slot: Pcie | None) -> Node:
    if slot is None or not (slot.generation and slot.width):
        return Node(device)
    now = (slot.generation, slot.width)
    most = (slot.max_generation, slot.max_width)
    is_less = any(have < could for have, could in zip(now, most, strict=True))
    return Node(device, slot_text(*now), slot_text(*most) if is_less else "")


def _edge(a: str, b: str, link: Link | None, facts: LinkFacts, *, is_measured: bool) -> Edge:
    if link is None:
        way = "own memory" if a == b else "the GPU's slot"
        return Edge(a, b, "host", way, facts, is_measured)
    parts = [f"Both on {link.ancestor}." if link.ancestor else ""]
    if link.peer_problem:
        parts.append(f"They do not reach each other: {link.peer_problem}.")
    return Edge(a, b, link.kind, way_text(link), facts, is_measured, " ".join(parts).strip())


def slot_text(generation: int, width: int) -> str:
    """ "4.0 x16"; "?" where the driver does not tell."""
    return f"{generation}.0 x{width}" if generation and width else "?"


def way_text(link: Link) -> str:
    """ "4 × NVLink 3" or "PCIe, directly"."""
    name = LINK_NAMES[link.kind]
    if link.n_nvlink:
        version = f" {link.nvlink_version}" if link.nvlink_version else ""
        return f"{link.n_nvlink} × {name}{version}"
    return name


def measure_links(
    devices: Sequence[DeviceInfo],
    say: Callable[[str], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Measure devices and links between them, and keep it for predictions; about a second each.

    Args:
        say: told in a sentence what is measured, and what failed and is left out.
        is_stopped: asked before each measurement.
    """
    file = MachineFile.of_user()
    usable = [device for device in devices if device.usable]
    for device in usable:
        if is_stopped():
            return
        say(f"Measuring {device.id} …")
        try:
            file.forget_device(device)
            engine.measure_facts(device, (), file)
        except EngineError as error:
            say(str(error))
    for a, b in combinations_with_replacement(usable, 2):
        if is_stopped():
            return
        if a is b and a.kind != "cpu":
            continue
        say(f"Measuring {a.id} with {b.id} …")
        try:
            file.keep_link(a, b, engine.measure_link(a.id, b.id).facts)
        except EngineError as error:
            say(str(error))
