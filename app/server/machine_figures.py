"""Figures of the machines that compute a model together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import DeviceSnapshot, JoinedMachine, WiresMeasured, WireSpeed

Labels = dict[str, object]


@dataclass(frozen=True, slots=True)
class MachinesState:
    """The other machines of a server, and the links between all.

    Attributes:
        machines: those that have joined.
        linked: measured links; None before the machines have met.
    """

    machines: tuple[JoinedMachine, ...] = ()
    linked: WiresMeasured | None = None

    def figures(self) -> Iterator[tuple[str, str, list[tuple[Labels, float]]]]:
        """Yield a name, a help text and values by labels for each kind of figure."""
        if not self.machines and self.linked is None:
            return
        yield "machines_joined", "Other machines that are there.", [({}, len(self.machines))]
        states: list[tuple[Labels, DeviceSnapshot]] = [
            ({"machine": machine.name, "device": state.device}, state)
            for machine in self.machines
            for state in machine.states
        ]
        yield (
            "machine_memory_used_bytes", "Memory in use on other machines' devices.",
            [(labels, state.used_bytes) for labels, state in states],
        )  # fmt: skip
        yield (
            "machine_memory_bytes", "Memory of other machines' devices.",
            [(labels, state.total_bytes) for labels, state in states],
        )  # fmt: skip
        yield (
            "machine_load_ratio",
            "Load of other machines' devices, 0 to 1.",
            [
                (labels, state.load_percent / 100)
                for labels, state in states
                if state.load_percent is not None
            ],
        )
        linked = self.linked
        if linked is None:
            return
        links: list[tuple[Labels, WireSpeed]] = [
            ({"from": linked.names[wire.a], "to": linked.names[wire.b]}, wire)
            for wire in linked.wires
        ]
        yield (
            "machine_link_latency_seconds", "Time of a short message between machines.",
            [(labels, wire.mean_s) for labels, wire in links],
        )  # fmt: skip
        yield (
            "machine_link_bytes_per_second", "Speed of large tensors between machines.",
            [(labels, wire.bytes_per_s) for labels, wire in links],
        )  # fmt: skip


def wires_text(linked: WiresMeasured) -> str:
    """Return the links between machines for people, a line for each."""
    return "\n".join(
        f"{linked.names[wire.a]} - {linked.names[wire.b]}: {1e3 * wire.latency_s:.2f} ms, "
        f"{8 * wire.bytes_per_s / 1e6:,.0f} Mbit/s{_lossy(wire.latency_s, wire.mean_s)}"
        for wire in linked.wires
    )


UNEVEN = 1.5
"""Mean latency over the median from which a link is called uneven."""


def _lossy(latency_s: float, mean_s: float) -> str:
    if mean_s < UNEVEN * latency_s:
        return ""
    return f" (uneven: {1e3 * mean_s:.2f} ms on average; packets are lost, or the machine is busy)"
