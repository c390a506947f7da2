"""Speeds of the devices and links of a machine, measured here or known for their models."""

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
    """Facts about the devices of a machine.

    Attributes:
        bytes_per_s: read speed of weights by device id.
        measured: ids of the devices that were measured here; other facts go by the device's name.
        slots: slots of GPUs such as "PCIe 4 ×16", by device id.
        is_simulated: whether the devices are simulated, so nothing can be loaded.
    """

    forecaster: engine.Forecaster
    bytes_per_s: Mapping[str, float]
    measured: frozenset[str]
    slots: Mapping[str, str] = field(default_factory=dict)
    is_simulated: bool = False


def this_machine(devices: Sequence[DeviceInfo], wires: Wires | None = None) -> MachineFacts:
    """Return the measured facts of these devices, or those known for their models.

    Args:
        wires: links to other machines among the devices; None for typical ones.
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
    """Return the facts of a simulated machine."""
    speeds = {device: facts.bytes_per_s for device, facts in rig.facts.items()}
    return MachineFacts(
        engine.Forecaster.of_rig(rig), speeds, frozenset(), slot_texts(rig.topology), True
    )


def slot_texts(topology: engine.Topology) -> dict[str, str]:
    """Return slots such as "PCIe 4 ×16" by device id.

    The generation is the highest of the slot, as idle GPUs lower the present one.
    """
    numbers = {
        device: (slot.max_generation or slot.generation, slot.width or slot.max_width)
        for device, slot in topology.pcie.items()
    }
    return {d: f"PCIe {gen} ×{width}" for d, (gen, width) in numbers.items() if gen and width}


MachineFactory = Callable[[Sequence[DeviceInfo]], MachineFacts]
