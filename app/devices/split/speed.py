"""Speeds of a machine's devices and links, measured here or known for their product names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import engine
from engine import DeviceInfo, machine_of

if TYPE_CHECKING:
    from engine import Rig, Wires


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about a machine's devices.

    Attributes:
        bytes_per_s: speed of reading weights, by device id.
        measured: ids of devices measured here; facts about the others are based on their names.
        slots: GPU slots by device id, for example "PCIe 4 ×16".
        is_simulated: whether the devices are simulated, in which case no model can be loaded.
    """

    forecaster: engine.Forecaster
    bytes_per_s: Mapping[str, float]
    measured: frozenset[str]
    slots: Mapping[str, str] = field(default_factory=dict)
    is_simulated: bool = False


def this_machine(devices: Sequence[DeviceInfo], wires: Wires | None = None) -> MachineFacts:
    """Return facts about these devices, as measured or as known for their product names.

    Args:
        wires: links to the other machines; None assumes typical links.
    """
    file = engine.MachineFile.of_user()
    engine.use_measured_overheads(devices, file)
    usable = [device for device in devices if device.usable]
    facts = {device.id: engine.known_facts(device, file) for device in usable}
    topology = engine.read_topology()
    here = [device for device in usable if not machine_of(device.id)]
    links = engine.known_links(here, topology, file)
    n_others = len(engine.machines_of([device.id for device in usable])) - 1
    if n_others:
        others = [engine.Links({}) for _ in range(n_others)]
        links = engine.Links.of_machines([links, *others], wires or engine.Wires())
    return MachineFacts(
        engine.Forecaster(usable, facts, links, engine.Calibration.of_user()),
        {device: found.bytes_per_s for device, found in facts.items()},
        frozenset(device.id for device in here if file.device(device) is not None),
        slot_texts(topology),
    )


def simulated_machine(rig: Rig) -> MachineFacts:
    """Return facts about a simulated machine."""
    speeds = {device: facts.bytes_per_s for device, facts in rig.facts.items()}
    return MachineFacts(
        engine.Forecaster.of_rig(rig), speeds, frozenset(), slot_texts(rig.topology), True
    )


def slot_texts(topology: engine.Topology) -> dict[str, str]:
    """Return the slots by device id, for example "PCIe 4 ×16".

    The generation is the slot's maximum, because idle GPUs lower the current one.
    """
    numbers = {
        device: (slot.max_generation or slot.generation, slot.width or slot.max_width)
        for device, slot in topology.pcie.items()
    }
    return {d: f"PCIe {gen} ×{width}" for d, (gen, width) in numbers.items() if gen and width}


MachineFactory = Callable[[Sequence[DeviceInfo]], MachineFacts]
