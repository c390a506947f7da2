"""Predicted speed of splits, from measured or known facts about the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import engine
from engine import DeviceInfo, Finished, LoadParams, machine_of

if TYPE_CHECKING:
    from engine import Evaluation, Forecast, Rig, Wires

MIN_TOKENS = 16
"""Number of tokens from which the speed of an answer is learned from."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about the devices of a machine.

    Attributes:
        forecaster: predicts speeds from the facts.
        bytes_per_s: read speed of weights by device id.
        measured: ids of the devices that were measured here; other facts go by the device's name.
        slots: slots of GPUs in words, such as "PCIe 4 ×16", by device id.
        is_simulated: whether the devices are simulated, so that nothing can be loaded.
    """

    forecaster: engine.Forecaster
    bytes_per_s: Mapping[str, float]
    measured: frozenset[str]
    slots: Mapping[str, str] = field(default_factory=dict)
    is_simulated: bool = False


def this_machine(devices: Sequence[DeviceInfo], wires: Wires | None = None) -> MachineFacts:
    """Return what was measured of these devices, or else is known of devices of their name.

    Args:
        wires: links to other machines, of which there may be devices; None for usual ones.
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
    """Return the slots of GPUs in words, with their highest generation.

    An idle GPU lowers the generation of its slot, so the present one says little.
    """
    numbers = {
        device: (slot.max_generation or slot.generation, slot.width or slot.max_width)
        for device, slot in topology.pcie.items()
    }
    return {d: f"PCIe {gen} ×{width}" for d, (gen, width) in numbers.items() if gen and width}


MachineFactory = Callable[[Sequence[DeviceInfo]], MachineFacts]
"""Finds the facts about devices."""


class SpeedSource:
    """Predicts the speed of splits, and compares answers with the predictions.

    Args:
        factory: finds the facts about devices; called when the first speed is asked for.

    Attributes:
        n_past: number of tokens in the context.
        measured: speed of the last answer of this model and split, in tokens/s; 0 for none.
        expected: predicted speed of that answer, times what guesses gained in it, in tokens/s; 0
            for none.
    """

    def __init__(self, factory: MachineFactory = this_machine) -> None:
        self._factory = factory
        self._devices: tuple[DeviceInfo, ...] = ()
        self._machine: MachineFacts | None = None
        self.forget()

    def forget(self) -> None:
        """Forget the last answer: there is another model or split."""
        self.n_past = 0
        self.measured = self.expected = 0.0

    @property
    def machine(self) -> MachineFacts:
        """Facts about the devices."""
        if self._machine is None:
            self._machine = self._factory(self._devices)
        return self._machine

    def another(self) -> Callable[[], engine.Forecaster]:
        """Return a function that makes a forecaster of these devices for another thread."""
        factory, devices = self._factory, self._devices
        return lambda: factory(devices).forecaster

    def set_devices(
        self, devices: Sequence[DeviceInfo], machine: MachineFacts | None = None
    ) -> None:
        """Use these devices, and find their facts anew unless `machine` has them."""
        self._devices = tuple(devices)
        self._machine = machine

    def forecast(self, evaluation: Evaluation, params: LoadParams, quant: str) -> Forecast | None:
        """Predict the speed with the present context, or with a default prompt if it is empty.

        None where the speed of a device is unknown.
        """
        n_prompt = self.n_past or None
        return self.machine.forecaster.forecast(evaluation, params, quant, n_prompt)

    def is_measured(self, devices: Sequence[str]) -> bool:
        """Return whether all of these devices were measured here."""
        return set(devices) <= self.machine.measured

    def note_answer(
        self, finished: Finished, evaluation: Evaluation, params: LoadParams, quant: str
    ) -> None:
        """Compare an answer with its prediction, and learn from it.

        A short one says more of its first tokens, and predictions know nothing of guesses. What
        these saved is an estimate, so the prediction moves no further than it must: to the nearer
        of the speeds with and without them, or not at all between the two.
        """
        usage, rate = finished.usage, finished.timings.decode_per_s
        self.n_past = usage.prompt_tokens + usage.completion_tokens
        if rate <= 0:
            return
        self.measured, self.expected = rate, 0.0
        plain = finished.plain_per_s
        if usage.completion_tokens < MIN_TOKENS or not plain:
            return
        forecaster = self.machine.forecaster
        middle = usage.prompt_tokens + usage.completion_tokens // 2
        found = forecaster.forecast(evaluation, params, quant, middle)
        if found is None:
            return
        predicted = found.decode.tokens_per_s
        self.expected = predicted * rate / plain
        nearest = min(max(predicted, min(plain, rate)), max(plain, rate))
        forecaster.learn_decode(evaluation, params, quant, 1 / nearest, middle)
