"""Packet slots: memory into which one rank's kernels write packets for another rank's kernels.

Used by the one-shot all-reduce (`engine.backends.gpu.comm.one_shot`) and by link trials.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.gpu.launch.configs import target_of
from engine.errors import EngineError, Sentence
from engine.hardware.cuda_api import CudaApi
from engine.hardware.environment import launches_block, loads_kernels_lazily
from engine.hardware.faults import call_all
from engine.hardware.host_memory import HostTensor

if TYPE_CHECKING:
    from engine.hardware.devices.topology import Place, Routes
    from engine.model.forward.communicator import Group


FIRST_ROUND = 1  # packets that were never written have round 0
MARGIN = 1 << 16  # rounds after which all of a slot's packets have been rewritten
INTERPRETED_POLLS = 100  # polls per interpreted kernel; its data is there when it starts
POLLS_PER_S = 500_000  # used if there is no clock; polling host memory takes 1 to 2 us
TICKS_PER_S = 1e9 / 1024  # ticks of the kernels' clock


class PacketSlot(ABC):
    """Memory for packets from one rank to another.

    Attributes:
        source: address at which the sending rank's kernels write.
        goal: address at which the receiving rank's kernels read.
        device_bytes: bytes taken on the receiving device.
        is_far: whether the receiving device reads the slot over a link.
    """

    source: int
    goal: int
    device_bytes = 0
    is_far = False

    @abstractmethod
    def clear(self) -> None:
        """Zero all packets before returning; call only while no kernel uses the slot."""


def new_slot(place: Place, n_packet: int, source: torch.device, goal: torch.device) -> PacketSlot:
    """Create a zeroed slot of n_packet packets that `source` writes and `goal` reads.

    Raises:
        EngineError: the memory cannot be allocated.
    """
    if place == "device":
        return _OnDevice(n_packet, goal)
    if place == "peer" and source.type == goal.type == "cuda" and not torch.version.hip:
        return _OnPeer(n_packet, source, goal)
    return _OnHost(n_packet, source, goal)


@dataclass(frozen=True, slots=True)
class End:
    """Memory and limits for one rank's end in a one-shot all-reduce.

    Attributes:
        table, flags, patience: see `engine.backends.gpu.kernels.one_shot`.
        slots: slots that this rank reads.
        statuses: all members' status words, by seat.
        most_programs: maximum number of programs in one kernel.
        meet: see `engine.backends.gpu.comm.one_shot.OneShotGroups`.
    """

    table: Tensor
    flags: Tensor
    slots: Sequence[PacketSlot]
    statuses: HostTensor
    patience: int
    most_programs: int
    meet: Callable[[int, Group], None] | None


def fresh_round(rounds: Sequence[int]) -> int:
    """Return the round number, a signed 32-bit integer, with which to continue in emptied slots.

    It is not simply `FIRST_ROUND`, because it must differ from the rounds of all earlier packets,
    which a link may deliver late. `rounds` has each member's next round number.
    """
    if not rounds:
        return FIRST_ROUND
    most = max(_wrapped(number - rounds[0]) for number in rounds)
    fresh = _wrapped(rounds[0] + most + 1)  # a member may have written for the previous round
    return FIRST_ROUND if -MARGIN < fresh < FIRST_ROUND else fresh  # would soon reach 0


def _wrapped(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


class _OnDevice(PacketSlot):
    """Slot between two ranks that share a device."""

    def __init__(self, n_packet: int, device: torch.device) -> None:
        self._packets = torch.zeros(n_packet, dtype=torch.int64, device=device)
        self.source = self.goal = self._packets.data_ptr()
        self.device_bytes = self._packets.nbytes
        finish(device)

    def clear(self) -> None:
        self._packets.zero_()
        finish(self._packets.device)


class _OnPeer(PacketSlot):
    """Slot in the receiving device's memory, so that the link carries only writes."""

    def __init__(self, n_packet: int, source: torch.device, goal: torch.device) -> None:
        self._api, self._device, self.device_bytes = CudaApi.open(), goal.index or 0, 8 * n_packet
        self._api.allow_peer(source.index or 0, self._device)
        self.source = self.goal = self._api.allocate(self.device_bytes, self._device)
        free = partial(self._api.free, self.goal, self._device)
        finalizer = weakref.finalize(self, call_all, free)
        finalizer.atexit = False  # CUDA may be gone by then

    def clear(self) -> None:
        self._api.clear(self.goal, self.device_bytes, self._device)


class _OnHost(PacketSlot):
    """Slot in pinned host memory."""

    is_far = True

    def __init__(self, n_packet: int, source: torch.device, goal: torch.device) -> None:
        self._packets = host_words(n_packet, goal)
        self.source = self._packets.address_on(source)
        self.goal = self._packets.address_on(goal)

    def clear(self) -> None:
        self._packets.value.zero_()


def host_words(n: int, device: torch.device) -> HostTensor:
    """Return zeros in host memory, int64 (n,), that kernels on all GPUs can read and write.

    Raises:
        EngineError: the system cannot pin memory.
    """
    held = HostTensor((n,), torch.int64, device)
    if device.type == "cuda" and not held.is_pinned:
        raise EngineError("The system does not allow pinned memory that several GPUs can write to.")
    return held


def patience_of(device: torch.device, timeout_s: float) -> int:
    """Return `gpu.kernels.one_shot`'s timeout in clock ticks, or in polls if there is no clock."""
    target = target_of(device)
    if target.maker == "interpreter":
        return INTERPRETED_POLLS
    return int(timeout_s * (TICKS_PER_S if target.has_asm else POLLS_PER_S))


def most_waiting(device: torch.device, n_rank: int) -> int:
    """Return how many programs in one kernel may wait at a time on a device with n_rank ranks.

    All the ranks' programs must be resident together, in the worst case each on its own
    multiprocessor, and leave room for the programs they wait for. A single rank needs no limit,
    because programs start in the same order on every device.
    """
    if device.type != "cuda" or n_rank == 1:
        return sys.maxsize
    return target_of(device).n_sm // 2 // n_rank


def why_not_together(names: Sequence[str], routes: Routes) -> str:
    """Return why kernels on these ranks' devices cannot wait for each other, or ""."""
    if not routes.have_stores(names):
        return Sentence("a test showed that kernels on one cannot write to the other's memory")
    gpus = [name for name in names if name.startswith("cuda")]
    if gpus and launches_block():
        return Sentence("kernel launches are blocking")
    if len(set(gpus)) < len(gpus) and loads_kernels_lazily():
        return Sentence("some share a GPU, on which loading a kernel waits for running ones")
    return ""


def finish(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
