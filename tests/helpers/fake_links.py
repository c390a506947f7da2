"""Fake GPUs in host memory, with links between them that may corrupt data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.hardware.devices.topology import Pair, Place
from engine.hardware.devices.types import DeviceInfo
from engine.planning.speed.link_records import MEANS, NCCL, Means, TrialRecord
from engine.runtime.interconnect import trial
from engine.runtime.interconnect.trial import failed_trials, try_route

CPU = torch.device("cpu")

Fault = Callable[[Tensor, Tensor], None]
"""Moves sent packets (first) to the memory where they are read, with some fault."""


def honest(sent: Tensor, memory: Tensor) -> None:
    memory.copy_(sent)


def lost(sent: Tensor, memory: Tensor) -> None:
    """Move nothing, without an error."""


def corrupt(sent: Tensor, memory: Tensor) -> None:
    """Move all packets, one bit of one word flipped."""
    memory.copy_(sent)
    (at,) = sent.nonzero(as_tuple=True)
    if len(at):
        memory[at[len(at) // 2]] ^= 1 << 7


def torn(sent: Tensor, memory: Tensor) -> None:
    """Move the flags before their data."""
    memory.copy_(sent & ~0xFFFFFFFF | memory & 0xFFFFFFFF)


class Late:
    """A link on which data arrives one write late."""

    def __init__(self) -> None:
        self._before: dict[int, Tensor] = {}

    def __call__(self, sent: Tensor, memory: Tensor) -> None:
        memory.copy_(self._before.get(sent.data_ptr(), torch.zeros_like(sent)))
        self._before[sent.data_ptr()] = sent.clone()


def swapped(sent: Tensor, memory: Tensor) -> None:
    """Move all packets, neighbours exchanged."""
    memory.copy_(sent.view(-1, 2).flip(1).reshape(-1) if len(sent) % 2 == 0 else sent)


class Fading:
    """A link that works for `n` writes."""

    def __init__(self, n: int) -> None:
        self._left = n

    def __call__(self, sent: Tensor, memory: Tensor) -> None:
        self._left -= 1
        if self._left >= 0:
            memory.copy_(sent)


class FakeSlot:
    """A slot with separate memory for writer and reader; only `FakeBench.carry` moves packets."""

    device_bytes = 0

    def __init__(self, writer: int, place: Place, n_packet: int) -> None:
        self.writer, self.place = writer, place
        self.sent, self.memory = (torch.zeros(n_packet, dtype=torch.int64) for _ in range(2))
        self.source, self.goal = self.sent.data_ptr(), self.memory.data_ptr()

    def clear(self) -> None:
        self.sent.zero_()
        self.memory.zero_()


@dataclass
class FakeBench:
    """Two fake GPUs and the link between them.

    Attributes:
        stores, copies: fault by source (0 or 1) and place; honest if not named.
        without: places without memory.
        hangs: copies that never end, by source and place.
        slot_lanes: PCIe generation and lanes of each device's slot while it copies.
        nccl: fault of NCCL; None if it is missing.
        calls: log of the calls.
    """

    stores: Mapping[tuple[int, Place], Fault] = field(default_factory=dict)
    copies: Mapping[tuple[int, Place], Fault] = field(default_factory=dict)
    without: frozenset[Place] = frozenset()
    hangs: frozenset[tuple[int, Place]] = frozenset()
    nccl: Fault | None = None
    slot_lanes: tuple[tuple[int, int], tuple[int, int]] = ((4, 16), (4, 16))
    names: tuple[str, str] = ("cuda:0", "cuda:1")
    devices: tuple[torch.device, torch.device] = (CPU, CPU)
    spins: bool = False
    calls: list[str] = field(default_factory=list)
    _is_stuck: bool = False

    def slot(self, writer: int, place: Place, n_packet: int) -> FakeSlot:
        self.calls.append(f"slot {writer} {place}")
        if place in self.without:
            raise EngineError(f"There is no memory of {place}.")
        return FakeSlot(writer, place, n_packet)

    def carry(self, slot: FakeSlot) -> None:
        self.stores.get((slot.writer, slot.place), honest)(slot.sent, slot.memory)

    def copy(self, source: int, place: Place, x: Tensor, y: Tensor) -> None:
        self.calls.append(f"copy {source} {place}")
        if (source, place) in self.hangs:
            self._is_stuck = True
            return
        self.copies.get((source, place), honest)(x, y)

    def lanes(self, source: int) -> tuple[int, int]:
        return self.slot_lanes[source]

    def gather(self, values: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if self.nccl is None:
            raise EngineError("NCCL is not here.")
        for output in outputs:
            self.nccl(torch.cat([*values]), output)

    def on(self, side: int) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self, seconds: float) -> bool:
        is_done, self._is_stuck = not self._is_stuck, False
        return is_done


@dataclass
class FakeMachine:
    """A machine with three fake GPUs.

    Attributes:
        benches: bench of each pair; honest where there is none.
        forbidden: pairs without peer access.
        apart: results of the child process that replace those of trials, by pair.
        asked: pairs that were tried in a child process.
        without_kernels: whether kernels, and so stores, are missing.
    """

    benches: dict[Pair, FakeBench] = field(default_factory=dict)
    forbidden: frozenset[Pair] = frozenset()
    apart: dict[Pair, dict[tuple[Means, Place], TrialRecord]] = field(default_factory=dict)
    asked: list[Pair] = field(default_factory=list)
    without_kernels: bool = False
    driver: str = "580.1"
    slot: str = "00000000:01:00.0"

    def infos(self) -> Mapping[str, DeviceInfo]:
        buses = (self.slot, "00000000:02:00.0", "00000000:03:00.0")
        return {
            f"cuda:{n}": DeviceInfo(
                f"cuda:{n}", "cuda", "RTX 3090", 24 << 30, 23 << 30, uuid=f"GPU-{n}", pci_bus=bus,
                driver=self.driver,
            )
            for n, bus in enumerate(buses)
        }  # fmt: skip

    def peer_problem(self, a: str, b: str) -> str:
        return "the chipset does not support it" if (a, b) in self.forbidden else ""

    def means(self, a: str, b: str) -> Sequence[Means]:
        return ("copies",) if self.without_kernels else MEANS

    def bench(self, a: str, b: str) -> FakeBench:
        return self.benches.setdefault((a, b), FakeBench(names=(a, b)))

    def release(self, devices: Sequence[str]) -> None:
        """Do nothing: there is no memory to release."""

    def try_in_child(
        self, pairs: Sequence[Pair], places: Sequence[Place], *, with_nccl: bool
    ) -> Mapping[Pair, dict[tuple[Means, Place], TrialRecord]]:
        self.asked += pairs
        found: dict[Pair, dict[tuple[Means, Place], TrialRecord]] = {}
        for a, b in pairs:
            for key in product(self.means(a, b), places):
                there, back = try_route(self.bench(a, b), *key, trial.FULL)
                found.setdefault((a, b), {})[key] = there
                found.setdefault((b, a), {})[key] = back
            if with_nccl:
                try:
                    both = try_route(self.bench(a, b), *NCCL, trial.FULL)
                except EngineError as error:
                    both = failed_trials(error)
                found[a, b][NCCL], found[b, a][NCCL] = both
            for pair in ((a, b), (b, a)):
                found[pair].update(self.apart.get(pair, {}))
        return found
