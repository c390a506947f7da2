"""What was measured on this machine, kept on disk: measuring takes seconds.

An entry belongs to a device's name, driver and number of cores, and to this version of Tandem. What
is lost or damaged is measured again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from engine.devices.links import Topology
from engine.devices.types import DeviceInfo
from engine.json_file import cache_folder, read_json, write_json
from engine.planning.calibration import package_version
from engine.planning.cards import CARDS, GIB, UNKNOWN_CORE_FLOP, UNKNOWN_CPU_BYTES, Card
from engine.planning.facts import DeviceFacts, LinkFacts, Links, WeightRate
from engine.planning.link_classes import expected_links
from engine.planning.rigs import known_card

FILE_NAME = "machine.json"
MOST_ENTRIES = 64

T = TypeVar("T", DeviceFacts, LinkFacts, WeightRate)


class MachineFile:
    """Measured facts of devices and of links between them.

    Args:
        path: of the file; None keeps them in memory only.

    It may be used from several threads. Of two programs that write at once, one wins.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._devices, self._links = _read(path)

    @classmethod
    def of_user(cls) -> MachineFile:
        """The one in the user's cache folder."""
        folder = cache_folder()
        return cls(folder / FILE_NAME if folder else None)

    def device(self, info: DeviceInfo) -> DeviceFacts | None:
        """What was measured of a device."""
        with self._lock:
            found = self._devices.get(_device_key(info))
        return None if found is None else replace(found, device=info.id)

    def keep_device(self, info: DeviceInfo, facts: DeviceFacts) -> DeviceFacts:
        """Keep what was measured, with what is known of further kinds of weights; returns both."""
        with self._lock:
            known = self._devices.pop(_device_key(info), None)
            rates = {**(known.rates if known else {}), **facts.rates}
            facts = replace(facts, rates=rates)
            self._devices[_device_key(info)] = facts
            self._save()
        return facts

    def forget_device(self, info: DeviceInfo) -> None:
        """Let it be measured anew."""
        with self._lock:
            if self._devices.pop(_device_key(info), None) is not None:
                self._save()

    def link(self, a: DeviceInfo, b: DeviceInfo) -> LinkFacts | None:
        """What was measured between two devices."""
        with self._lock:
            return self._links.get(_link_key(a, b))

    def keep_link(self, a: DeviceInfo, b: DeviceInfo, facts: LinkFacts) -> None:
        """Keep what was measured between two devices."""
        with self._lock:
            self._links.pop(_link_key(a, b), None)
            self._links[_link_key(a, b)] = facts
            self._save()

    def links(self, devices: Sequence[DeviceInfo]) -> dict[tuple[str, str], LinkFacts]:
        """What was measured between any of these, by their ids."""
        pairs = [(a, b) for at, a in enumerate(devices) for b in devices[at:]]
        found = {(a.id, b.id): self.link(a, b) for a, b in pairs}
        return {pair: facts for pair, facts in found.items() if facts is not None}

    def _save(self) -> None:
        for entries in (self._devices, self._links):
            while len(entries) > MOST_ENTRIES:
                del entries[next(iter(entries))]  # the oldest
        document = {
            "devices": {key: asdict(facts) for key, facts in self._devices.items()},
            "links": {key: asdict(facts) for key, facts in self._links.items()},
        }
        write_json(self._path, document)


def _device_key(info: DeviceInfo) -> str:
    return " | ".join((info.name, info.driver or str(info.n_cores), package_version()))


def _link_key(a: DeviceInfo, b: DeviceInfo) -> str:
    """GPUs of one name may sit in different slots."""
    ends = sorted(f"{info.name} {info.pci_bus}".strip() for info in (a, b))
    return " | ".join((*ends, a.driver or b.driver or str(a.n_cores), package_version()))


def _read(path: Path | None) -> tuple[dict[str, DeviceFacts], dict[str, LinkFacts]]:
    """All entries that make sense."""
    document = read_json(path)
    if not isinstance(document, dict):
        return {}, {}
    devices: dict[str, DeviceFacts] = {}
    for key, entry in _entries(document.get("devices")):
        rates = {
            kind: rate
            for kind, fields_of in _entries(entry.pop("rates", None))
            if (rate := _made(WeightRate, fields_of)) is not None
        }
        facts = _made(DeviceFacts, entry)
        if facts is not None:
            devices[key] = replace(facts, rates=rates)
    links = {
        key: link
        for key, entry in _entries(document.get("links"))
        if (link := _made(LinkFacts, entry)) is not None
    }
    return devices, links


def _entries(found: object) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(found, Mapping):
        return []
    return [(key, dict(entry)) for key, entry in found.items() if isinstance(entry, Mapping)]


def _made(kind: type[T], entry: Mapping[str, Any]) -> T | None:
    """A value from its fields, or None where one is missing, unknown or of another sort."""
    try:
        made = kind(**entry)
    except TypeError:
        return None
    for spec in fields(kind):
        value = getattr(made, spec.name)
        if spec.name == "device" or spec.name == "rates":
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        needs_more = spec.name.startswith(("bytes", "flop"))
        if not is_number or not (0 < value < 1e30 if needs_more else 0 <= value < 1e30):
            return None
    return made


def known_facts(info: DeviceInfo, file: MachineFile | None = None) -> DeviceFacts:
    """What was measured of a device, else what its maker says of it, else a guess."""
    measured = file.device(info) if file else None
    return measured or expected_facts(info)


def expected_facts(info: DeviceInfo) -> DeviceFacts:
    """What to expect of a device that nobody has measured here.

    A GPU that is not in the table counts as the slowest one with at least its memory.
    """
    card = known_card(info.name)
    if card is not None and bool(card.n_cores) == (info.kind == "cpu"):
        return card.facts(info.id)
    if info.kind == "cpu":
        n_cores = max(1, info.n_cores)
        tflop_per_s = n_cores * UNKNOWN_CORE_FLOP / 1e12
        unknown = Card(info.name, 0, UNKNOWN_CPU_BYTES / 1e9, tflop_per_s, tflop_per_s)
        return replace(unknown, n_cores=n_cores).facts(info.id)
    large = [card for card in CARDS if card.memory_gib * GIB * 1.01 >= info.total_bytes]
    return min(large or CARDS[-1:], key=lambda card: card.gb_per_s).facts(info.id)


def known_links(
    devices: Sequence[DeviceInfo], topology: Topology, file: MachineFile | None = None
) -> Links:
    """What was measured between devices, else what is to be expected of links of their class."""
    return expected_links(topology, file.links(devices) if file else {})
