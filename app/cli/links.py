"""What `devices` shows beside the devices: links between GPUs, and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any

import engine  # names that need torch are resolved when they are used
from app.cli.output import note, table
from engine import (
    DeviceFacts,
    DeviceInfo,
    EngineError,
    Link,
    LinkFacts,
    MachineFile,
    Pcie,
    Topology,
)

LINK_NAMES = {"nvlink": "NVLink", "p2p": "PCIe, directly", "host": "by the host's memory"}


def topology_text(topology: Topology) -> str:
    """Slots and links as tables; "" where there is no GPU."""
    parts = []
    if topology.pcie:
        slots = [(device, _slot(pcie)) for device, pcie in topology.pcie.items()]
        parts.append(table(("GPU", "PCIE NOW (AT MOST)"), slots, frozenset()))
    if topology.links:
        links = [(link.a, link.b, _way(link), link.ancestor or "?") for link in topology.links]
        parts.append(table(("FROM", "TO", "LINK", "BOTH ON"), links, frozenset()))
    return "\n\n".join(parts)


def _slot(pcie: Pcie) -> str:
    def shown(generation: int, width: int) -> str:
        return f"{generation}.0 x{width}" if generation and width else "?"

    now = shown(pcie.generation, pcie.width)
    return f"{now} ({shown(pcie.max_generation, pcie.max_width)})"


def _way(link: Link) -> str:
    name = LINK_NAMES[link.kind]
    if link.n_nvlink:
        version = f" {link.nvlink_version}" if link.nvlink_version else ""
        return f"{link.n_nvlink} × {name}{version}"
    return f"{name}: {link.peer_problem}" if link.peer_problem else name


def measure(devices: Sequence[DeviceInfo]) -> None:
    """Measure devices and links between them, and keep it; what fails is said and left out."""
    file = MachineFile.of_user()
    usable = [device for device in devices if device.usable]
    for device in usable:
        note(f"Measuring {device.id} …")
        try:
            file.forget_device(device)
            engine.measure_facts(device, (), file)
        except EngineError as error:
            note(str(error))
    for a, b in combinations_with_replacement(usable, 2):
        if a is b and a.kind != "cpu":
            continue
        note(f"Measuring {a.id} with {b.id} …")
        try:
            file.keep_link(a, b, engine.measure_link(a.id, b.id).facts)
        except EngineError as error:
            note(str(error))


def measured_text(devices: Sequence[DeviceInfo]) -> str:
    """What is known from measurements, as tables; "" where nothing is."""
    document = measured_document(devices)
    facts: dict[str, DeviceFacts] = document["devices"]
    speeds = [
        (
            device, f"{found.bytes_per_s / 1e9:.1f} GB/s", f"{found.flop_per_s / 1e12:.2f} TFLOP/s",
            ", ".join(found.rates),
        )
        for device, found in facts.items()
    ]  # fmt: skip
    links = [
        (
            link["a"], link["b"], f"{1e6 * link['latency_s']:.1f} µs",
            f"{link['bytes_per_s'] / 1e9:.2f} GB/s",
        )
        for link in document["links"]
    ]  # fmt: skip
    parts = []
    if speeds:
        headers = ("MEASURED", "READS", "MULTIPLIES", "WEIGHTS")
        parts.append(table(headers, speeds, frozenset({1, 2})))
    if links:
        parts.append(table(("FROM", "TO", "SMALL SUM", "LARGE SUMS"), links, frozenset({2, 3})))
    return "\n\n".join(parts)


def measured_document(devices: Sequence[DeviceInfo]) -> dict[str, Any]:
    """The same for programs."""
    file = MachineFile.of_user()
    facts = {device.id: file.device(device) for device in devices}
    links: dict[tuple[str, str], LinkFacts] = file.links(devices)
    return {
        "devices": {device: found for device, found in facts.items() if found is not None},
        "links": [
            {"a": a, "b": b, "latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
            for (a, b), link in links.items()
        ],
    }
