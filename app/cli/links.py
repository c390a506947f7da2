"""The part of `devices` below the list of devices: links between GPUs, and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.cli.output import note, table
from app.devices.interconnect.interconnect import (
    measure_links,
    proven_routes,
    route_text,
    slot_text,
)
from engine import (
    DeviceFacts,
    DeviceInfo,
    Link,
    LinkFacts,
    MachineFile,
    Pcie,
    Topology,
    card_problems,
    record_document,
)

UNTRIED = (
    "Routes between GPUs are tested when a model is first loaded on them; "
    "'tandem devices --measure' does it now."
)


def kernels_text(devices: Sequence[DeviceInfo]) -> str:
    """Return a line for each GPU on which the kernels failed a test; "" for none."""
    return "\n".join(
        f"PyTorch computes on {gpu} instead of Tandem's kernels: {why}."
        for gpu, why in card_problems(devices).items()
    )


def topology_text(topology: Topology) -> str:
    """Return slots and links as tables; "" if there is no GPU."""
    parts = []
    if topology.pcie:
        slots = [(device, _slot(pcie)) for device, pcie in topology.pcie.items()]
        parts.append(table(("GPU", "PCIE NOW (AT MOST)"), slots, frozenset()))
    if topology.links:
        links = [(link.a, link.b, _way(link), link.ancestor or "?") for link in topology.links]
        parts.append(table(("FROM", "TO", "LINK", "BOTH ON"), links, frozenset()))
    return "\n\n".join(parts)


def ways_text(devices: Sequence[DeviceInfo], topology: Topology) -> str:
    """Return the proven routes between GPUs and their problems; "" if there are none."""
    ways = proven_routes(devices, topology, MachineFile.of_user())
    rows = [
        (
            way.source, way.goal, way.small, way.large, way.record.date,
            f"{1e6 * way.speed.latency_s:.1f} µs" if way.speed else "?",
            f"{way.speed.bytes_per_s / 1e9:.2f} GB/s" if way.speed else "?",
        )
        for way in ways
    ]  # fmt: skip
    headers = ("FROM", "TO", "SMALL MESSAGES", "LARGE MESSAGES", "PROVEN", "LATENCY", "BANDWIDTH")
    parts = [table(headers, rows, frozenset({5, 6}))] if rows else []
    problems = dict.fromkeys(text for way in ways for text in way.problems)
    if problems:
        parts.append("\n".join(problems))
    untried = len(topology.links) * 2 - len(ways)
    if untried > 0:
        parts.append(UNTRIED)
    return "\n\n".join(parts)


def ways_document(devices: Sequence[DeviceInfo], topology: Topology) -> list[dict[str, Any]]:
    """Return the routes between GPUs and all their tests as JSON-ready dictionaries."""
    return [
        {
            "from": way.source, "to": way.goal, "small": way.small, "large": way.large,
            "latency_s": way.speed and way.speed.latency_s,
            "bytes_per_s": way.speed and way.speed.bytes_per_s,
            "problems": way.problems, **record_document(way.record),
        }
        for way in proven_routes(devices, topology, MachineFile.of_user())
    ]  # fmt: skip


def _slot(pcie: Pcie) -> str:
    most = slot_text(pcie.max_generation, pcie.max_width)
    return f"{slot_text(pcie.generation, pcie.width)} ({most})"


def _way(link: Link) -> str:
    problem = f": {link.peer_problem}" if link.peer_problem and not link.n_nvlink else ""
    return route_text(link) + problem


def measure(devices: Sequence[DeviceInfo]) -> None:
    """Measure devices and their links, and store the results; report failures and go on."""
    measure_links(devices, note)


def measured_text(devices: Sequence[DeviceInfo]) -> str:
    """Return the measured speeds of devices and links as tables; "" if there are none."""
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
        parts.append(table(("FROM", "TO", "LATENCY", "BANDWIDTH"), links, frozenset({2, 3})))
    return "\n\n".join(parts)


def measured_document(devices: Sequence[DeviceInfo]) -> dict[str, Any]:
    """Return the measured speeds of devices and links as a JSON-ready dictionary."""
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
