"""One-shot all-reduce: small values are summed over ranks inside a kernel, without the host.

A CUDA graph can therefore contain it. Each rank's kernel writes its values for all others and waits
for theirs (`gpu.kernels.one_shot`). Interpreted kernels run one at a time, so none could wait;
instead, one kernel writes, the ranks' threads meet, and a second kernel reads.
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

from engine.backends.gpu.comm.slots import (
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
from engine.backends.gpu.elementwise import add_norm_launch, power_of_two, warps_of
from engine.backends.gpu.kernels import one_shot
from engine.backends.gpu.launch.configs import target_of
from engine.backends.gpu.launch.graph import host_step, refuse_capture
from engine.backends.gpu.launch.kernel_launch import launch
from engine.errors import CommError, EngineError, Sentence
from engine.hardware.fallbacks import Fallbacks
from engine.model.forward.attention import is_checking
from engine.model.forward.batch import MAX_IN_F32, MAX_ONE_SHOT

if TYPE_CHECKING:
    from engine.hardware.devices.topology import Routes
    from engine.hardware.host_memory import HostTensor
    from engine.model.forward.communicator import Group
    from engine.model.forward.operands import Addend, NormLayer

log = logging.getLogger(__name__)

TIMEOUT_S = 1.5 if sys.platform == "win32" else 4.0
"""Seconds that a kernel waits for a peer. Windows resets a GPU if a kernel takes two seconds."""

HEADER, RENEWED = one_shot.HEADER.value, one_shot.RENEWED.value
MAX_MEMBERS = one_shot.MAX_MEMBERS.value
MAX_WORDS = 32 << 10  # max. words in a message, equal to a slot's packets
SLOT = HEADER + MAX_WORDS  # packets in each half of a slot

assert (SLOT - HEADER) % (2 * RENEWED) == 0, "rewriting old packets goes round evenly"

BLOCK = 4096  # elements that each program sums, so that few programs wait at a time

MAX_TOGETHER, FEW = 4, 2
"""How many members a program waits for together: the whole group up to MAX_TOGETHER, else FEW."""

MAX_HELD = 4 << 10
"""Max. words per member to keep several members in registers; otherwise, one at a time."""

SMALLEST = 4 * RENEWED
"""Minimum elements per program, so that it has as many packet pairs as it rewrites per round."""

THREADS = 32  # per warp; several threads reading one pair would not all see it arrive together
NOT_WAITING = 1  # index of the flag that keeps kernels from waiting


class OneShotGroups:
    """One model's one-shot all-reduces: one for each group of ranks that asks for it.

    Args:
        routes: routes between the devices, by device name, for example "cuda:0".
        meet: given a rank and a group, returns once the whole group has called it; needed for
            interpreted kernels.
        timeout_s: how many seconds a kernel waits for a peer.
    """

    def __init__(
        self, devices: Sequence[torch.device], routes: Routes,
        meet: Callable[[int, Group], None] | None = None, timeout_s: float = TIMEOUT_S,
        fallbacks: Fallbacks | None = None,
    ) -> None:  # fmt: skip
        self.devices = tuple(devices)
        self._meet = meet
        self._routes = routes
        self._timeout_s = timeout_s
        self._fallbacks = Fallbacks() if fallbacks is None else fallbacks
        self._lock = threading.Lock()
        self._made: dict[Group, tuple[OneShot, ...]] = {}
        self._flags: dict[int, Tensor] = {}
        self._host: HostTensor | None = None
        self._is_aborted = self._is_hasty = self._is_retired = False

    def one_shot(self, rank: int, group: Group) -> OneShot | None:
        """Return a rank's end in a group; None if the members' kernels cannot reach each other.

        The first member that asks allocates the whole group's memory.

        Raises:
            NotRepeatable: this thread is capturing, and no member has asked before.
        """
        ends = () if self._is_retired else self._made.get(group)
        if ends is None:
            refuse_capture(Sentence("the ranks have not exchanged values before"))
            with self._lock:
                ends = self._made.get(group)
                if ends is None:
                    self._made[group] = ends = self._new(group)
        return ends[group.index(rank)] if ends else None

    @property
    def is_hasty(self) -> bool:
        """Whether kernels skip waiting for now; see `without_waiting`."""
        return self._is_hasty

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Keep kernels from waiting, so that ranks can run one by one; results are then garbage.

        All ranks must launch the same number of kernels.
        """
        self._hasten(is_hasty=True)
        try:
            yield
        finally:
            self._hasten(is_hasty=False)

    def problem(self) -> CommError | None:
        """Return an error if a kernel timed out; it names a rank that was not itself waiting."""
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
        problem = Sentence("did not answer the other devices in time")
        return CommError(rank, problem, str(self.devices[rank]))

    def abort(self) -> None:
        """Make waiting kernels give up soon, and keep later ones from waiting, until `reset`."""
        self._is_aborted = True  # without the lock, since its holder may wait for such a kernel
        if self._host is not None:
            self._host.value.fill_(1)

    def reset(self) -> None:
        """Empty all slots and start over; call only while nothing runs on any of the devices."""
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
        """Free all memory; call only when nothing runs. Safe to call twice."""
        with self._lock:
            self._made.clear()
            self._flags.clear()
            self._host = None

    def retire(self, why: str) -> None:
        """Make `one_shot` return None from now on, so that ranks use other collectives."""
        log.warning("one-shot all-reduces are no longer used: %s", why)
        self._is_retired = True
        ranks = sorted({rank for group in list(self._made) for rank in group})
        self._fallbacks.report("exchange", [str(self.devices[rank]) for rank in ranks], why)

    def n_bytes(self, rank: int) -> int:
        """Return the number of bytes taken on a rank's device."""
        with self._lock:
            own = [end for ends in self._made.values() for end in ends if end.rank == rank]
            flags = self._flags.get(rank)
        return sum(end.n_bytes for end in own) + (0 if flags is None else flags.nbytes)

    def _hasten(self, *, is_hasty: bool) -> None:
        """Set whether kernels skip waiting, after all earlier work and before any later work."""
        with self._lock:
            self._is_hasty = is_hasty
            for rank, flags in self._flags.items():
                finish(self.devices[rank])
                flags[NOT_WAITING].fill_(int(is_hasty))
                finish(self.devices[rank])

    def _new(self, group: Group) -> tuple[OneShot, ...]:
        """Return the members' ends; none if the group's kernels cannot wait for each other."""
        if len(group) == 1:
            return ()
        names = [str(self.devices[rank]) for rank in group]
        why = why_not_together(names, self._routes)
        if len(group) > MAX_MEMBERS:
            why = Sentence("there are more than {n} of them", n=MAX_MEMBERS)
        if not why:
            try:
                with torch.inference_mode(mode=False):
                    return self._connected(group)
            except (EngineError, RuntimeError) as error:
                why = str(error)
        log.warning("ranks %s do not use one-shot all-reduce: %s", group, why)
        self._fallbacks.report("exchange", names, why)
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
            write_to = [slots[seat, b].source if b != seat else 0 for b in range(len(group))]
            read_from = [slots[a, seat].goal if a != seat else 0 for a in range(len(group))]
            own = [slots[a, seat] for a in range(len(group)) if a != seat]
            places = [statuses.address_on(device) + 8 * seat, self._host.address_on(device)]
            table = torch.tensor([*write_to, *read_from, *places], dtype=torch.int64).to(device)
            wait = patience_of(device, self._timeout_s)
            end = End(table, self._flags[rank], own, statuses, wait, most, self._meet)
            ends.append(OneShot(group, seat, device, end))
            finish(device)
        return tuple(ends)

    def _place(self, source: torch.device, goal: torch.device) -> Any:
        return self._routes.between(str(source), str(goal)).stores


class OneShot:
    """One rank's end of a group's one-shot all-reduce.

    All members make the same calls in the same order. In these calls, the host never waits, reads
    device memory, or allocates anything but results.

    Attributes:
        group: ranks, in the order in which values are added.
        seat: this rank's index in the group.
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
        """The kernels' status word: 0, or the round that failed << 32 | the silent seat + 1."""
        return self._end.statuses.value[self.seat]

    @property
    def n_bytes(self) -> int:
        slots = sum(slot.device_bytes for slot in self._end.slots)
        return slots + self._end.table.nbytes + self._words.nbytes

    @property
    def round(self) -> int:
        """The next round's number, read from the device."""
        return int(self._words[0])

    def clear(self, first_round: int) -> None:
        """Empty this end's slots, and continue with round `first_round`."""
        for slot in self._end.slots:
            slot.clear()
        self._words.copy_(torch.tensor([first_round, 0]))
        self._end.statuses.value.zero_()

    def serves(self, n: int) -> bool:
        """Return whether values with n elements can be reduced."""
        return 0 < n <= MAX_ONE_SHOT and -(-n // BLOCK) <= self._end.most_programs

    def all_reduce(self, x: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Return the sum of the members' values; all members get the same bits.

        Args:
            x: this rank's value, F32; None if it has none.
            shape: shape of every member's value.
        """
        n = prod(shape)
        assert self.serves(n), "too many elements for a one-shot all-reduce"
        halves = n > MAX_IN_F32 and not is_checking()
        if not halves and n > MAX_WORDS:
            return self._in_parts(x, shape)
        out = torch.empty(tuple(shape), device=self._device)
        own = out if x is None else _plain(x)
        per = 4 if halves else 2
        size = min(BLOCK, max(SMALLEST, power_of_two(n)))
        self._run(
            one_shot.all_reduce, (-(-n // size),), 2 * size // per, own, out, *self._memory,
            self.seat, n, num_warps=warps_of(size), HALVES=halves,
            HAS_OWN=x is not None, PAIRS=size // per,
        )  # fmt: skip
        return out

    def _in_parts(self, x: Tensor | None, shape: Sequence[int]) -> Tensor:
        n, flat = prod(shape), None if x is None else _plain(x).view(-1)
        parts = [slice(start, min(start + MAX_WORDS, n)) for start in range(0, n, MAX_WORDS)]
        found = [
            self.all_reduce(None if flat is None else flat[part], (part.stop - part.start,))
            for part in parts
        ]
        return torch.cat(found).view(*shape)

    def add_norm(
        self, x: Tensor, addend: Addend, norm: NormLayer | None, x_bytes: int | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Compute `Ops.add_norm` with the sum of the members' partial sums, in one kernel.

        Args:
            addend: its `partial` is this rank's partial sum, or None.
            x_bytes: see `engine.backends.gpu.elementwise.add_norm`.

        Returns:
            None, on all members, if the kernel does not support the arguments.
        """
        own = None if addend.partial is None else _plain(addend.partial)
        n = x.shape[-1]
        halves = x.numel() > MAX_IN_F32 and not is_checking()
        per = 4 if halves else 2
        n_row = x.numel() // n
        if not self.serves(x.numel()) or n_row > self._end.most_programs:
            return None
        has_room = 2 * n_row * -(-n // per) <= SLOT - HEADER
        found = add_norm_launch(x, own, addend, norm, x_bytes, SMALLEST) if has_room else None
        if found is None:
            return None
        n_word = 2 * found.constants.values["SIZE"] // per
        self._run(
            one_shot.add_norm, (n_row,), n_word, *found.arguments, *self._memory,
            self.seat, num_warps=found.num_warps, HALVES=halves,
            HAS_OWN=own is not None, **found.constants.values,
        )  # fmt: skip
        return found.result

    def words(self, own: Tensor) -> Tensor:
        """Gather words (m,), int32, from all members: (n, m) in group order, equal on all."""
        n = own.numel()
        assert 0 < n <= MAX_WORDS, "too many words for one message"
        own = own.contiguous()
        out = torch.empty(len(self.group), n, dtype=torch.int32, device=self._device)
        size = min(BLOCK, max(SMALLEST, power_of_two(n)))
        self._run(
            one_shot.all_words, (-(-n // size),), size, own, out, *self._memory, self.seat, n,
            num_warps=warps_of(size), PAIRS=size // 2,
        )  # fmt: skip
        return out

    @property
    def _memory(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._end.table, self._words, self._end.flags

    def _run(
        self, kernel: Any, grid: tuple[int], n_word: int, *args: Any, **constants: Any
    ) -> None:
        """Launch one kernel; if interpreted, launch it twice, with a meeting in between.

        `n_word` is the number of words per member in a program.
        """
        n_warp = constants["num_warps"]
        assert n_word >= 2 * THREADS * n_warp, "each pair is read by one thread"
        is_far = any(slot.is_far for slot in self._end.slots)
        args = *args, self._end.patience, n_word // 2 // n_warp if is_far else 1
        target, n = target_of(self._device), len(self.group)
        together = 1 if n_word > MAX_HELD else n if n <= MAX_TOGETHER else FEW
        constants |= {"N": n, "TOGETHER": together, "SLOT": SLOT, "ASM": target.has_asm}
        if target.maker != "interpreter" or self._device.type == "meta":
            launch(kernel, grid, *args, PUSH=True, COLLECT=True, **constants)
            return
        meet, rank = self._end.meet, self.rank
        assert meet is not None, "ranks with interpreted kernels have to meet"
        launch(kernel, grid, *args, PUSH=True, COLLECT=False, **constants)
        host_step(lambda: meet(rank, self.group))
        launch(kernel, grid, *args, PUSH=False, COLLECT=True, **constants)


def _plain(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous()
