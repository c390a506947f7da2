"""All-reduce and broadcast of large values with copies: copy engines work while kernels compute.

A value is split into rounds of `ROUND_BYTES`, each with one or two *stages*. In a stage every rank
writes its value into its own buffer (rounded to the wire's type on all ranks) and copies it to
pinned host memory, in chunks, for readers that cannot read the buffer itself. Then the ranks'
threads meet and tell each other where the data is and after which events it is complete. No thread
waits for a device: reads are enqueued in streams that wait for the events. The model computes in
another stream, so it may compute something else in parallel.

- Two ranks read each other's whole values and add them in rank order, in one stage.
- With three or more ranks, rank i adds slice i of all values, rounds the sum to the wire's type
  and offers it; every rank, including rank i, takes the rounded sums (reduce-scatter and
  all-gather), in two stages. Each rank receives 2 (n - 1) / n values instead of n - 1.

There are two sets of buffers, used alternately. At the next meeting, a rank announces the events
after which it has finished reading a set; the owner waits for all other ranks' events before it
reuses the set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.backends.gpu.comm.streams import DeviceEvent, Queues
from engine.hardware.devices.topology import Place
from engine.hardware.host_memory import HostTensor
from engine.model.forward.batch import MAX_COPIED_WHOLE
from engine.planning.memory import GATHER_BYTES, LINK_SETS, shown_bytes
from engine.planning.memory import LINK_ROUND_BYTES as ROUND_BYTES

MIN_CHUNK, MAX_CHUNK = 512 << 10, 2 << 20
"""Bytes per chunk: enough for a link's full speed, but so few that copies to and from the host
overlap."""

SMALL_BYTES = 4 * MAX_COPIED_WHOLE  # largest value, in F32 bytes, that is sent whole and unrounded

Span = tuple[int, int]
"""A chunk's first element, and the one after its last."""


class HostChunk(NamedTuple):
    """Elements `start` to `stop` of an offer; they are in host memory after event `sent`."""

    start: int
    stop: int
    sent: DeviceEvent


class Freed(NamedTuple):
    """A set of a stage's buffers, which a member no longer reads after all `events`."""

    stage: int
    number: int
    events: tuple[DeviceEvent, ...]


@dataclass(slots=True)
class Offer:
    """What a member offers the others at a meeting.

    Attributes:
        wire: the member's value for this stage, on its device; None if it has none.
        ready: event after which `wire` is complete.
        host: copy of `wire` in host memory, complete in `parts`.
        is_pinned: whether devices read `host` directly.
        parts: chunks of `host` that are sent.
        freed: the others' buffers that this member has read since the last meeting.
    """

    wire: Tensor | None = None
    ready: DeviceEvent | None = None
    host: Tensor | None = None
    is_pinned: bool = True
    parts: Sequence[HostChunk] = ()
    freed: Freed | None = None


Meet = Callable[[Offer], Sequence[Offer]]
"""Function that exchanges offers with all members and returns all offers in rank order."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place in a group.

    Attributes:
        number: the member's index in the group.
        goals: for each member, where that member reads this member's values.
        sources: for each member, where this member reads that member's values.
        until: waits for events on the host; needed only if memory could not be pinned.
    """

    number: int
    goals: Sequence[Place]
    sources: Sequence[Place]
    meet: Meet
    until: Callable[[Sequence[DeviceEvent]], None]

    @property
    def n(self) -> int:
        return len(self.goals)


class _Buffers:
    """One set of a member's buffers for one stage.

    Attributes:
        wire: the member's value, on its device.
        host: copy of `wire` in host memory; None if no member reads `wire` from there.
        inbox: other members' values that arrive by copies; None if there are none.
        read: events after which the others have read this member's last value.
        used: event after which the member has used the inbox.
    """

    def __init__(self, queues: Queues, seat: Seat, stage: int) -> None:
        others = [n for n in range(seat.n) if n != seat.number]
        n_bytes = shown_bytes(stage, seat.n)
        has_inbox = any(seat.sources[n] != "device" for n in others)
        has_host = any(seat.goals[n] == "host" for n in others)
        self.wire = queues.empty(n_bytes)
        self.inbox = queues.empty(ROUND_BYTES) if has_inbox else None
        self.host = queues.pinned(n_bytes) if has_host else None
        self.read: list[DeviceEvent] = []
        self.used = queues.compute.record()  # by the memory's previous user


class CopyCollectives:
    """One group member's all-reduce and broadcast with copies; used only by that member's thread.

    All members make the same calls, for values of the same shape and type.
    """

    def __init__(self, queues: Queues, seat: Seat) -> None:
        self._queues = queues
        self._seat = seat
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        self._counts = [0, 0]
        self._freed: Freed | None = None
        self._sum: Tensor | None = None

    def values(self, x: Tensor | None) -> list[Tensor | None]:
        """Return all members' values; only their shapes and types may be read."""
        return [offer.wire for offer in self._met(Offer(x))]

    def all_reduce(self, x: Tensor | None, out: Tensor, *, is_exact: bool = False) -> DeviceEvent:
        """Sum the members' values in rank order.

        Args:
            x: this member's contiguous value, or None; at least one member has a value.
            out: memory for the sum, with the values' shape.
            is_exact: whether even large values are sent in F32.

        Returns:
            The event after which the sum is complete. The caller keeps both tensors until the
            stream in which they were allocated waits for that event.
        """
        self._begin()
        wire = torch.bfloat16 if is_rounded(out) and not is_exact else out.dtype
        is_whole = out.nbytes <= SMALL_BYTES or self._seat.n == 2
        given, total = None if x is None else x.view(-1), out.view(-1)
        for span in self._rounds(out.numel(), wire, is_whole=is_whole):
            mine, goal = None if given is None else given[span], total[span]
            if is_whole:
                self._read_whole(mine, goal, wire)
            else:
                self._read_slices(mine, goal, wire)
        return self._queues.sums.record()

    def broadcast(self, x: Tensor | None, out: Tensor | None) -> DeviceEvent:
        """Send one member's value to all others, bit for bit; return an event as `all_reduce` does.

        Args:
            x: the contiguous value, on the member that has it.
            out: memory for the value, on the other members.
        """
        self._begin()
        flat = _either(x, out).view(-1)
        for span in self._rounds(flat.numel(), flat.dtype, is_whole=True):
            if out is None:
                self._read_whole(flat[span], None, flat.dtype)
            else:
                self._read_whole(None, flat[span], flat.dtype)
        return self._queues.sums.record()

    def _begin(self) -> None:
        self._queues.sums.wait(self._queues.compute.record())

    def _rounds(self, n: int, wire: torch.dtype, *, is_whole: bool) -> Iterator[slice]:
        """Yield each round's slice of elements; the other members' parts fit into the inbox."""
        n_bytes = ROUND_BYTES // (self._seat.n - 1 if is_whole else 1)
        most = n_bytes // wire.itemsize
        return (slice(start, min(start + most, n)) for start in range(0, n, most))

    def _read_whole(self, given: Tensor | None, out: Tensor | None, wire: torch.dtype) -> None:
        n, whole = self._seat.n, slice(0, len(_either(given, out)))

        def use(values: Sequence[Tensor]) -> None:
            if out is not None:
                add(values, out)

        self._stage(0, given, [whole] * n, [whole] * n, wire, use)

    def _read_slices(self, given: Tensor | None, out: Tensor, wire: torch.dtype) -> None:
        """Do a round of two stages, in which each member sums one slice for all members."""
        n, mine, size = self._seat.n, self._seat.number, len(out)
        slices = [slice(size * k // n, size * (k + 1) // n) for k in range(n)]
        whole = [slice(0, part.stop - part.start) for part in slices]
        total = self._total(out.dtype)[: whole[mine].stop]
        self._stage(0, given, slices, [slices[mine]] * n, wire, lambda found: add(found, total))

        def place(sums: Sequence[Tensor]) -> None:
            for part, value in zip(slices, sums, strict=True):
                out[part].copy_(value)

        self._stage(1, total, [whole[mine]] * n, whole, wire, place)

    def _total(self, dtype: torch.dtype) -> Tensor:
        if self._sum is None:
            self._sum = self._queues.empty(2 * shown_bytes(1, self._seat.n))
        return self._sum.view(dtype)

    def _stage(
        self, stage: int, given: Tensor | None, shown: Sequence[slice], wanted: Sequence[slice],
        wire: torch.dtype, use: Callable[[Sequence[Tensor]], None],
    ) -> None:  # fmt: skip
        """Offer a value to the others, and compute with theirs.

        Args:
            stage: the stage's index in its round.
            given: this member's value; None if it has none.
            shown: for each member, the part of `given` that the member reads.
            wanted: for each member, the part of its value that this member reads.
            wire: the type in which values are sent.
            use: called with the parts read, in rank order, omitting members that have none.
        """
        number = self._counts[stage] % LINK_SETS
        self._counts[stage] += 1
        if (stage, number) not in self._buffers:
            self._buffers[stage, number] = _Buffers(self._queues, self._seat, stage)
        buffers = self._buffers[stage, number]
        offer = Offer() if given is None else self._offer(buffers, given, shown, wire)
        self._freed = Freed(stage, number, self._read(buffers, self._met(offer), wanted, wire, use))

    def _offer(
        self, buffers: _Buffers, given: Tensor, shown: Sequence[slice], wire: torch.dtype
    ) -> Offer:
        sums, up, seat = self._queues.sums, self._queues.up, self._seat
        held = buffers.wire.view(wire)[: len(given)]
        for event in buffers.read:  # from all readers, including those that read the host's copy
            sums.wait(event)
        buffers.read.clear()
        sums.run(lambda: held.copy_(given))
        offer = Offer(held, ready := sums.record())
        readers = [n for n in _turns(seat, 1) if seat.goals[n] == "host"]
        if not readers:
            return offer
        assert buffers.host is not None, "there is a reader of the host's memory"
        offer.host = buffers.host.value.view(wire)[: len(given)]
        offer.is_pinned = buffers.host.is_pinned
        up.wait(ready)
        parts = dict.fromkeys(part for n in readers for part in _chunks(shown[n], held))
        offer.parts = [self._sent(offer, part) for part in parts]
        return offer

    def _sent(self, offer: Offer, part: Span) -> HostChunk:
        assert offer.host is not None
        assert offer.wire is not None
        self._queues.up.copy(offer.host[slice(*part)], offer.wire[slice(*part)])
        return HostChunk(*part, self._queues.up.record())

    def _read(
        self, buffers: _Buffers, offers: Sequence[Offer], wanted: Sequence[slice],
        wire: torch.dtype, use: Callable[[Sequence[Tensor]], None],
    ) -> tuple[DeviceEvent, ...]:  # fmt: skip
        """Fetch the wanted part of every offer, and compute with the parts.

        Returns:
            Events after which the offers' memory is no longer read.
        """
        sums, down, seat = self._queues.sums, self._queues.down, self._seat
        found: dict[int, Tensor] = {}
        free = None if buffers.inbox is None else buffers.inbox.view(wire)
        is_read = is_copied = False
        for n in (*_turns(seat, -1), seat.number):
            offer, part = offers[n], wanted[n]
            if offer.wire is None:
                continue
            if n == seat.number:
                found[n] = offer.wire[part]
            elif seat.sources[n] == "device":
                assert offer.ready is not None
                sums.wait(offer.ready)
                found[n], is_read = offer.wire[part], True
            else:
                assert free is not None, "some member's values are copied"
                if not is_copied:
                    down.wait(buffers.used)
                size = part.stop - part.start
                found[n], free, is_copied = free[:size], free[size:], True
                self._fetch(found[n], offer, part, seat.sources[n])
        ends = []
        if is_copied:
            ends.append(down.record())
            sums.wait(ends[0])
        sums.run(lambda: use([found[n] for n in sorted(found)]))
        buffers.used = sums.record()
        return (*ends, buffers.used) if is_read else tuple(ends)

    def _fetch(self, goal: Tensor, offer: Offer, part: slice, place: Place) -> None:
        down = self._queues.down
        if place == "peer":
            assert offer.wire is not None
            assert offer.ready is not None
            down.wait(offer.ready)
            down.copy(goal, offer.wire[part])
            return
        assert offer.host is not None
        for start, stop, sent in offer.parts:
            if part.start <= start and stop <= part.stop:
                if not offer.is_pinned:  # the driver reads pageable memory immediately
                    self._seat.until([sent])
                down.wait(sent)
                down.copy(goal[start - part.start : stop - part.start], offer.host[start:stop])

    def _met(self, offer: Offer) -> Sequence[Offer]:
        """Meet the others, and note which of this member's buffers they have read."""
        offer.freed, self._freed = self._freed, None
        offers = self._seat.meet(offer)
        for number, other in enumerate(offers):
            if number != self._seat.number and other.freed is not None:
                stage, which, events = other.freed
                self._buffers[stage, which].read.extend(events)
        return offers


def is_rounded(x: Tensor) -> bool:
    """Return whether values like x are normally rounded to BF16 for the wire."""
    return x.dtype == torch.float32 and x.nbytes > SMALL_BYTES


def _turns(seat: Seat, step: int) -> list[int]:
    """Return the other members from the next one on, so that reads follow the order of writes."""
    return [(seat.number + step * k) % seat.n for k in range(1, seat.n)]


def _chunks(part: slice, held: Tensor) -> Iterator[Span]:
    most = min(max(held.nbytes // 4, MIN_CHUNK), MAX_CHUNK) // held.itemsize
    stop = part.stop
    return ((start, min(start + most, stop)) for start in range(part.start, stop, most))


def _either(given: Tensor | None, out: Tensor | None) -> Tensor:
    found = out if given is None else given
    assert found is not None, "a member without a value receives one"
    return found


def add(values: Sequence[Tensor], total: Tensor) -> None:
    """Add values in the given order, in the type of `total`."""
    first, *others = values
    total.copy_(first)
    for value in others:
        total.add_(value)


class GatherSlice(NamedTuple):
    """One member's part of a gather, as shown to the other members.

    Attributes:
        value: the member's slice (rows, width); None if it has none.
        n_alike: number of values that must be equal on all members of one kind; 0 for none.
        kind: kind of device; only devices of the same kind compute the same bits.
    """

    value: Tensor | None
    n_alike: int
    kind: str

    @classmethod
    def of(cls, x: Tensor | None, alike: Tensor | None, kind: str) -> GatherSlice:
        """Return the part for a member with slice x and values to compare."""
        return cls(x, 0 if alike is None else alike.shape[-1], kind)

    @property
    def rows(self) -> int:
        return 0 if self.value is None else self.value.shape[0]

    @property
    def width(self) -> int:
        return 0 if self.value is None else self.value.shape[1]


class GatherBuffer:
    """Host memory for gathering slices of rows and for comparing values between members.

    `n_rows` is the number of rows that fit.
    """

    def __init__(self, slices: Sequence[GatherSlice], device: torch.device) -> None:
        self._widths = [part.width for part in slices]
        self._n_alike = max(part.n_alike for part in slices)
        total = sum(self._widths)
        most = max(1, GATHER_BYTES // (4 * total))
        self.n_rows = min(most, max(part.rows for part in slices))
        self._held = HostTensor((self.n_rows * total,), torch.float32, device)
        shape = (len(slices), max(1, self._n_alike))
        self._alike = HostTensor(shape, torch.float32, device)

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is pinned, so that devices write to it directly."""
        return self._held.is_pinned

    def fits(self, slices: Sequence[GatherSlice]) -> bool:
        """Return whether the buffer can gather these slices as well."""
        rows = min(max(part.rows for part in slices), GATHER_BYTES // (4 * sum(self._widths)))
        return (
            [part.width for part in slices] == self._widths
            and max(part.n_alike for part in slices) <= self._n_alike
            and rows <= self.n_rows
        )

    def part(self, seat: int, n_rows: int) -> Tensor:
        """Return the memory to which a member writes its first n_rows rows, (n_rows, width)."""
        start = n_rows * sum(self._widths[:seat])
        width = self._widths[seat]
        return self._held.value[start : start + n_rows * width].view(n_rows, width)

    def whole(self, n_rows: int) -> Tensor:
        """Return the first n_rows rows, gathered from all members."""
        if n_rows == 1:
            return self._held.value[: sum(self._widths)].view(1, -1)
        return torch.cat([self.part(seat, n_rows) for seat in range(len(self._widths))], dim=-1)

    def alike(self, seat: int) -> Tensor:
        """Return the memory for a member's values to compare with the others'."""
        return self._alike.value[seat, : self._n_alike]
