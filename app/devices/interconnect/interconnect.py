"""Links between devices, reported by the driver or measured; slow, so run on threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from typing import TYPE_CHECKING, Final

import engine  # names that need torch are imported on use
from app.core.translation import tr, tr_later, translated
from engine import DeviceInfo, EngineError, PeerMode, machine_of

if TYPE_CHECKING:
    from engine import LinkFacts, LinkRecord, Links, Rig, Wires

LINK_NAMES: Final = {
    "nvlink": "NVLink", "p2p": tr_later("PCIe, directly"),
    "host": tr_later("by the host's memory"), "network": tr_later("the network"),
}  # fmt: skip
"""Text per kind of link; also used in the command line's JSON."""

PLACES: Final = {
    "peer": tr_later("directly"), "host": tr_later("by the host"), None: tr_later("copies only"),
}  # fmt: skip
"""Text per route; also used in the command line's JSON."""


@dataclass(frozen=True, slots=True)
class ProvenRoute:
    """A tested route from one GPU to another.

    Attributes:
        source, goal: device ids.
        small, large: texts of the routes for small transfers, which kernels write, and for large
            transfers, which are copied.
        record: test results for all routes.
        speed: measured speed of the chosen routes, if any.
        problems: sentences about faults and slow routes.
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
    """Device in the graph, with its slot's state ("4.0 x16") and, if higher, its maximum."""

    device: str
    slot: str = ""
    slot_at_most: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """Link between two devices, or between ranks that share a device.

    Attributes:
        a, b: device ids; equal for ranks that share a device.
        kind: kind of link between two GPUs; "host" for other links on this machine.
        route: the route as text.
        facts: measured or expected speed.
        detail: sentences about the bus, the tests, and why no faster route is possible.
        problems: sentences about faults and slow routes.
    """

    a: str
    b: str
    kind: str
    route: str
    facts: LinkFacts
    is_measured: bool
    detail: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InterconnectPicture:
    """All devices and the links between them."""

    nodes: tuple[Node, ...] = ()
    edges: tuple[Edge, ...] = ()


def proven_routes(
    devices: Sequence[DeviceInfo],
    topology: engine.Topology,
    file: engine.MachineFile,
    p2p: PeerMode = "auto",
) -> tuple[ProvenRoute, ...]:
    """Return the tested routes between GPUs."""
    forbidden = {frozenset((link.a, link.b)) for link in topology.links if link.peer_problem}
    routes = []
    for (source, goal), record in file.proofs(devices).items():
        mode: PeerMode = "off" if frozenset((source, goal)) in forbidden else p2p
        route = engine.chosen_way(record, mode)
        routes.append(
            ProvenRoute(
                source, goal, PLACES[route.stores], PLACES[route.copies], record,
                engine.speed_of(record, route), engine.link_problems(source, goal, record, mode),
            )
        )  # fmt: skip
    return tuple(routes)


def read_links(
    devices: Sequence[DeviceInfo], rig: Rig | None = None, wires: Wires | None = None
) -> InterconnectPicture:
    """Return the links of these devices or a simulated rig; `wires` lead to other machines."""
    if rig is not None:
        return links_picture(rig.devices, rig.topology, rig.links, {})
    usable = [device for device in devices if device.usable]
    here = [device for device in usable if not machine_of(device.id)]
    file, topology = engine.MachineFile.of_user(), engine.read_topology()
    routes = proven_routes(here, topology, file)
    tested = {(route.source, route.goal): route.speed for route in routes if route.speed}
    measured = {**file.links(here), **tested}
    links = engine.known_links(here, topology, file)
    links = engine.Links.of_machines([links], wires or engine.Wires())
    return links_picture(usable, topology, links, measured, routes)


def links_picture(
    devices: Sequence[DeviceInfo],
    topology: engine.Topology,
    links: Links,
    measured: Mapping[tuple[str, str], LinkFacts],
    routes: Sequence[ProvenRoute] = (),
) -> InterconnectPicture:
    """Return the devices and links for the graph.

    Args:
        links: measured or expected speed of each pair.
        measured: speeds of measured pairs.
        routes: tested routes between GPUs.
    """
    reported = {(link.a, link.b): link for link in topology.links}
    ids = [device.id for device in devices]
    pairs = [pair for pair in combinations(ids, 2) if _is_shown(pair, ids)]
    pairs += [(a, a) for a in ids if a == "cpu"]
    known = {frozenset(pair) for pair in measured}
    edges = []
    for a, b in pairs:
        link = reported.get((a, b)) or reported.get((b, a))
        is_measured = frozenset((a, b)) in known or links.wires.is_measured(
            *map(machine_of, (a, b))
        )
        both = [route for route in routes if {route.source, route.goal} == {a, b}]
        edges.append(_edge(a, b, link, links.between(a, b), both, is_measured=is_measured))
    slots = topology.pcie
    return InterconnectPicture(
        tuple(_node(device, slots.get(device)) for device in ids), tuple(edges)
    )


def _is_shown(pair: tuple[str, str], ids: Sequence[str]) -> bool:
    """Return whether to show a link; of the links between two machines, show the first devices'."""
    a, b = map(machine_of, pair)
    if a == b:
        return True
    first = {number: device for device in reversed(ids) for number in [machine_of(device)]}
    return pair == (first[a], first[b])


def _node(device: str, slot: engine.Pcie | None) -> Node:
    if slot is None or not (slot.generation and slot.width):
        return Node(device)
    now = (slot.generation, slot.width)
    most = (slot.max_generation, slot.max_width)
    is_less = any(have < could for have, could in zip(now, most, strict=True))
    return Node(device, slot_text(*now), slot_text(*most) if is_less else "")


def _edge(
    a: str, b: str, link: engine.Link | None, facts: LinkFacts, routes: Sequence[ProvenRoute],
    *, is_measured: bool,
) -> Edge:  # fmt: skip
    if machine_of(a) != machine_of(b):
        return Edge(a, b, "network", LINK_NAMES["network"], facts, is_measured)
    if link is None:
        route = tr_later("own memory") if a == b else tr_later("the GPU's slot")
        return Edge(a, b, "host", route, facts, is_measured)
    parts = [tr("Both are on {bus}.").format(bus=link.ancestor) if link.ancestor else ""]
    if link.peer_problem:
        parts.append(tr("No direct access: {why}.").format(why=translated(link.peer_problem)))
    parts += dict.fromkeys(proof_text(route) for route in routes)
    problems = tuple(dict.fromkeys(text for route in routes for text in route.problems))
    detail = " ".join(part for part in parts if part)
    is_direct = any("directly" in (route.small, route.large) for route in routes)
    if routes and not is_direct:
        return Edge(a, b, "host", LINK_NAMES["host"], facts, is_measured, detail, problems)
    return Edge(a, b, link.kind, route_text(link), facts, is_measured, detail, problems)


def proof_text(route: ProvenRoute) -> str:
    """Return "Small transfers go directly, large ones by the host; tested on 2026-03-01."."""
    if route.small == route.large:
        text = tr("Transfers go {route}; tested on {date}.")
        return text.format(route=tr(route.small), date=route.record.date)
    small = tr("as copies") if route.small == PLACES[None] else tr(route.small)
    text = tr("Small transfers go {small}, large ones {large}; tested on {date}.")
    return text.format(small=small, large=tr(route.large), date=route.record.date)


def slot_text(generation: int, width: int) -> str:
    """Return a slot as "4.0 x16", or "?" if it is unknown."""
    return f"{generation}.0 x{width}" if generation and width else "?"


def route_text(link: engine.Link) -> str:
    """Return a link as "4 × NVLink 3" or "PCIe, directly"."""
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
    """Measure devices and the links between them, about a second each, and save the results.

    Kernels and routes between GPUs are tested again.

    Args:
        say: receives a sentence per measurement and per error; failed measurements are skipped.
        is_stopped: called before each measurement; returns True to stop.
    """
    file = engine.MachineFile.of_user()
    usable = [device for device in devices if device.usable and not machine_of(device.id)]
    for device in usable:
        if is_stopped():
            return
        say(tr("Measuring {device} …").format(device=device.id))
        try:
            file.forget_device(device)
            engine.measure_facts(device, (), file)
        except EngineError as error:
            say(translated(error.message))
    gpus = [device.id for device in usable if device.kind != "cpu"]
    if gpus and not is_stopped():
        _test_kernels(usable, say)
    if len(gpus) > 1 and not is_stopped():
        _test_routes(gpus, say)
    for a, b in combinations_with_replacement(usable, 2):
        if is_stopped():
            return
        if a is b and a.kind != "cpu":
            continue
        say(tr("Measuring between {one} and {other} …").format(one=a.id, other=b.id))
        try:
            file.keep_link(a, b, engine.measure_link(a.id, b.id).facts)
        except EngineError as error:
            say(translated(error.message))


def _test_kernels(devices: Sequence[DeviceInfo], say: Callable[[str], None]) -> None:
    gpus = [device.id for device in devices if device.kind != "cpu"]
    say(tr("Testing kernels on {gpus} …").format(gpus=", ".join(gpus)))
    try:
        for gpu, why in engine.prove_cards(devices).items():
            text = tr("{gpu} uses PyTorch instead of Tandem's kernels: {why}.")
            say(text.format(gpu=gpu, why=why))
    except EngineError as error:
        say(translated(error.message))


def _test_routes(gpus: Sequence[str], say: Callable[[str], None]) -> None:
    say(tr("Testing routes between {gpus} …").format(gpus=", ".join(gpus)))
    try:
        for sentence in engine.prove_links(gpus).notes:
            say(sentence)
    except EngineError as error:
        say(translated(error.message))
