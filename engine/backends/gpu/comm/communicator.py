"""Communicator for ranks that are all on GPUs: no host waits for a device in a collective.

Small values are summed by kernels (`one_shot`), large ones with copies (`copies`) or NCCL. The
model's next work is enqueued immediately, ordered after the result's arrival in the stream. Only
logits are waited for, by the rank that passes them to the host.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from engine.backends.cpu.thread_comm import ThreadGroup
from engine.backends.gpu.comm.copies import (
    CopyCollectives,
    GatherBuffer,
    GatherSlice,
    Seat,
    is_rounded,
)
from engine.backends.gpu.comm.nccl import N_RANKS, Nccl, NcclSums, prove
from engine.backends.gpu.comm.one_shot import OneShotGroups
from engine.backends.gpu.comm.streams import WAKING_S, DeviceEvent, Marks, Queues, queues_of
from engine.backends.gpu.launch.graph import host_step_value
from engine.errors import EngineError, LeftAlone
from engine.hardware.faults import call_all
from engine.hardware.torch_devices import kind_of
from engine.model.forward.attention import is_checking
from engine.model.forward.batch import MAX_IN_F32
from engine.parallel.transfers import check_alike, check_fit

if TYPE_CHECKING:
    from engine.backends.gpu.comm.one_shot import OneShot
    from engine.hardware.devices.topology import Routes
    from engine.hardware.fallbacks import Fallbacks
    from engine.model.forward.communicator import Group
    from engine.parallel.batch_overlap import BatchOverlap

log = logging.getLogger(__name__)

T = TypeVar("T")

_abandoned: list[object] = []  # memory that hung devices may still use


class DeviceGroup(ThreadGroup):
    """State shared by the communicators of one model's ranks, all on GPUs.

    Args:
        devices: each rank's device; the CPU stands for a GPU with interpreted kernels.
        nccl: NCCL for two ranks' large values, if it is used.
        queues: creates a rank's queues on a device.

    Attributes:
        one_shots: the model's one-shot all-reduces.
        marks: the devices' progress.
        notes: notes on the routes for the user, as sentences.
    """

    def __init__(
        self, devices: Sequence[torch.device], routes: Routes, nccl: Nccl | None = None,
        queues: Callable[[torch.device], Queues] = queues_of, fallbacks: Fallbacks | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.devices = tuple(devices)
        self.one_shots = OneShotGroups(
            devices, routes, lambda rank, group: self._pass(rank, group), fallbacks=fallbacks
        )
        self.marks = Marks([str(device) for device in devices])
        self._routes = routes
        self.notes = routes.notes
        self._make_queues = queues
        self._queues: dict[int, Queues] = {}
        self._copying: dict[tuple[int, Group], CopyCollectives] = {}
        self._nccl = nccl
        self._nccl_sums: dict[int, NcclSums] = {}
        self._gather_buffers: dict[tuple[Group, bool], GatherBuffer] = {}
        self._making = threading.Lock()

    def communicator(self, rank: int, device: torch.device) -> DeviceCommunicator:
        self.join(rank, device)
        return DeviceCommunicator(self, rank)

    def is_alive(self, rank: int) -> bool | None:
        """Return whether a rank's device has made progress; see `Marks.has_moved`."""
        return self.marks.has_moved(rank)

    def queues(self, rank: int) -> Queues:
        """Return a rank's queues, created on first use."""
        found = self._queues.get(rank)
        if found is None:
            found = self._queues[rank] = self._make_queues(self.devices[rank])
        return found

    def copying(self, rank: int, group: Group) -> CopyCollectives:
        """Return a rank's copy-based collectives in a group."""
        found = self._copying.get((rank, group))
        if found is None:
            found = CopyCollectives(self.queues(rank), self._seat(rank, group))
            self._copying[rank, group] = found
        return found

    def _seat(self, rank: int, group: Group) -> Seat:
        names = [str(self.devices[member]) for member in group]
        mine = str(self.devices[rank])
        return Seat(
            number=group.index(rank),
            goals=[self._routes.between(mine, name).copies for name in names],
            sources=[self._routes.between(name, mine).copies for name in names],
            meet=lambda offer: self.meet(rank, group, offer),
            until=self.marks.until,
        )

    def nccl(self, rank: int, group: Group) -> NcclSums | None:
        """Return a rank's NCCL all-reduce; return None, on all members, if NCCL is not used."""
        if self._nccl is None or not self._nccl.works or len(group) != N_RANKS:
            return None
        found = self._nccl_sums.get(rank)
        if found is None:
            found = NcclSums(
                self._nccl, self.queues(rank), group.index(rank), lambda: self._pass(rank, group)
            )
            self._nccl_sums[rank] = found
        return found

    def gather_buffer(self, group: Group, slices: Sequence[GatherSlice]) -> GatherBuffer:
        """Return the buffer for gathering slices; all members get the same one."""
        with self._making:
            key = group, max(part.rows for part in slices) == 1
            found = self._gather_buffers.get(key)
            if found is None or not found.fits(slices):
                found = self._gather_buffers[key] = GatherBuffer(slices, self.devices[group[0]])
            return found

    def pinned_row(self, group: Group) -> GatherBuffer | None:
        """Return the buffer from earlier gathers of single rows, if it is pinned."""
        found = self._gather_buffers.get((group, True))
        return found if found is not None and found.is_pinned else None

    def meet(self, rank: int, group: Group, value: T) -> list[T]:
        """Exchange values with all members of a group; return them in rank order.

        Raises:
            LeftAlone: a member did not arrive.
        """
        shown: Any = value
        try:
            found: Any = self.barrier(group).exchange(group.index(rank), shown)[0]
        except threading.BrokenBarrierError:
            raise LeftAlone(rank, self.device(rank)) from None
        return list(found)

    def _pass(self, rank: int, group: Group) -> None:
        self.meet(rank, group, None)

    def abort(self) -> None:
        super().abort()
        self.one_shots.abort()

    def close(self) -> None:
        made = self._copying, self._nccl_sums, self._gather_buffers, self._queues
        call_all(super().close, self.one_shots.close, *(some.clear for some in made))

    def abort_for_good(self) -> None:
        super().abort_for_good()
        _abandoned.append((self.one_shots, self._copying, self._nccl_sums, self._gather_buffers))

    def settle(self) -> None:
        was_aborted = self._is_aborted
        super().settle()
        if was_aborted and not self._is_aborted:
            self._recover()

    def _recover(self) -> None:
        """Wait for the devices after ranks were interrupted, and drop unfinished work.

        If a device does not finish, the memory in use is kept, and the ranks count as lost.
        """
        queues = [queue for queues in self._queues.values() for queue in queues.all()]
        try:
            self.marks.until([queue.record() for queue in queues], WAKING_S)
            self.one_shots.reset()
        except (EngineError, RuntimeError) as error:  # the interrupted rank reports the failure
            log.warning("%s", error)
            self.abort_for_good()
            return
        self.marks.forget()
        self._copying.clear()
        if self._nccl is not None:
            self._nccl.forget()


class DeviceCommunicator:
    """Communicator for a rank on a GPU whose peers are all on GPUs.

    `overlap` lets the rank's other micro-batch compute during a large all-reduce.
    """

    def __init__(self, shared: DeviceGroup, rank: int) -> None:
        self.rank = rank
        self._shared = shared
        self._device = shared.devices[rank]
        self.overlap: BatchOverlap | None = None

    @property
    def waited_s(self) -> float:
        """Seconds for which the rank has waited in collectives."""
        return self._shared.waited_s(self.rank)

    def one_shot(self, group: Group, n: int) -> OneShot | None:
        """Return the one-shot all-reduce for values with n elements.

        Return None, on all members, if copies are used instead.
        """
        if len(group) == 1:
            return None
        one_shot = self._shared.one_shots.one_shot(self.rank, group)
        return one_shot if one_shot is not None and one_shot.serves(n) else None

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """See `Communicator.all_reduce`; either all members pass `shape`, or none does.

        If none does, they exchange the shapes.
        """
        self._shared.collectives.count += 1
        if len(group) == 1:
            assert x is not None, "the only member must have a value"
            self._mark()
            return x
        assert x is None or shape is None or x.shape == tuple(shape), "not a partial sum"
        one_shot = None if shape is None else self.one_shot(group, prod(shape))
        if one_shot is not None and shape is not None:
            self._mark()
            return one_shot.all_reduce(x, shape)
        is_exact = is_checking()
        return _made(lambda: self._sum(x, group, shape, is_exact=is_exact))

    def _sum(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None, *, is_exact: bool
    ) -> Tensor:
        """All-reduce with NCCL or copies; always in F32 if the sum must be exact."""
        self._mark()
        x = None if x is None else x.contiguous()  # kept until it has been read
        copying = self._shared.copying(self.rank, group)
        dtype = torch.float32
        if shape is None:
            like = self._like(copying, x, group)
            shape, dtype = like.shape, like.dtype
        out = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        nccl = self._shared.nccl(self.rank, group) if is_rounded(out) and not is_exact else None
        done = None if nccl is None else nccl.all_reduce(x, out)
        done = done or copying.all_reduce(x, out, is_exact=is_exact)
        if self.overlap is not None:
            self.overlap.switch()
        self._continue_after(done)
        return out

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """See `Communicator.broadcast`; for `shape`, see `all_reduce`."""
        self._shared.collectives.count += 1
        given = x if self.rank == source else None
        if len(group) == 1:
            assert given is not None, "the source must have a value"
            return given
        one_shot = None if shape is None else self.one_shot(group, prod(shape))
        if one_shot is not None and shape is not None and prod(shape) <= MAX_IN_F32:
            return one_shot.all_reduce(given, shape)
        return _made(lambda: self._sent(given, group))

    def _sent(self, x: Tensor | None, group: Group) -> Tensor:
        """Broadcast with copies; x is None on all members except the source."""
        self._mark()
        copying = self._shared.copying(self.rank, group)
        like = self._like(copying, x, group)
        if x is not None:
            given = x.contiguous()  # kept until it has been read
            self._continue_after(copying.broadcast(given, None))
            return x
        out = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        self._continue_after(copying.broadcast(None, out))
        return out

    def _like(self, copying: CopyCollectives, x: Tensor | None, group: Group) -> Tensor:
        """Return the first value, after checking that all members agree in shape and type."""
        found = zip(group, copying.values(x), strict=True)
        values = {rank: value for rank, value in found if value is not None}
        assert values, "no rank of the group had a value"
        check_fit(values, self._shared.device)
        return next(iter(values.values()))

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        """See `Communicator.gather`; the result is in host memory.

        Slices are copied directly to the host, not over links between GPUs. The host waits here for
        all members' slices, except in a capture; there, the result is complete once all members'
        streams have been waited for.
        """
        self._shared.collectives.count += 1
        if len(group) == 1:
            return x
        row = self._shared.pinned_row(group) if _is_capturing(self._device) else None
        if row is None:
            return host_step_value(lambda: self._gathered(x, group, alike))
        if x is not None:
            self._compute.copy(row.part(group.index(self.rank), 1), x.contiguous())
        return row.whole(1) if self.rank == group[0] else None

    def _gathered(self, x: Tensor | None, group: Group, alike: Tensor | None) -> Tensor | None:
        self._mark()
        shared, rank, seat = self._shared, self.rank, group.index(self.rank)
        slices = shared.meet(rank, group, GatherSlice.of(x, alike, kind_of(self._device)))
        values = {r: s.value for r, s in zip(group, slices, strict=True) if s.value is not None}
        check_fit(values, shared.device, all_but_last=True)
        buffer = shared.gather_buffer(group, slices)
        if alike is not None:
            self._compute.copy(buffer.alike(seat), alike[-1].contiguous())
        found = []
        n_rows = next(iter(values.values())).shape[0]
        for start in range(0, n_rows, buffer.n_rows):
            stop = min(start + buffer.n_rows, n_rows)
            if x is not None:
                self._compute.copy(buffer.part(seat, stop - start), x[start:stop].contiguous())
            events = shared.meet(rank, group, self._compute.record())
            if seat == 0:
                shared.marks.until(events)
                found.append(buffer.whole(stop - start).clone())
            if stop < n_rows:
                shared.meet(rank, group, None)  # the others may write again
        if seat:
            return None
        self._check(buffer, group, slices)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _check(self, buffer: GatherBuffer, group: Group, slices: Sequence[GatherSlice]) -> None:
        """Raise a CommError if devices of the same kind have computed different values."""
        if self._shared.one_shots.is_hasty:  # sums are incomplete
            return
        for kind in {part.kind for part in slices}:
            rows = {
                rank: buffer.alike(seat)
                for seat, (rank, part) in enumerate(zip(group, slices, strict=True))
                if part.kind == kind and part.n_alike
            }
            if len(rows) > 1:
                check_alike(rows, self._shared.device)

    @property
    def _compute(self) -> Any:
        return self._shared.queues(self.rank).compute

    def _continue_after(self, event: DeviceEvent) -> None:
        self._compute.wait(event)

    def _mark(self) -> None:
        """Record an event after all work so far, unless this thread is capturing."""
        if self._device.type == "cuda" and not _is_capturing(self._device):
            self._shared.marks.leave(self.rank, self._compute.record())


def device_group(
    devices: Sequence[torch.device], routes: Routes, fallbacks: Fallbacks
) -> DeviceGroup:
    """Return the shared state for a model's ranks, with NCCL if it works and is worthwhile.

    `devices` has each rank's device, including the CPU for ranks that have no part of the model.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    is_nccl = routes.has_nccl and len(gpus) == N_RANKS == len(set(gpus))
    nccl = prove(gpus, fallbacks) if is_nccl else None
    return DeviceGroup(devices, routes, nccl, fallbacks=fallbacks)


def _made(collective: Callable[[], Tensor]) -> Tensor:
    """Run a collective on the hosts, between graphs if a token is being captured."""
    found = host_step_value(collective)
    assert found is not None, "all members of a group get a value"
    return found


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
