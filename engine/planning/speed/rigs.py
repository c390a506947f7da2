"""Devices that are not here, to plan for: "2x3090,1x3060" becomes a list of devices and what is
known of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import combinations

from engine.devices.links import Link, LinkKind, Pcie, Topology
from engine.devices.types import CPU, DeviceInfo
from engine.errors import EngineError
from engine.planning.speed.device_specs import CPU_SPECS, GIB, GPU_SPECS, RESERVED_BYTES, DeviceSpec
from engine.planning.speed.facts import DeviceFacts, LinkFacts
from engine.planning.speed.link_classes import CLASSES, nvlink_facts
from engine.planning.speed.machine_links import SHARED_MEMORY, Links

MOST_DEVICES = 16
SIMULATED = "These devices are simulated: plans can be made for them, but nothing can be loaded."
ENTRY = re.compile(r"(?:(?P<count>\d{1,3})\s*[xX×*]\s*)?(?P<name>\S.*)")
LANES = re.compile(r"x(?:1|2|4|8|16)(?:/x?(?:1|2|4|8|16))*")
NVLINK_VERSION = 3
NVLINK_GB, BRIDGE_LINK_GB = 25.0, 14.0625
"""10⁹ bytes/s of one NVLink of data centre cards, and of the four in a bridge of GA102."""

BRIDGED_GB_PER_S = 100
"""NVLinks that give less are a bridge, which joins two cards; others lead to a switch."""


@dataclass(frozen=True, slots=True)
class Rig:
    """A simulated machine.

    Attributes:
        text: as it was written.
        devices: as `list_devices` would give them, the CPU last. They count as usable, so that a
            window can plan for them; loading on them must be refused, with `SIMULATED`.
        facts: by device.
        links: of all pairs.
        topology: the same as the driver would tell it.
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
        """In the place of `engine.devices.list_devices`."""
        return list(self.devices)


def parse_rig(text: str) -> Rig:
    """A machine from cards and how many of each, such as "2x3090,1x3060" or "4x4090@p2p,x8".

    One entry may be a processor. Behind an @ stands how GPUs reach each other: nvlink, p2p, host or
    shm; without it, as the cards' drivers let them. NVLink bridges join the first and the second
    card of a kind, the third and the fourth, and so on. Lanes of slots may follow, of all or of one
    after the other: x8, or x16/x4.

    Raises:
        EngineError: an entry is unknown, or there is none, or there are too many.
    """
    cards_text, _, links_text = text.partition("@")
    gpus: list[DeviceSpec] = []
    host = CPU_SPECS[0]
    for entry in cards_text.split(","):
        count, card = _entry(entry)
        if not card.n_cores:
            gpus += [card] * count
            _check_count(gpus)
        elif count == 1:
            host = card
        else:
            raise EngineError(
                "A machine has one CPU.", f"Write {entry.split('x')[-1].strip()} once."
            )
    way, lanes = _links(links_text)
    return _build(text.strip(), _in_slots(gpus, lanes), host, way)


def _links(text: str) -> tuple[str, list[int]]:
    """How GPUs reach each other, "" for as usual, and the lanes of slots where they are told."""
    way, lanes = "", list[int]()
    for word in text.lower().replace(" ", "").split(",") if text.strip() else ():
        if LANES.fullmatch(word):
            lanes = [int(number) for number in re.findall(r"\d+", word)]
        elif word in CLASSES:
            way = word
        else:
            raise EngineError(
                f"'{word}' is no way for GPUs to reach each other.",
                f"Use {', '.join(CLASSES)}, or lanes of slots such as x8 or x16/x4.",
            )
    return way, lanes


def _in_slots(gpus: Sequence[DeviceSpec], lanes: Sequence[int]) -> list[DeviceSpec]:
    """The cards in slots of so many lanes, of which each uses those that it has."""
    if not lanes:
        return list(gpus)
    if len(lanes) not in (1, len(gpus)):
        raise EngineError(
            f"{len(lanes)} slots are told of {len(gpus)} GPUs.",
            "Write one number of lanes for all, or one for each.",
        )
    each = list(lanes) * len(gpus) if len(lanes) == 1 else lanes
    return [
        replace(card, pcie=(card.pcie[0], min(card.pcie[1], n)))
        for card, n in zip(gpus, each, strict=True)
    ]


def _entry(text: str) -> tuple[int, DeviceSpec]:
    match = ENTRY.fullmatch(text.strip())
    if match is None:
        raise EngineError("A rig needs cards.", "For example 2x3090,1x3060.")
    count = int(match["count"] or 1)
    if not count:
        raise EngineError(f"'{text.strip()}' is no card at all.", "Write at least 1x.")
    return count, spec_from_text(match["name"])


def _check_count(gpus: Sequence[DeviceSpec]) -> None:
    if len(gpus) > MOST_DEVICES:
        raise EngineError(f"A rig has at most {MOST_DEVICES} GPUs.", "Write fewer of them.")


def spec_from_text(name: str) -> DeviceSpec:
    """The card that a person means: "3090", "rtx 4060 ti" or "7900xtx".

    Raises:
        EngineError: there is none; suggests what may be meant.
    """
    known = _names()
    card = known.get(_plain(name))
    if card is not None:
        return card
    near = get_close_matches(_plain(name), known, n=3, cutoff=0.6)
    if near:
        names = dict.fromkeys(known[key].name for key in near)
        hint = f"Did you mean {' or '.join(names)}?"
    else:
        hint = f"Known are {', '.join(card.name for card in (*GPU_SPECS, *CPU_SPECS))}."
    raise EngineError(f"The card '{name.strip()[:60]}' is not known.", hint)


def spec_from_driver(name: str) -> DeviceSpec | None:
    """The card that a driver calls `name`, such as "NVIDIA GeForce RTX 3090"; None if unknown.

    A Ti or SUPER is another card than the one without, and so is a laptop's.
    """
    words = _words(name)
    found = [card for card in (*GPU_SPECS, *CPU_SPECS) if _is_part(_model(card), words)]
    best = max(found, key=lambda card: len(_model(card)), default=None)
    if best is None or VARIANTS & (set(words) - set(_model(best))):
        return None
    return best


VARIANTS = {"ti", "super", "laptop", "max", "mobile"}
NUMBER = re.compile(r"\d.")
MEMORY_SIZE = re.compile(r"\d+gb")


def _model(card: DeviceSpec) -> list[str]:
    """The words of its name without the size of its memory, which drivers leave out."""
    return [word for word in _words(card.name) if not MEMORY_SIZE.fullmatch(word)]


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _is_part(words: Sequence[str], of: Sequence[str]) -> bool:
    """Whether some words stand in others, next to each other."""
    n = len(words)
    return any(list(of[at : at + n]) == list(words) for at in range(len(of) - n + 1))


def _names() -> dict[str, DeviceSpec]:
    """All names that a card may be written with, as `_plain` makes them: "3090" for "RTX 3090"."""
    known: dict[str, DeviceSpec] = {}
    for card in (*GPU_SPECS, *CPU_SPECS):
        for words in (_words(card.name), _model(card)):
            number = next(at for at, word in enumerate(words) if NUMBER.search(word))
            for begin in range(number + 1):
                known.setdefault("".join(words[begin:]), card)
    return known


def _plain(name: str) -> str:
    """A name without what people write in different ways."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _build(text: str, gpus: Sequence[DeviceSpec], host: DeviceSpec, way: str) -> Rig:
    cards = {f"cuda:{number}": card for number, card in enumerate(gpus)}
    devices = [_gpu_info(device, card) for device, card in cards.items()]
    devices.append(_host_info(host))
    facts = {device: card.facts(device) for device, card in cards.items()}
    facts[CPU] = host.facts(CPU)
    pcie = {device: Pcie(*card.pcie, *card.pcie) for device, card in cards.items()}
    ways = _ways(cards, way)
    pairs: dict[tuple[str, str], LinkFacts] = {(CPU, CPU): SHARED_MEMORY}
    for device, card in cards.items():
        pairs[device, CPU] = LinkFacts(CLASSES["host"].latency_s, card.pcie_bytes_per_s)
    for (a, b), kind in ways.items():
        pairs[a, b] = _facts(kind, cards[a], cards[b])
    links = Links(pairs, ways=ways, host_bytes_per_s=1e9 * host.gb_per_s * DMA_PART)
    told = tuple(_link(a, b, kind, cards[a]) for (a, b), kind in ways.items())
    return Rig(text, tuple(devices), facts, links, Topology(pcie, told))


DMA_PART = 0.75
"""Of the bandwidth of the host's memory, for what GPUs write and read there: an estimate."""


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


def _ways(cards: Mapping[str, DeviceSpec], way: str) -> dict[tuple[str, str], str]:
    """How the two of each pair reach each other.

    Raises:
        EngineError: NVLink is asked for, and no two cards have it.
    """
    bridged = _bridged(cards)
    found: dict[tuple[str, str], str] = {}
    for a, b in combinations(cards, 2):
        usual = _usual_way(cards[a], cards[b])
        if way == "nvlink":
            found[a, b] = "nvlink" if (a, b) in bridged else usual
        else:
            found[a, b] = way or usual
    if way == "nvlink" and "nvlink" not in found.values():
        raise EngineError(
            "No two of these cards can be joined by NVLink.", "Use p2p or host instead."
        )
    return found


def _usual_way(a: DeviceSpec, b: DeviceSpec) -> str:
    """As drivers let them: a bridge is something that has to be bought."""
    if not (a.has_peer_access and b.has_peer_access):
        return "host"
    return "nvlink" if min(a.nvlink_gb_per_s, b.nvlink_gb_per_s) > BRIDGED_GB_PER_S else "p2p"


def _bridged(cards: Mapping[str, DeviceSpec]) -> set[tuple[str, str]]:
    """Pairs that a bridge can join: the first two cards of a kind, the next two, and so on."""
    found = set()
    for name in {card.name for card in cards.values() if card.nvlink_gb_per_s}:
        alike = [device for device, card in cards.items() if card.name == name]
        found |= set(zip(alike[::2], alike[1::2], strict=False))
    return found


def _facts(way: str, a: DeviceSpec, b: DeviceSpec) -> LinkFacts:
    if way == "nvlink":
        return nvlink_facts(1e9 * min(a.nvlink_gb_per_s, b.nvlink_gb_per_s))
    return CLASSES[way].facts(min(a.pcie_bytes_per_s, b.pcie_bytes_per_s))


def _link(a: str, b: str, way: str, card: DeviceSpec) -> Link:
    """As a driver would tell it."""
    kind: LinkKind = "nvlink" if way == "nvlink" else "p2p" if way == "p2p" else "host"
    is_bridge = card.nvlink_gb_per_s < BRIDGED_GB_PER_S
    n_nvlink = round(card.nvlink_gb_per_s / (BRIDGE_LINK_GB if is_bridge else NVLINK_GB))
    if kind == "nvlink":
        return Link(a, b, kind, n_nvlink, NVLINK_VERSION, "one host bridge")
    problem = "" if kind == "p2p" else "these GPUs do not support it"
    return Link(a, b, kind, 0, 0, "one host bridge", problem)
