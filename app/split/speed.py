"""How fast a split would be: what is known of the devices, and predictions from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine import (
    Calibration,
    DeviceInfo,
    Evaluation,
    Finished,
    Forecast,
    Forecaster,
    LoadParams,
    MachineFile,
    Rig,
    Topology,
    known_facts,
    known_links,
    read_topology,
)

LEAST_TOKENS = 16
"""Of an answer whose speed says something."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What is known of the devices.

    Attributes:
        bytes_per_s: reading weights, by device id.
        measured: ids of the devices that were measured here; others are judged by their name.
        slots: of GPUs, such as "PCIe 4 ×16".
        is_simulated: nothing can be loaded on them.
    """

    forecaster: Forecaster
    bytes_per_s: Mapping[str, float]
    measured: frozenset[str]
    slots: Mapping[str, str] = field(default_factory=dict)
    is_simulated: bool = False


def this_machine(devices: Sequence[DeviceInfo]) -> MachineFacts:
    """What was measured of these devices, or is known of such."""
    file = MachineFile.of_user()
    usable = [device for device in devices if device.usable]
    facts = {device.id: known_facts(device, file) for device in usable}
    topology = read_topology()
    links = known_links(usable, topology, file)
    return MachineFacts(
        Forecaster(usable, facts, links, Calibration.of_user()),
        {device: found.bytes_per_s for device, found in facts.items()},
        frozenset(device.id for device in usable if file.device(device) is not None),
        slot_texts(topology),
    )


def simulated_machine(rig: Rig) -> MachineFacts:
    """A machine that is not here."""
    speeds = {device: facts.bytes_per_s for device, facts in rig.facts.items()}
    return MachineFacts(Forecaster.of_rig(rig), speeds, frozenset(), slot_texts(rig.topology), True)


def slot_texts(topology: Topology) -> dict[str, str]:
    """The slots of GPUs in words; the generation is the highest, as a slot rests with its GPU."""
    numbers = {
        device: (slot.max_generation or slot.generation, slot.width or slot.max_width)
        for device, slot in topology.pcie.items()
    }
    return {d: f"PCIe {gen} ×{width}" for d, (gen, width) in numbers.items() if gen and width}


MachineFactory = Callable[[Sequence[DeviceInfo]], MachineFacts]


class SpeedSource:
    """Predicts the speed of splits, and compares answers with that.

    Args:
        factory: finds out what is known of devices; called when the first speed is asked for.

    Attributes:
        n_past: tokens in the context.
        measured: tokens per second of the last answer of this model and split; 0 for none.
        expected: what was predicted for it; 0 for nothing.
    """

    def __init__(self, factory: MachineFactory = this_machine) -> None:
        self._factory = factory
        self._devices: tuple[DeviceInfo, ...] = ()
        self._machine: MachineFacts | None = None
        self.forget()

    def forget(self) -> None:
        """There is another model or split."""
        self.n_past = 0
        self.measured = self.expected = 0.0

    @property
    def machine(self) -> MachineFacts:
        """What is known of the devices."""
        if self._machine is None:
            self._machine = self._factory(self._devices)
        return self._machine

    def another(self) -> Callable[[], Forecaster]:
        """What makes a forecaster of these devices for another thread."""
        factory, devices = self._factory, self._devices
        return lambda: factory(devices).forecaster

    def set_devices(self, devices: Sequence[DeviceInfo]) -> None:
        """Use these devices, and what is known of them now."""
        self._devices = tuple(devices)
        self._machine = None

    def forecast(self, evaluation: Evaluation, params: LoadParams, quant: str) -> Forecast | None:
        """For what stands in the context now, or a prompt; None for unknown devices."""
        n_prompt = self.n_past or None
        return self.machine.forecaster.forecast(evaluation, params, quant, n_prompt)

    def is_measured(self, devices: Sequence[str]) -> bool:
        """Whether all of these were measured here."""
        return set(devices) <= self.machine.measured

    def note_answer(
        self, finished: Finished, evaluation: Evaluation, params: LoadParams, quant: str
    ) -> None:
        """Compare an answer with what was predicted for it, and learn from it."""
        usage, rate = finished.usage, finished.timings.decode_per_s
        self.n_past = usage.prompt_tokens + usage.completion_tokens
        if rate <= 0:
            return
        forecaster = self.machine.forecaster
        middle = usage.prompt_tokens + usage.completion_tokens // 2
        found = forecaster.forecast(evaluation, params, quant, middle)
        self.measured, self.expected = rate, found.decode.tokens_per_s if found else 0.0
        if usage.completion_tokens >= LEAST_TOKENS:
            forecaster.learn_decode(evaluation, params, quant, 1 / rate, middle)
