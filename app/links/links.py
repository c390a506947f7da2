"""What connects the devices: as the driver tells it, and as it was measured. Slow; for a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from typing import Final

import engine  # names that need torch are resolved when they are used
from engine import (
    DeviceInfo,
    EngineError,
    Link,
    LinkFacts,
    LinkRecord,
    Links,
    MachineFile,
    Pcie,
    PeerMode,
    Rig,
    Topology,
    chosen_way,
    known_links,
    link_problems,
    read_topology,
    speed_of,
)

LINK_NAMES: Final = {
    "nvlink": "NVLink", "p2p": "PCIe, directly", "host": "by the host's memory",
}  # fmt: skip

PLACES: Final = {"peer": "directly", "host": "by the host", None: "copies only"}


@dataclass(frozen=True, slots=True)
class KnownWay:
    """How one GPU gives another its values, as was proven here.

    Attributes:
        small, large: how kernels write few of them, and how copies bring many, in words.
        record: what came of trying all ways.
        speed: of those that are used; None if that was not measured.
        problems: what is wrong or slow, as sentences.
    """

    source: str
    goal: str
    small: str
    large: str
    record: LinkRecord
    speed: LinkFacts | None
    problems: tuple[str, ...]


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
        detail: what both hang on, what was proven, and why there is nothing faster, in words; may
            be empty.
        problems: what was found to be wrong or slow, as sentences.
    """

    a: str
    b: str
    kind: str
    way: str
    facts: LinkFacts
    is_measured: bool
    detail: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinksPicture:
    """All devices and all pairs of them."""

    nodes: tuple[Node, ...] = ()
    edges: tuple[Edge, ...] = ()


def known_ways(
    devices: Sequence[DeviceInfo], topology: Topology, file: MachineFile, p2p: PeerMode = "auto"
) -> tuple[KnownWay, ...]:
    """What was proven of the ways between GPUs; nothing of pairs that nobody has tried."""
    forbidden = {frozenset((link.a, link.b)) for link in topology.links if link.peer_problem}
    found = []
    for (source, goal), record in file.proofs(devices).items():
        mode: PeerMode = "off" if frozenset((source, goal)) in forbidden else p2p
        way = chosen_way(record, mode)
        found.append(
            KnownWay(
                source, goal, PLACES[way.stores], PLACES[way.copies], record,
                speed_of(record, way), link_problems(source, goal, record, mode),
            )
        )  # fmt: skip
    return tuple(found)


def read_links(devices: Sequence[DeviceInfo], rig: Rig | None = None) -> LinksPicture:
    """What is known of the links between these devices, or between those of a simulated rig."""
    if rig is not None:
        return links_picture(rig.devices, rig.topology, rig.links, {})
    usable = [device for device in devices if device.usable]
    file, topology = MachineFile.of_user(), read_topology()
    ways = known_ways(usable, topology, file)
    measured = {**file.links(usable), **{(w.source, w.goal): w.speed for w in ways if w.speed}}
    return links_picture(usable, topology, known_links(usable, topology, file), measured, ways)


def links_picture(
    devices: Sequence[DeviceInfo],
    topology: Topology,
    links: Links,
    measured: Mapping[tuple[str, str], LinkFacts],
    ways: Sequence[KnownWay] = (),
) -> LinksPicture:
    """Put together what is known.

    Args:
        links: what is measured or expected of every pair.
        measured: the pairs of which something was measured.
        ways: what was proven of pairs of GPUs.
    """
    told = {(link.a, link.b): link for link in topology.links}
    ids = [device.id for device in devices]
    pairs = [(a, b) for a, b in combinations(ids, 2)] + [(a, a) for a in ids if a == "cpu"]
    known = {frozenset(pair) for pair in measured}
    edges = []
    for a, b in pairs:
        link = told.get((a, b)) or told.get((b, a))
        is_measured = frozenset((a, b)) in known
        both = [way for way in ways if {way.source, way.goal} == {a, b}]
        edges.append(_edge(a, b, link, links.between(a, b), both, is_measured=is_measured))
    slots = topology.pcie
    return LinksPicture(tuple(_node(device, slots.get(device)) for device in ids), tuple(edges))


def _node(device: str, slot: Pcie | None) -> Node:
    if slot is None or not (slot.generation and slot.width):
        return Node(device)
    now = (slot.generation, slot.width)
    most = (slot.max_generation, slot.max_width)
    is_less = any(have < could for have, could in zip(now, most, strict=True))
    return Node(device, slot_text(*now), slot_text(*most) if is_less else "")


def _edge(
    a: str, b: str, link: Link | None, facts: LinkFacts, ways: Sequence[KnownWay],
    *, is_measured: bool,
) -> Edge:  # fmt: skip
    if link is None:
        way = "own memory" if a == b else "the GPU's slot"
        return Edge(a, b, "host", way, facts, is_measured)
    parts = [f"Both on {link.ancestor}." if link.ancestor else ""]
    if link.peer_problem:
        parts.append(f"They do not reach each other: {link.peer_problem}.")
    parts += dict.fromkeys(proof_text(way) for way in ways)
    problems = tuple(dict.fromkeys(text for way in ways for text in way.problems))
    detail = " ".join(part for part in parts if part)
    is_direct = any("directly" in (way.small, way.large) for way in ways)
    if ways and not is_direct:
        return Edge(a, b, "host", LINK_NAMES["host"], facts, is_measured, detail, problems)
    return Edge(a, b, link.kind, way_text(link), facts, is_measured, detail, problems)


def proof_text(way: KnownWay) -> str:
    """ "Small values go directly, large ones by the host; proven on 2026-03-01." """
    if way.small == way.large:
        return f"Values go {way.small}; proven on {way.record.date}."
    small = "in copies" if way.small == PLACES[None] else way.small
    return f"Small values go {small}, large ones {way.large}; proven on {way.record.date}."


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
    """Measure devices and links between them, and keep it; about a second each.

    The ways between GPUs are tried anew, whatever is known of them.

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
    gpus = [device.id for device in usable if device.kind != "cpu"]
    if len(gpus) > 1 and not is_stopped():
        _prove(gpus, say)
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


def _prove(gpus: Sequence[str], say: Callable[[str], None]) -> None:
    """Try the ways between GPUs."""
    say(f"Trying the ways between {', '.join(gpus)} …")
    try:
        for sentence in engine.prove_links(gpus).notes:
            say(sentence)
    except EngineError as error:
        say(str(error))
