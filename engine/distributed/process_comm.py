"""Collectives between ranks that are processes, with the same bits as between threads.

Each rank sends its value to the others, and all add in rank order. For large values, each rank adds
up one slice and sends the result to the others. Values are sent from host memory in their own type.
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
from engine.parallel.transfers import check_fit, check_same

if TYPE_CHECKING:
    from engine.model.forward.communicator import FusedAllReduce, Group

MAX_AT_ONCE = 1 << 14
"""Largest number of elements to send without first asking which ranks have a value."""

MIN_SLICED = 1 << 16
"""Smallest number of elements that three or more ranks add up in slices."""

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)
"""Types that a header can give, by index."""

MAX_DIMS = 6
"""Largest number of dimensions that a value may have."""

HAS, DTYPE, CHECK, N_DIM, DIMS = range(5)
"""Indices of a header's words: whether there is a value, its type, a checksum of the tensor to
compare (-1 for none), the value's number of dimensions, and the first word of its shape."""


class ProcessCommunicator:
    """Communicator for a rank that is a process; see `forward.communicator.Communicator`.

    Args:
        wire: connections to the other ranks.
        device: this rank's device, to which results are copied.
        tag: channel for its tensors; see `Wire.swap`.
    """

    def __init__(self, wire: Wire, device: torch.device, tag: int = 0) -> None:
        self._tag = tag
        self.rank = wire.rank
        self.waited_s = 0.0
        self._device = device
        self._wire = wire

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the sum over the group, with the same bits on every member.

        Args:
            x: this member's partial sum; None if it has none.
            group: members of the group, in rank order.
            shape: shape of all values, if every member knows it.
        """
        if len(group) == 1:
            assert x is not None, "the only member of a group has a value"
            return x
        held = None if x is None else _on_host(x)
        if shape is not None and prod(shape) <= MAX_AT_ONCE:
            total = _sum(self._shown_at_once(held, group, shape))
        else:
            total = self._large_sum(held, group)
        return total.to(self._device)

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        """Join the members' values along the last dimension, in rank order.

        Args:
            x: this member's value; None if it has none.
            group: members of the group, in rank order.
            alike: tensor with the same bits on all ranks of the same kind; checksums are compared.

        Returns:
            The joined tensor on the group's first member; None on the others.
        """
        if len(group) == 1:
            return x
        first, others = group[0], group[1:]
        held = None if x is None else _on_host(x)
        head = _header(held, alike)
        if self.rank != first:
            parcels = [head] if held is None else [head, held]
            self._swap([(first, parcel) for parcel in parcels], [])
            return None
        heads = {rank: torch.empty_like(head) for rank in others}
        self._swap([], list(heads.items()))
        heads[first] = head
        self._check_sums({rank: int(heads[rank][CHECK]) for rank in group})
        values = {rank: _empty_for(heads[rank]) for rank in group if heads[rank][HAS]}
        check_fit(values, self._name, all_but_last=True)
        self._swap([], [(rank, room) for rank, room in values.items() if rank != first])
        if held is not None:
            values[first] = held
        return torch.cat(list(values.values()), dim=-1).to(self._device)

    def collect(
        self, x: Tensor | None, sources: Group, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """Join values of one known shape along the last dimension, on rank 0.

        Rank 0 starts to receive them immediately, so that they arrive after one latency.

        Args:
            x: this rank's value; None if it is not among the sources.
            sources: ranks that have a value, in rank order.
        """
        if self.rank:
            if x is not None:
                self._swap([(0, _on_host(x))], [])
            return None
        rooms = {rank: torch.empty(tuple(shape), dtype=dtype) for rank in sources if rank}
        self._swap([], list(rooms.items()))
        if x is not None:
            rooms[0] = _on_host(x)
        return torch.cat([rooms[rank] for rank in sources], dim=-1)

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return rank `source`'s tensor on every member; `shape` as in `all_reduce`."""
        others = [rank for rank in group if rank != source]
        if self.rank == source:
            assert x is not None, "the source must have a value"
            held = _on_host(x)
            parcels = [held] if shape is not None else [_header(held), held]
            self._swap([(rank, parcel) for rank in others for parcel in parcels], [])
            return x
        if shape is None:
            head = _header(None)
            self._swap([], [(source, head)])
            room = _empty_for(head)
        else:
            room = torch.empty(tuple(shape))
        self._swap([], [(source, room)])
        return room.to(self._device)

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        """Return None, as no kernel can access another process's memory."""
        return None

    def _shown_at_once(
        self, held: Tensor | None, group: Group, shape: Sequence[int]
    ) -> list[Tensor]:
        """Return the members' values in rank order; a leading word marks those that exist."""
        n = prod(shape)
        mine = torch.zeros(1 + n)
        if held is not None:
            assert held.dtype is torch.float32, "the others expect F32"
            assert tuple(held.shape) == tuple(shape), "not the shape of a partial sum"
            mine[0] = 1
            mine[1:] = held.view(-1)
        shown = {rank: mine if rank == self.rank else torch.empty(1 + n) for rank in group}
        self._exchange(mine, shown)
        return [x[1:].view(*shape) for x in shown.values() if x[0]]

    def _large_sum(self, held: Tensor | None, group: Group) -> Tensor:
        """Return the sum of values that are large or whose shapes some ranks do not know."""
        head = _header(held)
        heads = {rank: head if rank == self.rank else torch.empty_like(head) for rank in group}
        self._exchange(head, heads)
        values = {
            rank: held if rank == self.rank and held is not None else _empty_for(heads[rank])
            for rank in group
            if heads[rank][HAS]
        }
        assert values, "no rank of the group had a value"
        check_fit(values, self._name)
        n = next(iter(values.values())).numel()
        if len(group) > 2 and len(values) > 1 and n >= MIN_SLICED:
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

    def sum_of_several(
        self, values: Sequence[Tensor], group: Group, shape: Sequence[int], most: int
    ) -> Tensor:
        """Return the sum of all members' values, in order.

        Args:
            values: this member's partial sums, if any; at least one member has some.
            shape: shape of each value.
            most: largest number of values on any member.
        """
        assert len(values) <= most, "more values than ranks"
        held = [_on_host(x).view(*shape) for x in values]
        stacked = torch.stack(held) if held else None
        head = _header(stacked)
        heads = {rank: head if rank == self.rank else torch.empty_like(head) for rank in group}
        self._exchange(head, heads)
        found = {rank: _empty_for(heads[rank]) for rank in group if heads[rank][HAS]}
        if stacked is not None:
            found[self.rank] = stacked
        others = [] if stacked is None else [rank for rank in group if rank != self.rank]
        self._swap(
            [(rank, stacked) for rank in others if stacked is not None],
            [(rank, x) for rank, x in found.items() if rank != self.rank],
        )
        return _sum(x for several in found.values() for x in several).to(self._device)

    def _exchange(self, mine: Tensor, shown: Mapping[int, Tensor]) -> None:
        others = [rank for rank in shown if rank != self.rank]
        self._swap([(rank, mine) for rank in others], [(rank, shown[rank]) for rank in others])

    def _swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> None:
        begun = time.perf_counter()
        self._wire.swap(out, into, self._tag)
        self.waited_s += time.perf_counter() - begun

    def _check_sums(self, sums: Mapping[int, int]) -> None:
        """Compare checksums among ranks of the same kind; -1 means none."""
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


def _header(x: Tensor | None, alike: Tensor | None = None) -> Tensor:
    """Return a value's header, int64 (DIMS + MAX_DIMS,)."""
    head = torch.zeros(DIMS + MAX_DIMS, dtype=torch.int64)
    head[CHECK] = -1 if alike is None else zlib.crc32(_on_host(alike).numpy().tobytes())
    if x is not None:
        head[HAS], head[DTYPE], head[N_DIM] = 1, DTYPES.index(x.dtype), x.dim()
        head[DIMS : DIMS + x.dim()] = torch.tensor(x.shape)
    return head


def _empty_for(head: Tensor) -> Tensor:
    shape = head[DIMS : DIMS + int(head[N_DIM])].tolist()
    return torch.empty(shape, dtype=DTYPES[int(head[DTYPE])])
