"""Expected speeds of links by class, for links that were not measured.

Latencies are of an all-reduce of a few kilobytes over two devices. Measured by others: NVLink 6 µs
(NCCL on two H100, nccl#1259); custom kernels over PCIe, 4.0 to 4.9 µs (two GPUs, flashinfer#5023),
4.0 to 7.2 µs (four, sglang-V100#2), 9 µs (eight, ik_llama.cpp#1022); NCCL through shared memory 39
µs and 1.9 GB/s, or 12.5 GB/s of a slot's 26 with copies (sglang#39605). An estimate: kernels that
exchange by host memory have two or three hops of a few µs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.hardware.devices.links import Link, Pcie, Topology
from engine.hardware.devices.types import CPU
from engine.planning.speed.device_specs import pcie_bytes_per_s
from engine.planning.speed.facts import LinkFacts
from engine.planning.speed.machine_links import SHARED_MEMORY, Links

NVLINK_BYTES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Bytes/s of one NVLink in one direction, by version (NVIDIA's data sheets)."""

NVLINK_EFFICIENCY = 0.8
"""Part of NVLink's bandwidth that exchanges reach."""

HOST_PART = 0.5
"""Part of a slot's bandwidth left where each byte goes up and down again: 12.5 of 26 GB/s."""

USUAL_SLOT = Pcie(4, 16, 4, 16)
"""Slot of a GPU about which the driver says nothing."""


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Expected speed of one class of links.

    Attributes:
        latency_s: seconds of an all-reduce of few numbers.
        part: part of the slot's bandwidth; 0 where that does not matter.
        bytes_per_s: bandwidth where the slot's does not matter, in bytes/s.
        covered_bytes: bytes that are sent within the latency.
    """

    latency_s: float
    part: float = 0.0
    bytes_per_s: float = 0.0
    covered_bytes: float = 0.0

    def facts(self, slot_bytes_per_s: float) -> LinkFacts:
        """Return the facts of a link between devices whose slower slot has this bandwidth."""
        rate = self.bytes_per_s or self.part * slot_bytes_per_s
        return LinkFacts(self.latency_s, rate, self.covered_bytes)


CLASSES: Mapping[str, LinkClass] = {
    "nvlink": LinkClass(6e-6, bytes_per_s=45e9),
    "p2p": LinkClass(6e-6, 1.0),
    "host": LinkClass(13e-6, HOST_PART),
    "shm": LinkClass(40e-6, bytes_per_s=1.9e9, covered_bytes=64 << 10),
}
"""Link classes by name, the fastest first; NVLink's bandwidth depends on the number of links. "shm"
is as slow as NCCL through shared memory: 37 and 38.5 µs for 32 and 64 KiB and eight GPUs
(nccl#922)."""


def nvlink_facts(bytes_per_s: float) -> LinkFacts:
    """Return the facts of NVLinks that together have this bandwidth in one direction."""
    return LinkFacts(CLASSES["nvlink"].latency_s, NVLINK_EFFICIENCY * bytes_per_s)


def link_facts(link: Link, pcie: Mapping[str, Pcie]) -> LinkFacts:
    """Return the expected facts of a link that the driver reports.

    Args:
        link: the link.
        pcie: slots by device.
    """
    if link.kind == "nvlink":
        return nvlink_facts(link.n_nvlink * NVLINK_BYTES.get(link.nvlink_version, 25e9))
    slots = [slot_bytes_per_s(pcie.get(device, USUAL_SLOT)) for device in (link.a, link.b)]
    return CLASSES[link.kind].facts(min(slots))


def slot_bytes_per_s(slot: Pcie) -> float:
    """Return a slot's largest bandwidth in bytes/s: the slot of an idle GPU may run slower."""
    generation = slot.max_generation or slot.generation or USUAL_SLOT.generation
    return pcie_bytes_per_s(generation, slot.width or slot.max_width or USUAL_SLOT.width)


def expected_links(
    topology: Topology, measured: Mapping[tuple[str, str], LinkFacts] | None = None
) -> Links:
    """Return all links of a machine, with expected facts where they were not measured."""
    pairs = {(link.a, link.b): link_facts(link, topology.pcie) for link in topology.links}
    host = {
        (device, CPU): LinkFacts(CLASSES["host"].latency_s, slot_bytes_per_s(slot))
        for device, slot in topology.pcie.items()
    }
    routes = {(link.a, link.b): link.kind for link in topology.links}
    return Links({**pairs, **host, (CPU, CPU): SHARED_MEMORY, **(measured or {})}, ways=routes)
