"""Memory into which kernels of one rank write packets for another one (`gpu.comm.one_shot`)."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.gpu.launch.target import target_of
from engine.hardware.cuda_api import CudaApi
from engine.hardware.environment import loads_kernels_late, starts_wait
from engine.hardware.host_memory import HostTensor

if TYPE_CHECKING:
    from engine.devices.routes import Place
    from engine.forward.communicator import Group


FIRST_ROUND = 1
"""Its number is another one than that of packets that nobody has written, which is 0."""

MARGIN = 1 << 16
"""Rounds within which all packets of a slot are written anew, and many more."""


INTERPRETED_POLLS = 100
"""The same where kernels are interpreted: they begin when all is there, and a poll is slow."""

POLLS_PER_S = 500_000
"""Where there is no clock: a poll of the host's memory takes one or two microseconds."""

TICKS_PER_S = 1e9 / 1024
"""Of the kernels' clock."""


class PacketSlot(Protocol):
    """Packets on the way from one rank to another.

    Attributes:
        source: where kernels of the rank that gives write them.
        goal: where kernels of the rank that gets read them.
        device_bytes: of the memory of the device that gets them.
    """

    source: int
    goal: int
    device_bytes: int

    def clear(self) -> None:
        """Zeros, when it returns; only while nobody uses it."""
        ...


def new_slot(place: Place, n_packet: int, source: torch.device, goal: torch.device) -> PacketSlot:
    """Memory for so many packets, all zeros.

    Raises:
        EngineError: it cannot be had.
    """
    if place == "device":
        return _OnDevice(n_packet, goal)
    if place == "peer" and source.type == goal.type == "cuda" and not torch.version.hip:
        return _OnPeer(n_packet, source, goal)
    return _OnHost(n_packet, source, goal)


@dataclass(frozen=True, slots=True)
class End:
    """The memory of one rank's end of a one-shot all-reduce.

    Attributes:
        table, flags, patience: see `engine.gpu.kernels.one_shot`.
        slots: that it reads.
        statuses: of all members, by seat.
        most_programs: of one kernel.
        meet: see `engine.gpu.comm.one_shot.OneShotGroups`.
    """

    table: Tensor
    flags: Tensor
    slots: Sequence[PacketSlot]
    statuses: HostTensor
    patience: int
    most_programs: int
    meet: Callable[[int, Group], None] | None


def fresh_round(rounds: Sequence[int]) -> int:
    """A number from which on rounds may go on in empty slots, of 32 bits with a sign.

    No packet of earlier ones has it, even if a link brings one late: so it is not `FIRST_ROUND`.

    Args:
        rounds: the numbers of what would be the next round of each member.
    """
    if not rounds:
        return FIRST_ROUND
    most = max(_wrapped(number - rounds[0]) for number in rounds)
    fresh = _wrapped(rounds[0] + most + 1)  # somebody may have written for that round, and no more
    return FIRST_ROUND if -MARGIN < fresh < FIRST_ROUND else fresh  # 0 would come too soon


def _wrapped(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


class _OnDevice:
    """Of two ranks on one device."""

    def __init__(self, n_packet: int, device: torch.device) -> None:
        self._packets = torch.zeros(n_packet, dtype=torch.int64, device=device)
        self.source = self.goal = self._packets.data_ptr()
        self.device_bytes = self._packets.nbytes
        finish(device)

    def clear(self) -> None:
        self._packets.zero_()
        finish(self._packets.device)


class _OnPeer:
    """In the memory of the device that gets them: nobody reads over the link."""

    def __init__(self, n_packet: int, source: torch.device, goal: torch.device) -> None:
        self._api, self._device, self.device_bytes = CudaApi.open(), goal.index or 0, 8 * n_packet
        self._api.allow_peer(source.index or 0, self._device)
        self.source = self.goal = self._api.allocate(self.device_bytes, self._device)
        finalizer = weakref.finalize(self, self._api.free, self.goal, self._device)
        finalizer.atexit = False  # CUDA may have ended before

    def clear(self) -> None:
        self._api.clear(self.goal, self.device_bytes, self._device)


class _OnHost:
    """In the memory of the host."""

    device_bytes = 0

    def __init__(self, n_packet: int, source: torch.device, goal: torch.device) -> None:
        self._packets = host_words(n_packet, goal)
        self.source = self._packets.address_on(source)
        self.goal = self._packets.address_on(goal)

    def clear(self) -> None:
        self._packets.value.zero_()


def host_words(n: int, device: torch.device) -> HostTensor:
    """Zeros of the host, int64 (n,), that kernels of all GPUs can read and write.

    Raises:
        EngineError: the system does not allow it.
    """
    held = HostTensor((n,), torch.int64, device)
    if device.type == "cuda" and not held.is_pinned:
        raise EngineError("The system allows no memory that several GPUs can write by themselves.")
    return held


def patience_of(device: torch.device, timeout_s: float) -> int:
    """How long `engine.gpu.kernels.one_shot` waits for a peer, in its units."""
    target = target_of(device)
    if target.maker == "interpreter":
        return INTERPRETED_POLLS
    return int(timeout_s * (TICKS_PER_S if target.has_asm else POLLS_PER_S))


def most_waiting(device: torch.device, n_rank: int) -> int:
    """How many programs of one kernel may wait at once on a device with so many ranks.

    Those of several ranks have to be there together, each on a multiprocessor at worst, and leave
    room for what they wait for. A rank that is alone needs no limit: programs begin in the same
    order everywhere.
    """
    if device.type != "cuda" or n_rank == 1:
        return sys.maxsize
    return target_of(device).n_sm // 2 // n_rank


def why_not_together(names: Sequence[str]) -> str:
    """Why kernels of ranks on these devices cannot wait for each other; "" if they can."""
    gpus = [name for name in names if name.startswith("cuda")]
    if gpus and starts_wait():
        return "kernels are started one after the other"
    if len(set(gpus)) < len(gpus) and loads_kernels_late():
        return "some share a GPU, where loading a kernel waits for those that run"
    return ""


def finish(device: torch.device) -> None:
    """Wait for all that a device was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
