"""Small sums of ranks inside kernels: nobody's host waits, so a graph can hold them.

Each rank's kernel writes its values for all others and awaits theirs (`kernels.exchange`). Where
kernels are interpreted, one at a time, nobody could wait in one: there a kernel writes, the ranks
meet, and a second kernel reads.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.errors import CommError, EngineError
from engine.gpu.comm.slots import (
    FIRST_ROUND,
    End,
    finish,
    fresh_round,
    host_words,
    most_waiting,
    new_slot,
    patience_of,
    why_not_together,
)
from engine.gpu.elementwise import add_norm_launch, power_of_two, warps_of
from engine.gpu.kernels import one_shot
from engine.gpu.launch.graph import host_step, refuse_capture
from engine.gpu.launch.kernel_launch import launch
from engine.gpu.launch.target import target_of

if TYPE_CHECKING:
    from engine.devices.routes import Ways
    from engine.forward.communicator import Group
    from engine.forward.ops import Addend, NormLayer
    from engine.hardware.host_memory import HostTensor

log = logging.getLogger(__name__)

TIMEOUT_S = 1.5 if sys.platform == "win32" else 4.0
"""How long a kernel waits for a peer. Windows resets a GPU whose kernels take two seconds."""

MOST_IN_F32 = 8 << 10
"""Numbers of a value (32 KiB) that travel whole; of larger ones, half as many bytes do."""

MOST_NUMBERS = 64 << 10
"""Of a value: 8 rows of 8192. In packets that is as many bytes as in F32 (256 KiB), about 20 us of
a link of 12 GB/s; beyond it what copies take to get going is little beside their speed."""

MOST_WORDS = 32 << 10
"""Words of each member: as many as a slot has packets."""

HEADER, RENEWED = one_shot.HEADER.value, one_shot.RENEWED.value
MOST_MEMBERS = one_shot.MOST_MEMBERS.value

SLOT = HEADER + MOST_WORDS
"""Packets in each half of a slot, a header and what the largest values take."""

assert (SLOT - HEADER) % (2 * RENEWED) == 0, "what is written anew goes round"

BLOCK = 4096
"""Numbers of each program that adds up: few programs wait at a time."""

MOST_TOGETHER, FEW = 4, 2
"""Members that a program awaits at once, in groups of so many and in larger ones."""

MOST_HELD = 4 << 10
"""Words of one that registers hold beside those of others; larger values come one by one."""

SMALLEST = 4 * RENEWED
"""Numbers that a program holds at least: it has as many pairs of packets as it writes anew."""

THREADS = 32
"""Of a warp. If several threads read a pair, they would not see it come at the same time."""

NOT_WAITING = 1
"""Where in a rank's flags it says that no kernel shall wait."""


class OneShotGroups:
    """The one-shot all-reduces of one model: one for each group of ranks that asks for it.

    The ranks are on GPUs, or on the CPU where that stands for them.

    Args:
        devices: of each rank.
        ways: how they reach each other, by the names of devices such as "cuda:0".
        meet: given a rank and a group, returns when all of the group are there; needed where
            kernels are interpreted.
        timeout_s: how long a kernel waits for a peer.
    """

    def __init__(
        self, devices: Sequence[torch.device], ways: Ways,
        meet: Callable[[int, Group], None] | None = None, timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        self.devices = tuple(devices)
        self._meet = meet
        self._ways = ways
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._made: dict[Group, tuple[OneShot, ...]] = {}
        self._flags: dict[int, Tensor] = {}
        self._host: HostTensor | None = None
        self._is_aborted = self._is_hasty = self._is_retired = False

    def one_shot(self, rank: int, group: Group) -> OneShot | None:
        """Return a rank's end in a group; None where its kernels cannot reach each other.

        What a group needs is made when the first of its ranks asks for it.

        Raises:
            NotRepeatable: this thread is capturing, and nobody has asked before.
        """
        ends = () if self._is_retired else self._made.get(group)
        if ends is None:
            refuse_capture("ranks meet that have not met before")
            with self._lock:
                ends = self._made.get(group)
                if ends is None:
                    self._made[group] = ends = self._new(group)
        return ends[group.index(rank)] if ends else None

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Let kernels take whatever stands in the slots: they can be started one rank at a time.

        What they compute is of no use. All ranks must start as many of them.
        """
        self._hasten(is_hasty=True)
        try:
            yield
        finally:
            self._hasten(is_hasty=False)

    def problem(self) -> CommError | None:
        """What kernels reported: that they waited too long, and for whom. It asks no device.

        Who waited for a rank that itself waited for a third one is not the one that names it.
        """
        blamed: dict[int, int] = {}
        for group, ends in list(self._made.items()):
            for end in ends:
                status = int(end.status)
                if status:
                    blamed.setdefault(end.rank, group[(status & 0xFFFFFFFF) - 1])
        if not blamed:
            return None
        silent = [rank for rank in blamed.values() if rank not in blamed]
        rank = (silent or list(blamed.values()))[0]
        return CommError(rank, "did not answer the other devices in time", str(self.devices[rank]))

    def abort(self) -> None:
        """Let kernels that wait give up soon, and later ones not wait; `reset` undoes it."""
        self._is_aborted = True  # without the lock: whoever has it may wait for such a kernel
        if self._host is not None:
            self._host.value.fill_(1)

    def reset(self) -> None:
        """Begin with empty slots; only while nothing runs, on any of the devices."""
        with self._lock:
            self._is_aborted = False
            for device in set(self.devices):
                finish(device)
            for ends in self._made.values():
                first = fresh_round([end.round for end in ends])
                for end in ends:
                    end.clear(first)
            for flags in self._flags.values():
                flags.zero_()
            if self._host is not None:
                self._host.value.zero_()
            for device in set(self.devices):
                finish(device)

    def close(self) -> None:
        """Free all memory, once nothing runs any more; safe to call twice."""
        with self._lock:
            self._made.clear()
            self._flags.clear()
            self._host = None

    def retire(self, why: str) -> None:
        """Give no more one-shot all-reduces: the ranks meet in another way from now on."""
        log.warning("ranks do without sums inside kernels from now on: %s", why)
        self._is_retired = True

    def n_bytes(self, rank: int) -> int:
        """Of the memory of a rank's device."""
        with self._lock:
            own = [end for ends in self._made.values() for end in ends if end.rank == rank]
            flags = self._flags.get(rank)
        return sum(end.n_bytes for end in own) + (0 if flags is None else flags.nbytes)

    def _hasten(self, *, is_hasty: bool) -> None:
        """Set whether kernels wait, between what devices were told before and what comes now."""
        with self._lock:
            self._is_hasty = is_hasty
            for rank, flags in self._flags.items():
                finish(self.devices[rank])
                flags[NOT_WAITING].fill_(int(is_hasty))
                finish(self.devices[rank])

    def _new(self, group: Group) -> tuple[OneShot, ...]:
        """The ends of a group's one-shot all-reduce; none if there cannot be one."""
        names = [str(self.devices[rank]) for rank in group]
        if not 1 < len(group) <= MOST_MEMBERS or not self._ways.have_stores(names):
            return ()
        if why := why_not_together(names):
            log.info("ranks %s meet outside of kernels: %s", group, why)
            return ()
        try:
            with torch.inference_mode(mode=False):
                return self._connected(group)
        except (EngineError, RuntimeError) as error:
            log.warning("ranks %s do without sums inside kernels: %s", group, error)
            return ()

    def _connected(self, group: Group) -> tuple[OneShot, ...]:
        devices = [self.devices[rank] for rank in group]
        most = min(most_waiting(device, self.devices.count(device)) for device in devices)
        pairs = [(a, b) for a in range(len(group)) for b in range(len(group)) if a != b]
        slots = {
            (a, b): new_slot(self._place(devices[a], devices[b]), 2 * SLOT, devices[a], devices[b])
            for a, b in pairs
        }
        if self._host is None:
            self._host = host_words(1, devices[0])
        if self._is_aborted:
            self._host.value.fill_(1)
        statuses = host_words(len(group), devices[0])
        for rank, device in zip(group, devices, strict=True):
            if rank not in self._flags:
                flags = torch.tensor([0, int(self._is_hasty)], dtype=torch.int32)
                self._flags[rank] = flags.to(device)
        ends = []
        for seat, (rank, device) in enumerate(zip(group, devices, strict=True)):
            to = [slots[seat, b].source if b != seat else 0 for b in range(len(group))]
            of = [slots[a, seat].goal if a != seat else 0 for a in range(len(group))]
            own = [slots[a, seat] for a in range(len(group)) if a != seat]
            places = [statuses.address_on(device) + 8 * seat, self._host.address_on(device)]
            table = torch.tensor([*to, *of, *places], dtype=torch.int64).to(device)
            wait = patience_of(device, self._timeout_s)
            end = End(table, self._flags[rank], own, statuses, wait, most, self._meet)
            ends.append(OneShot(group, seat, device, end))
            finish(device)
        return tuple(ends)

    def _place(self, source: torch.device, goal: torch.device) -> Any:
        return self._ways.between(str(source), str(goal)).stores


class OneShot:
    """One rank's end in one group. All members make the same calls in the same order.

    Nothing here waits, reads numbers of the device, or keeps memory but for results.

    Attributes:
        group: ranks, in the order in which values are added.
        seat: this rank's place in the group.
    """

    def __init__(self, group: Group, seat: int, device: torch.device, end: End) -> None:
        self.group = group
        self.seat = seat
        self._device = device
        self._end = end
        self._words = torch.tensor([FIRST_ROUND, 0], dtype=torch.int32).to(device)

    @property
    def rank(self) -> int:
        return self.group[self.seat]

    @property
    def status(self) -> Tensor:
        """What kernels reported: 0, or the round in the upper and a seat + 1 in the lower half."""
        return self._end.statuses.value[self.seat]

    @property
    def n_bytes(self) -> int:
        """Of the device's memory."""
        slots = sum(slot.device_bytes for slot in self._end.slots)
        return slots + self._end.table.nbytes + self._words.nbytes

    @property
    def round(self) -> int:
        """The number of the next one; the device is asked for it."""
        return int(self._words[0])

    def clear(self, first_round: int) -> None:
        """See `OneShotGroups.reset`."""
        for slot in self._end.slots:
            slot.clear()
        self._words.copy_(torch.tensor([first_round, 0]))
        self._end.statuses.value.zero_()

    def serves(self, n: int) -> bool:
        """Whether it takes values of n numbers."""
        return 0 < n <= MOST_NUMBERS and -(-n // BLOCK) <= self._end.most_programs

    def all_reduce(self, x: Tensor | None, shape: Sequence[int]) -> Tensor:
        """The sum of the members' values, with the same bits on all of them.

        Args:
            x: this rank's, F32 of that shape; None if it has nothing to add.
        """
        n = prod(shape)
        assert self.serves(n), "too many numbers for a one-shot all-reduce"
        out = torch.empty(tuple(shape), device=self._device)
        own = out if x is None else _plain(x)
        halves = n > MOST_IN_F32
        per = 4 if halves else 2
        size = min(BLOCK, max(SMALLEST, power_of_two(n)))
        self._run(
            one_shot.all_reduce, (-(-n // size),), 2 * size // per, own, out, *self._memory,
            self.seat, n, self._end.patience, num_warps=warps_of(size), HALVES=halves,
            HAS_OWN=x is not None, PAIRS=size // per,
        )  # fmt: skip
        return out

    def add_norm(
        self, x: Tensor, addend: Addend, norm: NormLayer | None, x_bytes: int | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """`ReferenceOps.add_norm` of the sum of the members' summands, in one kernel.

        Args:
            addend: with this rank's summand, or None.
            x_bytes: see `steps.add_norm`.

        Returns:
            None, on all members alike, where the kernel does not serve.
        """
        own = None if addend.partial is None else _plain(addend.partial)
        n = x.shape[-1]
        halves = x.numel() > MOST_IN_F32
        per = 4 if halves else 2
        n_row = x.numel() // n
        if not self.serves(x.numel()) or n_row > self._end.most_programs:
            return None
        has_room = 2 * n_row * -(-n // per) <= SLOT - HEADER
        found = add_norm_launch(x, own, addend, norm, x_bytes, SMALLEST) if has_room else None
        if found is None:
            return None
        n_word = 2 * found.constants["SIZE"] // per
        self._run(
            one_shot.add_norm, (n_row,), n_word, *found.arguments, *self._memory,
            self.seat, self._end.patience, num_warps=found.num_warps, HALVES=halves,
            HAS_OWN=own is not None, **found.constants,
        )  # fmt: skip
        return found.result

    def words(self, own: Tensor) -> Tensor:
        """Words (m,), int32, of each member: (n, m) in the order of the group, alike on all."""
        n = own.numel()
        assert 0 < n <= MOST_WORDS, "too many words for a one-shot all-reduce"
        own = own.contiguous()
        out = torch.empty(len(self.group), n, dtype=torch.int32, device=self._device)
        size = min(BLOCK, max(SMALLEST, power_of_two(n)))
        self._run(
            one_shot.all_words, (-(-n // size),), size, own, out, *self._memory, self.seat, n,
            self._end.patience, num_warps=warps_of(size), PAIRS=size // 2,
        )  # fmt: skip
        return out

    @property
    def _memory(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._end.table, self._words, self._end.flags

    def _run(
        self, kernel: Any, grid: tuple[int], n_word: int, *args: Any, **constants: Any
    ) -> None:
        """All in one kernel, or where kernels are interpreted in two, with a meeting between.

        Args:
            n_word: of each member, that a program holds.
        """
        assert n_word >= 2 * THREADS * constants["num_warps"], "one thread alone reads a pair"
        target, n = target_of(self._device), len(self.group)
        together = 1 if n_word > MOST_HELD else n if n <= MOST_TOGETHER else FEW
        constants |= {"N": n, "TOGETHER": together, "SLOT": SLOT, "ASM": target.has_asm}
        if target.maker != "interpreter" or self._device.type == "meta":
            launch(kernel, grid, *args, PUSH=True, COLLECT=True, **constants)
            return
        meet, rank = self._end.meet, self.rank
        assert meet is not None, "ranks whose kernels are interpreted have to meet"
        launch(kernel, grid, *args, PUSH=True, COLLECT=False, **constants)
        host_step(lambda: meet(rank, self.group))
        launch(kernel, grid, *args, PUSH=False, COLLECT=True, **constants)


def _plain(x: Tensor) -> Tensor:
    """As kernels read it."""
    return x.to(torch.float32).contiguous()
