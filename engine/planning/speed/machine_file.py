"""File with this machine's measured devices and links, and tested routes.

The key of an entry contains the device's name, its driver or number of cores, and Tandem's version;
for a link also the slots, for a route also the CUDA version. If an entry is missing or damaged, it
is measured again, which takes seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import permutations
from pathlib import Path
from typing import TypeVar

from engine.hardware.cuda_api import is_overhead, use_overheads
from engine.hardware.devices.topology import Link, Topology
from engine.hardware.devices.torch_builds import find_torch_build
from engine.hardware.devices.types import DeviceInfo
from engine.load_params import PeerMode
from engine.planning.speed.device_specs import (
    GIB,
    GPU_SPECS,
    UNKNOWN_CORE_FLOP,
    UNKNOWN_CPU_BYTES,
    DeviceSpec,
)
from engine.planning.speed.facts import DeviceFacts, LinkFacts, WeightRate
from engine.planning.speed.link_records import (
    LinkRecord,
    chosen_way,
    record_document,
    record_from,
    speed_of,
)
from engine.planning.speed.links import Links, expected_links
from engine.planning.speed.rigs import spec_from_driver
from engine.util.codec import read_entries
from engine.util.files import cache_folder, read_json, write_json
from engine.util.sanitize import package_version

FILE_NAME = "machine.json"
MAX_ENTRIES = 64
"""Maximum number of devices, and of links, in the file."""

MAX_PROOFS = 8 * MAX_ENTRIES
"""Maximum number of route records in the file; eight GPUs have 56."""

T = TypeVar("T", DeviceFacts, LinkFacts)


class MachineFile:
    """Measured facts about devices and links, and records of routes.

    Args:
        path: path of the file; None keeps everything in memory.

    Thread-safe. If two programs write at the same time, one wins.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        document = read_json(path)
        saved = document if isinstance(document, dict) else {}
        self._devices = _plausible(read_entries(DeviceFacts, saved.get("devices")))
        self._links = _plausible(read_entries(LinkFacts, saved.get("links")))
        self._proofs = _records(saved.get("proofs"))
        self._overheads = _overheads(saved.get("overheads"))

    @classmethod
    def of_user(cls) -> MachineFile:
        """Return the file from the user's cache folder."""
        folder = cache_folder()
        return cls(folder / FILE_NAME if folder else None)

    def device(self, info: DeviceInfo) -> DeviceFacts | None:
        """Return the measured facts of a device; None if there are none."""
        with self._lock:
            found = self._devices.get(_device_key(info))
        return None if found is None else replace(found, device=info.id)

    def keep_device(self, info: DeviceInfo, facts: DeviceFacts) -> DeviceFacts:
        """Save a device's facts and return them, adding known rates for other kinds of weights."""
        with self._lock:
            known = self._devices.pop(_device_key(info), None)
            rates = {**(known.rates if known else {}), **facts.rates}
            facts = replace(facts, rates=rates)
            self._devices[_device_key(info)] = facts
            self._save()
        return facts

    def forget_device(self, info: DeviceInfo) -> None:
        """Delete a device's facts, so that it is measured again."""
        with self._lock:
            if self._devices.pop(_device_key(info), None) is not None:
                self._save()

    def overhead(self, info: DeviceInfo) -> int | None:
        """Return a GPU's measured CUDA overhead in bytes; None if unknown."""
        with self._lock:
            return self._overheads.get(_device_key(info))

    def keep_overhead(self, info: DeviceInfo, n_bytes: int) -> None:
        """Save a GPU's CUDA overhead, rounded up to MiB."""
        n_bytes = -(-n_bytes >> 20) << 20
        with self._lock:
            if self._overheads.get(_device_key(info)) != n_bytes:
                self._overheads[_device_key(info)] = n_bytes
                self._save()

    def link(self, a: DeviceInfo, b: DeviceInfo) -> LinkFacts | None:
        """Return the measured facts of a link; None if there are none."""
        with self._lock:
            return self._links.get(_link_key(a, b))

    def keep_link(self, a: DeviceInfo, b: DeviceInfo, facts: LinkFacts) -> None:
        """Save the measured facts of a link."""
        with self._lock:
            self._links.pop(_link_key(a, b), None)
            self._links[_link_key(a, b)] = facts
            self._save()

    def links(self, devices: Sequence[DeviceInfo]) -> dict[tuple[str, str], LinkFacts]:
        """Return the measured links between these devices, by pair of ids."""
        pairs = [(a, b) for at, a in enumerate(devices) for b in devices[at:]]
        found = {(a.id, b.id): self.link(a, b) for a, b in pairs}
        return {pair: facts for pair, facts in found.items() if facts is not None}

    def proof(self, source: DeviceInfo, target: DeviceInfo) -> LinkRecord | None:
        """Return the record of the routes from one GPU to another; None if there is none."""
        with self._lock:
            return self._proofs.get(_route_key(source, target))

    def keep_proof(self, source: DeviceInfo, target: DeviceInfo, record: LinkRecord) -> None:
        """Save the record of the routes from one GPU to another."""
        with self._lock:
            self._proofs.pop(_route_key(source, target), None)
            self._proofs[_route_key(source, target)] = record
            self._save()

    def forget_proof(self, source: DeviceInfo, target: DeviceInfo) -> None:
        """Delete the record of the routes from one GPU to another, so they are tested again."""
        with self._lock:
            if self._proofs.pop(_route_key(source, target), None) is not None:
                self._save()

    def proofs(self, devices: Sequence[DeviceInfo]) -> dict[tuple[str, str], LinkRecord]:
        """Return the records of the routes between these devices, by pair of ids."""
        pairs = permutations([d for d in devices if d.kind != "cpu"], 2)
        found = {(a.id, b.id): self.proof(a, b) for a, b in pairs}
        return {pair: record for pair, record in found.items() if record is not None}

    def _save(self) -> None:
        for entries in (self._devices, self._overheads, self._links, self._proofs):
            most = MAX_PROOFS if entries is self._proofs else MAX_ENTRIES
            while len(entries) > most:
                del entries[next(iter(entries))]  # the oldest
        document = {
            "devices": {key: asdict(facts) for key, facts in self._devices.items()},
            "overheads": self._overheads,
            "links": {key: asdict(facts) for key, facts in self._links.items()},
            "proofs": {key: record_document(record) for key, record in self._proofs.items()},
        }
        write_json(self._path, document)


def _device_key(info: DeviceInfo) -> str:
    return " | ".join((info.name, info.driver or str(info.n_cores), package_version()))


def _link_key(a: DeviceInfo, b: DeviceInfo) -> str:
    """Return the key for a link, including the slots because GPUs may have the same name."""
    ends = sorted(f"{info.name} {info.pci_bus}".strip() for info in (a, b))
    return " | ".join((*ends, a.driver or b.driver or str(a.n_cores), package_version()))


def _route_key(source: DeviceInfo, target: DeviceInfo) -> str:
    """Return the key for a route, including the versions that may decide whether it works."""
    ends = " > ".join(f"{info.name} {info.pci_bus}".strip() for info in (source, target))
    versions = f"driver {source.driver}", f"CUDA {_cuda()}", package_version()
    return " | ".join((ends, *versions))


def _cuda() -> str:
    build = find_torch_build()
    return build.cuda or build.hip


def _records(table: object) -> dict[str, LinkRecord]:
    """Return the valid records of routes."""
    entries = table.items() if isinstance(table, Mapping) else ()
    return {key: record for key, entry in entries if (record := record_from(entry)) is not None}


def _plausible(found: dict[str, T]) -> dict[str, T]:
    """Return the entries with plausible speeds."""
    return {key: facts for key, facts in found.items() if _is_plausible(facts)}


def _is_plausible(facts: DeviceFacts | LinkFacts | WeightRate) -> bool:
    for spec in fields(facts):
        value = getattr(facts, spec.name)
        if isinstance(value, dict):
            if not all(map(_is_plausible, value.values())):
                return False
        elif not isinstance(value, str):
            is_rate = spec.name.startswith(("bytes", "flop"))
            if not (0 < value < 1e30 if is_rate else 0 <= value < 1e30):
                return False
    return True


def _overheads(table: object) -> dict[str, int]:
    """Return the valid measured overheads."""
    entries = table.items() if isinstance(table, Mapping) else ()
    return {key: n for key, n in entries if type(n) is int and is_overhead(n)}


def use_measured_overheads(devices: Sequence[DeviceInfo], file: MachineFile) -> None:
    """Make plans use the measured CUDA overheads of these devices."""
    found = {info.id: file.overhead(info) for info in devices if info.kind != "cpu"}
    use_overheads({device: n_bytes for device, n_bytes in found.items() if n_bytes is not None})


def known_facts(info: DeviceInfo, file: MachineFile | None = None) -> DeviceFacts:
    """Return the measured facts of a device, or else the expected ones."""
    measured = file.device(info) if file else None
    return measured or expected_facts(info)


def expected_facts(info: DeviceInfo) -> DeviceFacts:
    """Return the expected facts of a device that has not been measured on this machine.

    They follow the manufacturer's specification. A GPU that is not in the table is treated like the
    slowest one with at least as much memory.
    """
    card = spec_from_driver(info.name)
    if card is not None and bool(card.n_cores) == (info.kind == "cpu"):
        return card.facts(info.id)
    if info.kind == "cpu":
        n_cores = max(1, info.n_cores)
        tflop_per_s = n_cores * UNKNOWN_CORE_FLOP / 1e12
        unknown = DeviceSpec(info.name, 0, UNKNOWN_CPU_BYTES / 1e9, tflop_per_s, tflop_per_s)
        return replace(unknown, n_cores=n_cores).facts(info.id)
    large = [card for card in GPU_SPECS if card.memory_gib * GIB * 1.01 >= info.total_bytes]
    return min(large or GPU_SPECS[-1:], key=lambda card: card.gb_per_s).facts(info.id)


def known_links(
    devices: Sequence[DeviceInfo], topology: Topology, file: MachineFile | None = None,
    p2p: PeerMode = "auto",
) -> Links:  # fmt: skip
    """Return the measured links between devices, or else those expected for their class.

    Between GPUs, the routes in use count; an all-reduce is as fast as the slower direction.
    """
    if p2p == "off":
        topology = replace(topology, links=tuple(by_host(link) for link in topology.links))
    if file is None:
        return expected_links(topology, {})
    return expected_links(topology, {**file.links(devices), **used_speeds(devices, file, p2p)})


def by_host(link: Link) -> Link:
    """Return the link as it would be if the GPUs did not access each other's memory."""
    return replace(link, kind="host", n_nvlink=0)


def used_speeds(
    devices: Sequence[DeviceInfo], file: MachineFile, p2p: PeerMode = "auto"
) -> dict[tuple[str, str], LinkFacts]:
    """Return the speed of the route in use for each pair of GPUs whose routes were timed."""
    found: dict[tuple[str, str], LinkFacts] = {}
    for (a, b), record in file.proofs(devices).items():
        speed = speed_of(record, chosen_way(record, p2p))
        if speed is None:
            continue
        pair = (a, b) if a <= b else (b, a)
        known = found.get(pair, speed)
        found[pair] = LinkFacts(
            max(known.latency_s, speed.latency_s), min(known.bytes_per_s, speed.bytes_per_s),
            min(known.covered_bytes, speed.covered_bytes),
        )  # fmt: skip
    return found
