"""This machine's GPUs and the trials of their links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.hardware.backend_choice import kernels_for
from engine.hardware.devices.catalog import list_devices
from engine.hardware.devices.links import read_topology
from engine.hardware.devices.routes import Pair, Place
from engine.hardware.devices.types import DeviceInfo
from engine.hardware.torch_devices import release_cached_memory, torch_device
from engine.planning.speed.link_records import MEANS, NCCL, Means, TrialRecord
from engine.runtime.interconnect.bench import GpuBench
from engine.runtime.interconnect.child import TrialStep, try_steps

UNKNOWN = "the driver does not allow it"
"""Why peer access is forbidden, where the driver gives no reason."""


class ThisMachine:
    """The GPUs of this machine, as `engine.runtime.interconnect.proof.TrialMachine`."""

    def __init__(self) -> None:
        self._infos = {info.id: info for info in list_devices() if info.kind != "cpu"}
        self._benches: dict[Pair, GpuBench] = {}
        self._problems: Mapping[frozenset[str], str] | None = None

    def infos(self) -> Mapping[str, DeviceInfo]:
        return self._infos

    def peer_problem(self, a: str, b: str) -> str:
        one, other = torch_device(a), torch_device(b)
        reaches = torch.cuda.can_device_access_peer
        if reaches(one, other) and reaches(other, one):
            return ""
        if self._problems is None:
            links = read_topology().links
            self._problems = {frozenset((k.a, k.b)): k.peer_problem for k in links}
        return self._problems.get(frozenset((a, b))) or UNKNOWN

    def means(self, a: str, b: str) -> Sequence[Means]:
        return MEANS if kernels_for(a) == kernels_for(b) == "gpu" else ("copies",)

    def bench(self, a: str, b: str) -> GpuBench:
        found = self._benches.get((a, b))
        if found is None:
            numbers = [torch_device(name).index for name in (a, b)]
            found = GpuBench(numbers, (a, b))
            if "stores" in self.means(a, b):
                found.warm_up()
            self._benches[a, b] = found
        return found

    def release(self, devices: Sequence[str]) -> None:
        self._benches.clear()
        release_cached_memory([torch_device(name) for name in devices])

    def try_in_child(
        self, pairs: Sequence[Pair], places: Sequence[Place], *, with_nccl: bool
    ) -> Mapping[Pair, dict[tuple[Means, Place], TrialRecord]]:
        steps = [
            TrialStep(pair, means, place)
            for pair in pairs for place in places for means in self.means(*pair)
        ]  # fmt: skip
        if with_nccl:
            steps += [TrialStep(pair, *NCCL) for pair in pairs]
        names = dict.fromkeys(name for pair in pairs for name in pair)
        found: dict[Pair, dict[tuple[Means, Place], TrialRecord]] = {}
        for tried in try_steps(steps, {name: self._infos[name].uuid for name in names}):
            a, b = tried.step.pair
            key = tried.step.means, tried.step.place
            found.setdefault((a, b), {})[key] = tried.there
            found.setdefault((b, a), {})[key] = tried.back
        return found
