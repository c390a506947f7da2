"""Collectives of ranks that are processes: the same sums, to the bit, as of ranks that are threads.

Each rank sends what it has to the others, and all add up in rank order. Of large values each rank
adds up a slice and sends it around. Numbers travel in F32, by way of the host's memory.
"""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.distributed.wire import Wire, name_of
from engine.parallel.agreement import check_fit, check_same

if TYPE_CHECKING:
    from engine.forward.communicator import Group
    from engine.forward.ops import FusedAllReduce

MOST_AT_ONCE = 1 << 14
"""Numbers of a value that is sent without asking first who has one."""

LEAST_SLICED = 1 << 16
"""Numbers of a value of which each rank adds up a slice, where there are more than two."""

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)

MOST_DIMS = 6
HAS, DTYPE, CHECK, N_DIM, DIMS = range(5)
"""Words of a header: whether there is a value, its type, a check sum of what must be alike or -1,
and its shape."""


class ProcessCommunicator:
    """A rank that is a process; see `engine.parallel.thread_comm.Communicator`.

    Args:
        device: of this rank; what comes from others is brought there.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self.rank = wire.rank
        self.waited_s = 0.0
        self._device = device
        self._wire = wire

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Sum over the group; every member gets the result, with the same bits.

        Args:
            shape: of all values, where all members tell it.
        """
        if len(group) == 1:
            assert x is not None, "a group of one has nobody else to give a value"
            return x
        held = None if x is None else _on_host(x)
        if shape is not None and prod(shape) <= MOST_AT_ONCE:
            total = _sum(self._shown_at_once(held, group, shape))
        else:
            total = self._large_sum(held, group)
        return total.to(self._device)

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        """Join along the last dimension in rank order, on the first member of the group.

        Args:
            alike: what has the same bits on all ranks of a kind; its check sums are compared.
        """
        if len(group) == 1:
            return x
        first, others = group[0], group[1:]
        held = None if x is None else _on_host(x)
        head = _head(held, alike)
        if self.rank != first:
            parcels = [head] if held is None else [head, held]
            self._swap([(first, parcel) for parcel in parcels], [])
            return None
        heads = {rank: torch.empty_like(head) for rank in others}
        self._swap([], list(heads.items()))
        heads[first] = head
        self._check_sums({rank: int(heads[rank][CHECK]) for rank in group})
        values = {rank: _room(heads[rank]) for rank in group if heads[rank][HAS]}
        check_fit(values, self._name, all_but_last=True)
        self._swap([], [(rank, room) for rank, room in values.items() if rank != first])
        if held is not None:
            values[first] = held
        return torch.cat(list(values.values()), dim=-1).to(self._device)

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """The tensor of rank `source`, on every member of the group; `shape` as in `all_reduce`."""
        others = [rank for rank in group if rank != source]
        if self.rank == source:
            assert x is not None, "the source must have a value"
            held = _on_host(x)
            parcels = [held] if shape is not None else [_head(held), held]
            self._swap([(rank, parcel) for rank in others for parcel in parcels], [])
            return x
        if shape is None:
            head = _head(None)
            self._swap([], [(source, head)])
            room = _room(head)
        else:
            room = torch.empty(tuple(shape))
        self._swap([], [(source, room)])
        return room.to(self._device)

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        """No kernel reaches the memory of another process."""
        return None

    def _shown_at_once(
        self, held: Tensor | None, group: Group, shape: Sequence[int]
    ) -> list[Tensor]:
        """The values of those that have one, in rank order: a word before each says so."""
        n = prod(shape)
        mine = torch.zeros(1 + n)
        if held is not None:
            assert held.dtype is torch.float32, "others count on it"
            assert tuple(held.shape) == tuple(shape), "that is no summand"
            mine[0] = 1
            mine[1:] = held.view(-1)
        shown = {rank: mine if rank == self.rank else torch.empty(1 + n) for rank in group}
        self._exchange(mine, shown)
        return [x[1:].view(*shape) for x in shown.values() if x[0]]

    def _large_sum(self, held: Tensor | None, group: Group) -> Tensor:
        head = _head(held)
        heads = {rank: head if rank == self.rank else torch.empty_like(head) for rank in group}
        self._exchange(head, heads)
        values = {
            rank: held if rank == self.rank and held is not None else _room(heads[rank])
            for rank in group
            if heads[rank][HAS]
        }
        assert values, "no rank of the group had a value"
        check_fit(values, self._name)
        n = next(iter(values.values())).numel()
        if len(group) > 2 and len(values) > 1 and n >= LEAST_SLICED:
            return self._sliced_sum(held, group, values)
        others = [] if held is None else [rank for rank in group if rank != self.rank]
        self._swap(
            [(rank, held) for rank in others if held is not None],
            [(rank, x) for rank, x in values.items() if rank != self.rank],
        )
        return _sum(values.values())

    def _sliced_sum(
        self, held: Tensor | None, group: Group, values: Mapping[int, Tensor]
    ) -> Tensor:
        """Each member adds up one slice of all values, and sends the sum to the others."""
        total = torch.empty_like(next(iter(values.values())))
        n, size, flat = total.numel(), len(group), total.view(-1)
        cut = {rank: slice(n * i // size, n * (i + 1) // size) for i, rank in enumerate(group)}
        others = [rank for rank in group if rank != self.rank]
        mine = {rank: x.view(-1)[cut[self.rank]] for rank, x in values.items()}
        self._swap(
            [] if held is None else [(rank, held.view(-1)[cut[rank]]) for rank in others],
            [(rank, x) for rank, x in mine.items() if rank != self.rank],
        )
        summed = flat[cut[self.rank]].copy_(_sum(mine.values()))
        self._swap(
            [(rank, summed) for rank in others], [(rank, flat[cut[rank]]) for rank in others]
        )
        return total

    def _exchange(self, mine: Tensor, shown: Mapping[int, Tensor]) -> None:
        """Send the same to all others and receive theirs."""
        others = [rank for rank in shown if rank != self.rank]
        self._swap([(rank, mine) for rank in others], [(rank, shown[rank]) for rank in others])

    def _swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> None:
        begun = time.perf_counter()
        self._wire.swap(out, into)
        self.waited_s += time.perf_counter() - begun

    def _check_sums(self, sums: Mapping[int, int]) -> None:
        """Compare those of ranks that compute with the same bits."""
        of_kind: dict[str, dict[int, int]] = defaultdict(dict)
        for rank, number in sums.items():
            if number >= 0:
                of_kind[self._wire.peers[rank].kind][rank] = number
        for alike in of_kind.values():
            check_same(alike, self._name)

    def _name(self, rank: int) -> str:
        return name_of(self._wire, rank)


def _on_host(x: Tensor) -> Tensor:
    return x.detach().to("cpu").contiguous()


def _sum(values: Iterable[Tensor]) -> Tensor:
    first, *others = values
    return sum(others, start=first)


def _head(x: Tensor | None, alike: Tensor | None = None) -> Tensor:
    """The header of a value, int64."""
    head = torch.zeros(DIMS + MOST_DIMS, dtype=torch.int64)
    head[CHECK] = -1 if alike is None else zlib.crc32(_on_host(alike).numpy().tobytes())
    if x is not None:
        head[HAS], head[DTYPE], head[N_DIM] = 1, DTYPES.index(x.dtype), x.dim()
        head[DIMS : DIMS + x.dim()] = torch.tensor(x.shape)
    return head


def _room(head: Tensor) -> Tensor:
    """Memory for the value that a header tells of."""
    shape = head[DIMS : DIMS + int(head[N_DIM])].tolist()
    return torch.empty(shape, dtype=DTYPES[int(head[DTYPE])])
