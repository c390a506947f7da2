"""Simulated machines to plan for: "2x3090,1x3060" becomes devices with their expected facts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import combinations

from engine.errors import EngineError, Sentence, either
from engine.hardware.devices.topology import Link, LinkKind, Pcie, Topology
from engine.hardware.devices.types import CPU, DeviceInfo
from engine.planning.speed.device_specs import CPU_SPECS, GIB, GPU_SPECS, RESERVED_BYTES, DeviceSpec
from engine.planning.speed.facts import DeviceFacts, LinkFacts
from engine.planning.speed.links import CLASSES, SHARED_MEMORY, Links, nvlink_facts

MAX_DEVICES = 16

SIMULATED = Sentence("These devices are simulated: you can plan for them, but not load a model.")

ENTRY = re.compile(r"(?:(?P<count>\d{1,3})\s*[xX×*]\s*)?(?P<name>\S.*)")
LANES = re.compile(r"x(?:1|2|4|8|16)(?:/x?(?:1|2|4|8|16))*")
NVLINK_VERSION = 3
"""NVLink version that a simulated driver reports."""

NVLINK_GB, BRIDGE_LINK_GB = 25.0, 14.0625
"""10⁹ bytes/s per NVLink on data-centre GPUs, and per link in a GA102 bridge, which has four."""

BRIDGED_GB_PER_S = 100
"""Bandwidth, in 10⁹ bytes/s, below which a GPU's NVLinks form a bridge between two GPUs; otherwise
they lead to a switch."""


@dataclass(frozen=True, slots=True)
class Rig:
    """A simulated machine.

    Attributes:
        devices: devices as `list_devices` would return them, CPU last. They count as usable, so
            that the window can plan for them; loading must be refused with `SIMULATED`.
        topology: slots and links as the driver would report them.
    """

    text: str
    devices: tuple[DeviceInfo, ...]
    facts: Mapping[str, DeviceFacts]
    links: Links
    topology: Topology

    @property
    def free_bytes(self) -> dict[str, int]:
        """Free memory by device."""
        return {device.id: device.free_bytes for device in self.devices}

    def list_devices(self) -> list[DeviceInfo]:
        """Return the devices; replaces `engine.list_devices`."""
        return list(self.devices)


def parse_rig(text: str) -> Rig:
    """Return the simulated machine for a text such as "2x3090,1x3060" or "4x4090@p2p,x8".

    One entry may be a CPU. The route between GPUs follows an @: nvlink, p2p, host or shm; the
    default is the fastest that the GPUs' drivers allow. NVLink bridges join the first and second
    GPU of a kind, the third and fourth, and so on. PCIe lanes may follow, for all slots or one by
    one: x8, or x16/x4.

    Raises:
        EngineError: an entry is unknown, or there are no entries or too many.
    """
    cards_text, _, links_text = text.partition("@")
    gpus: list[DeviceSpec] = []
    host = CPU_SPECS[0]
    for entry in cards_text.split(","):
        count, card = _entry(entry)
        if not card.n_cores:
            gpus += [card] * count
            if len(gpus) > MAX_DEVICES:
                problem = "A rig can have at most {n} GPUs."
                raise EngineError(problem, "List fewer of them.", n=MAX_DEVICES)
        elif count == 1:
            host = card
        else:
            raise EngineError(
                "A machine has one CPU.",
                "List {entry} only once.",
                entry=entry.split("x")[-1].strip(),
            )
    route, lanes = _links(links_text)
    return _build(text.strip(), _in_slots(gpus, lanes), host, route)


def _links(text: str) -> tuple[str, list[int]]:
    # the route is "" for the default
    route, lanes = "", list[int]()
    for word in text.lower().replace(" ", "").split(",") if text.strip() else ():
        if LANES.fullmatch(word):
            lanes = [int(number) for number in re.findall(r"\d+", word)]
        elif word in CLASSES:
            route = word
        else:
            raise EngineError(
                "'{word}' is not a route between GPUs.",
                "Use {names}, or slot lanes such as x8 or x16/x4.",
                word=word,
                names=", ".join(CLASSES),
            )
    return route, lanes


def _in_slots(gpus: Sequence[DeviceSpec], lanes: Sequence[int]) -> list[DeviceSpec]:
    if not lanes:
        return list(gpus)
    if len(lanes) not in (1, len(gpus)):
        raise EngineError(
            "Lanes are given for {n} slots, but there are {n_gpus} GPUs.",
            "Give one number of lanes for all GPUs, or one per GPU.",
            n=len(lanes),
            n_gpus=len(gpus),
        )
    each = list(lanes) * len(gpus) if len(lanes) == 1 else lanes
    return [
        replace(card, pcie=(card.pcie[0], min(card.pcie[1], n)))
        for card, n in zip(gpus, each, strict=True)
    ]


def _entry(text: str) -> tuple[int, DeviceSpec]:
    match = ENTRY.fullmatch(text.strip())
    if match is None:
        raise EngineError("A rig needs at least one card.", "For example 2x3090,1x3060.")
    count = int(match["count"] or 1)
    if not count:
        raise EngineError("'{text}' asks for no cards.", "Write at least 1x.", text=text.strip())
    return count, spec_from_text(match["name"])


def spec_from_text(name: str) -> DeviceSpec:
    """Return the specification for a user's name for a device, such as "3090" or "rtx 4060 ti".

    Raises:
        EngineError: there is no such device; the hint names similar ones.
    """
    known = _names()
    card = known.get(_plain(name))
    if card is not None:
        return card
    near = get_close_matches(_plain(name), known, n=3, cutoff=0.6)
    names = dict.fromkeys(known[key].name for key in near)
    every = (card.name for card in (*GPU_SPECS, *CPU_SPECS))
    raise EngineError(
        "The card '{name}' is not known.",
        "Did you mean {names}?" if near else "The known cards are {names}.",
        name=name.strip()[:60],
        names=either(list(names)) if near else ", ".join(every),
    )


def spec_from_driver(name: str) -> DeviceSpec | None:
    """Return the specification for a name from a driver ("NVIDIA GeForce RTX 3090"), or None.

    A Ti, SUPER or laptop GPU is a different model.
    """
    words = _words(name)
    matches = [card for card in (*GPU_SPECS, *CPU_SPECS) if _is_part(_model(card), words)]
    best = max(matches, key=lambda card: len(_model(card)), default=None)
    if best is None or VARIANTS & (set(words) - set(_model(best))):
        return None
    return best


VARIANTS = {"ti", "super", "laptop", "max", "mobile"}
"""Words that distinguish variants of a model."""

NUMBER = re.compile(r"\d.")
MEMORY_SIZE = re.compile(r"\d+gb")


def _model(card: DeviceSpec) -> list[str]:
    # without the memory size, which drivers omit
    return [word for word in _words(card.name) if not MEMORY_SIZE.fullmatch(word)]


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _is_part(words: Sequence[str], of: Sequence[str]) -> bool:
    n = len(words)
    return any(list(of[at : at + n]) == list(words) for at in range(len(of) - n + 1))


def _names() -> dict[str, DeviceSpec]:
    known: dict[str, DeviceSpec] = {}
    for card in (*GPU_SPECS, *CPU_SPECS):
        for words in (_words(card.name), _model(card)):
            number = next(at for at, word in enumerate(words) if NUMBER.search(word))
            for begin in range(number + 1):
                known.setdefault("".join(words[begin:]), card)
    return known


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _build(text: str, gpus: Sequence[DeviceSpec], host: DeviceSpec, route: str) -> Rig:
    cards = {f"cuda:{number}": card for number, card in enumerate(gpus)}
    devices = [_gpu_info(device, card) for device, card in cards.items()]
    devices.append(_host_info(host))
    facts = {device: card.facts(device) for device, card in cards.items()}
    facts[CPU] = host.facts(CPU)
    pcie = {device: Pcie(*card.pcie, *card.pcie) for device, card in cards.items()}
    routes = _routes(cards, route)
    pairs: dict[tuple[str, str], LinkFacts] = {(CPU, CPU): SHARED_MEMORY}
    for device, card in cards.items():
        pairs[device, CPU] = LinkFacts(CLASSES["host"].latency_s, card.pcie_bytes_per_s)
    for (a, b), kind in routes.items():
        pairs[a, b] = _facts(kind, cards[a], cards[b])
    links = Links(pairs, ways=routes, host_bytes_per_s=1e9 * host.gb_per_s * DMA_PART)
    joined = tuple(_link(a, b, kind, cards[a]) for (a, b), kind in routes.items())
    return Rig(text, tuple(devices), facts, links, Topology(pcie, joined))


DMA_PART = 0.75
"""Fraction of the host memory's bandwidth that reads and writes by GPUs reach; an estimate."""


def _gpu_info(device: str, card: DeviceSpec) -> DeviceInfo:
    total = round(card.memory_gib * GIB)
    number = int(device.partition(":")[2])
    return DeviceInfo(
        device, "cuda", card.name, total, total - RESERVED_BYTES,
        uuid=f"GPU-simulated-{number}", pci_bus=f"00000000:{number + 1:02X}:00.0",
        compute_capability=card.capability,
    )  # fmt: skip


def _host_info(host: DeviceSpec) -> DeviceInfo:
    total = round(host.memory_gib * GIB)
    return DeviceInfo(
        CPU, "cpu", host.name, total, total - 4 * RESERVED_BYTES, n_cores=host.n_cores,
    )  # fmt: skip


def _routes(cards: Mapping[str, DeviceSpec], route: str) -> dict[tuple[str, str], str]:
    bridged = _bridged(cards)
    found: dict[tuple[str, str], str] = {}
    for a, b in combinations(cards, 2):
        usual = _usual_route(cards[a], cards[b])
        if route == "nvlink":
            found[a, b] = "nvlink" if (a, b) in bridged else usual
        else:
            found[a, b] = route or usual
    if route == "nvlink" and "nvlink" not in found.values():
        raise EngineError(
            "No two of these cards can be joined by NVLink.", "Use p2p or host instead."
        )
    return found


def _usual_route(a: DeviceSpec, b: DeviceSpec) -> str:
    # without a bridge, which is sold separately
    if not (a.has_peer_access and b.has_peer_access):
        return "host"
    return "nvlink" if min(a.nvlink_gb_per_s, b.nvlink_gb_per_s) > BRIDGED_GB_PER_S else "p2p"


def _bridged(cards: Mapping[str, DeviceSpec]) -> set[tuple[str, str]]:
    # the first two of a kind, the next two, and so on
    found = set()
    for name in {card.name for card in cards.values() if card.nvlink_gb_per_s}:
        same = [device for device, card in cards.items() if card.name == name]
        found |= set(zip(same[::2], same[1::2], strict=False))
    return found


def _facts(route: str, a: DeviceSpec, b: DeviceSpec) -> LinkFacts:
    if route == "nvlink":
        return nvlink_facts(1e9 * min(a.nvlink_gb_per_s, b.nvlink_gb_per_s))
    return CLASSES[route].facts(min(a.pcie_bytes_per_s, b.pcie_bytes_per_s))


def _link(a: str, b: str, route: str, card: DeviceSpec) -> Link:
    kind: LinkKind = "nvlink" if route == "nvlink" else "p2p" if route == "p2p" else "host"
    is_bridge = card.nvlink_gb_per_s < BRIDGED_GB_PER_S
    n_nvlink = round(card.nvlink_gb_per_s / (BRIDGE_LINK_GB if is_bridge else NVLINK_GB))
    if kind == "nvlink":
        return Link(a, b, kind, n_nvlink, NVLINK_VERSION, "one host bridge")
    problem = "" if kind == "p2p" else "these GPUs do not support it"
    return Link(a, b, kind, 0, 0, "one host bridge", problem)
