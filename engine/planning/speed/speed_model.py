"""Tokens per second of a split before anything is loaded, and what limits them; no torch.

A rank's time is that of the roofline (Williams, Waterman and Patterson, CACM 52, 2009): what takes
longer of reading weights and multiplying with them, for each kind of weights, and beside it a fixed
time for each matrix. The ranks of a group wait for the slowest of them before each sum; groups
compute one after the other. Ranks on one device share its memory and its cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.devices.types import CPU
from engine.planning.evaluation.workload import (
    DEQUANTISED,
    BlockWorkload,
    ModelWorkload,
    RankWorkload,
    Weights,
)
from engine.planning.speed.facts import CACHE, DeviceFacts
from engine.planning.speed.machine_links import Links
from engine.planning.speed.prediction import Path, Prediction, RankTime

F32_BYTES = 4
"""Of a number that ranks exchange."""

CANDIDATE_BYTES = 2048
"""What a GPU tells the others of its part of the vocabulary when a token is drawn, at most."""

READY = frozenset({"F32", "F16", "BF16", DEQUANTISED})
"""Kinds of weights that a batch needs not dequantise, or that are read as slowly as that takes."""

FEW_TOKENS = 8
"""So many are multiplied with quantised weights as they are, also where more would not be."""


class _Work(NamedTuple):
    """What a rank does until it meets the others, in seconds.

    Attributes:
        own: with the threads it has, alone on its device.
        whole: with all of the device; a fixed time does not count.
        memory, compute: how `own` divides; what is left is a fixed time.
    """

    own: float
    whole: float
    memory: float
    compute: float


class _Span(NamedTuple):
    """Tokens that are computed at once: `n` of them, after `first` others."""

    n: int
    first: int

    def n_seen(self, window: int) -> float:
        """Positions that they see, each its own included, all together."""
        return _sum_up_to(self.first + self.n, window) - _sum_up_to(self.first, window)

    def n_read(self, window: int) -> int:
        """Positions that at least one of them sees."""
        last = self.first + self.n
        return min(last, window + self.n - 1) if window else last


def _sum_up_to(n: int, window: int) -> float:
    """min(1, window) + min(2, window) + … + min(n, window)."""
    inside = min(n, window) if window else n
    return inside * (inside + 1) / 2 + (n - inside) * window


NOTHING = _Work(0.0, 0.0, 0.0, 0.0)

MOST_KNOWN = 1 << 14
"""Works that are remembered: a split that is dragged has many parts that it had before."""

_Known = dict[tuple[int, int, _Span], tuple[RankWorkload, _Work]]
"""By the load's identity, which is the load's own as long as it is kept here, rank and span."""


class SpeedModel:
    """Predicts for one set of devices; a prediction takes well below a millisecond.

    Args:
        devices: of each rank, in rank order.
        n_threads: of all ranks on the CPU together; None for all that were measured.
    """

    def __init__(
        self, devices: Sequence[DeviceFacts], links: Links, n_threads: int | None = None
    ) -> None:
        self._devices = tuple(devices)
        self._ids = tuple(device.device for device in devices)
        self._links = links
        self._known: _Known = {}
        n_cpu = max(1, self._ids.count(CPU))
        self._threads = [
            max(1, min(n_threads or d.n_threads, d.n_threads) // n_cpu) if d.n_threads else 0
            for d in devices
        ]

    def decode(self, load: ModelWorkload, position: int = 0) -> Prediction:
        """One token after `position` others."""
        return self._pass(load, _Span(1, position), draws=True).prediction(1)

    def prefill(
        self, load: ModelWorkload, n_tokens: int, n_batch: int, position: int = 0
    ) -> Prediction:
        """A prompt in batches after `position` other tokens; each has the logits of its last one.

        Full batches take on average what one in their middle does, since what a token sees grows
        evenly.
        """
        n_full, rest = divmod(n_tokens, n_batch)
        totals = _Totals(self._ids)
        if n_full:
            middle = position + (n_full - 1) * n_batch // 2
            totals.add(self._pass(load, _Span(n_batch, middle)), n_full)
        if rest:
            totals.add(self._pass(load, _Span(rest, position + n_full * n_batch)), 1)
        return totals.prediction(n_tokens)

    def _pass(self, load: ModelWorkload, span: _Span, *, draws: bool = False) -> _Totals:
        """One pass through the model; `draws` where only the next token of it is wanted."""
        run = self._run(span)
        stream = F32_BYTES * load.n_embd
        last = tuple(load.embedding)
        run.compute(BlockWorkload(1, last, load.embedding, 1), stream * span.n)
        for block in load.blocks:
            run.move(last, block.group, stream * span.n)
            run.compute(block, stream * span.n)
            last = block.group
        head = tuple(load.head)
        run.move(last, head, stream)
        ends = self._run(_Span(1, 0))
        ends.compute(BlockWorkload(1, head, load.head, 0), 0.0)
        if draws and CPU not in (self._ids[rank] for rank in head):
            ends.draw(head)
        else:
            ends.gather(head, F32_BYTES * load.n_vocab)
        run.totals.add(ends.totals, 1)
        run.totals.host += max((device.host_s for device in self._devices), default=0.0)
        return run.totals

    def _run(self, span: _Span) -> _Run:
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        return _Run(self._devices, self._ids, self._threads, self._links, span, self._known)


class _Run:
    """Adds up one pass."""

    def __init__(
        self,
        devices: Sequence[DeviceFacts],
        ids: Sequence[str],
        threads: Sequence[int],
        links: Links,
        span: _Span,
        known: _Known,
    ) -> None:
        self.totals = _Totals(ids)
        self._devices = devices
        self._ids = ids
        self._threads = threads
        self._links = links
        self._span = span
        self._known = known

    def compute(self, block: BlockWorkload, n_bytes: float) -> None:
        """Blocks of one kind: everybody waits for the slowest, then they add up `n_bytes`."""
        works = [self._work(rank, block.ranks.get(rank)) for rank in block.group]
        ids = [self._ids[rank] for rank in block.group]
        link = block.n_reduce * self._links.all_reduce_s(ids, n_bytes)
        self.totals.add_block(block, works, shared_seconds(ids, works), link)

    def move(self, before: Sequence[int], after: Sequence[int], n_bytes: float) -> None:
        """The first of one group sends `n_bytes` to another, unless its ranks were in the first."""
        if not before or set(after) <= set(before):
            return
        source = before[0]
        targets = [rank for rank in after if rank != source]
        links = [self._links.between(self._ids[source], self._ids[rank]) for rank in targets]
        seconds = max(link.latency_s for link in links)
        seconds += sum(link.payload_s(n_bytes) for link in links)
        self.totals.add_link({source, *after}, seconds)

    def draw(self, head: Sequence[int]) -> None:
        """A token on GPUs, each of which tells the others the likeliest ones of its own rows."""
        ids = [self._ids[rank] for rank in head]
        self.totals.add_link(set(head), self._links.all_reduce_s(ids, CANDIDATE_BYTES))

    def gather(self, head: Sequence[int], n_bytes: float) -> None:
        """All logits to the first of the head's ranks, and from there to the host."""
        if not head:
            return
        first, *others = head
        links = [self._links.between(self._ids[rank], self._ids[first]) for rank in others]
        part = n_bytes / len(head)
        if self._ids[first] != CPU:
            links.append(self._links.between(self._ids[first], CPU))
        seconds = max((link.latency_s for link in links), default=0.0)
        seconds += sum(link.payload_s(part) for link in links)
        self.totals.add_link(set(head), seconds)

    def _work(self, rank: int, load: RankWorkload | None) -> _Work:
        if load is None:
            return NOTHING
        key = id(load), rank, self._span
        found = self._known.get(key)
        if found is None:
            work = rank_work(self._devices[rank], self._threads[rank], load, self._span)
            found = self._known[key] = load, work
        return found[1]


def rank_work(device: DeviceFacts, n_threads: int, load: RankWorkload, span: _Span) -> _Work:
    """The seconds of some tokens in one block on one device."""
    is_routed = load.batch_bytes > load.read_bytes > 0
    n_times = min(load.batch_bytes / load.read_bytes, span.n) if is_routed else 1.0
    roof = _Roofline(device, n_threads)
    for kind, n_bytes, flop in _kinds(load):
        roof.add(kind, n_times * n_bytes, span.n * flop)
        if span.n > FEW_TOKENS and kind not in READY:
            roof.move_bytes(n_times * flop / 2 * device.unpack_bytes)
    seen, read = span.n_seen(load.window), span.n_read(load.window)
    roof.add(CACHE, read * load.kv_bytes, seen * load.kv_flop)
    fixed = load.n_op * (device.routed_op_s if is_routed else device.op_s)
    return _Work(roof.memory + roof.compute + fixed, roof.whole, roof.memory, roof.compute)


class _Roofline:
    """Adds up what one rank reads and multiplies; of each the longer counts."""

    def __init__(self, device: DeviceFacts, n_threads: int) -> None:
        self.memory = self.compute = self.whole = 0.0
        self._device = device
        self._n_threads = n_threads
        self._part = n_threads / device.n_threads if device.n_threads else 1.0

    def add(self, kind: str, n_bytes: float, flop: float) -> None:
        """Numbers of one kind."""
        rate = self._device.rate(kind)
        own = rate.bytes_per_s
        if self._n_threads:  # they add up until the memory gives no more; a GPU has none
            own = min(own, self._n_threads * rate.thread_bytes_per_s)
        read, multiply = n_bytes / own, flop / (self._part * rate.flop_per_s)
        if read >= multiply:
            self.memory += read
        else:
            self.compute += multiply
        self.whole += max(n_bytes / rate.bytes_per_s, flop / rate.flop_per_s)

    def move_bytes(self, n_bytes: float) -> None:
        """Numbers that are only read or written."""
        seconds = n_bytes / self._device.bytes_per_s
        self.memory += seconds
        self.whole += seconds


def _kinds(load: RankWorkload) -> Sequence[Weights]:
    """All weights by kind; what is not told counts as F32."""
    n_bytes = load.read_bytes - sum(kind.read_bytes for kind in load.kinds)
    flop = load.flop - sum(kind.flop for kind in load.kinds)
    if n_bytes <= 0 and flop <= 0:
        return load.kinds
    return (*load.kinds, Weights("F32", max(0.0, n_bytes), max(0.0, flop)))


def shared_seconds(ids: Sequence[str], works: Sequence[_Work]) -> list[float]:
    """When each rank is done, where those on one device share it evenly until one is done."""
    seconds = [work.own for work in works]
    for device in {device for device in ids if ids.count(device) > 1}:
        left = {at: 1.0 for at, work in enumerate(works) if ids[at] == device and work.own > 0}
        clock = 0.0
        while left:
            pace = {at: max(works[at].own, len(left) * works[at].whole) for at in left}
            next_done = min(left, key=lambda at: left[at] * pace[at])
            step = left[next_done] * pace[next_done]
            clock += step
            seconds[next_done] = clock
            del left[next_done]
            left = {at: part - step / pace[at] for at, part in left.items()}
    return seconds


class _Totals:
    """Seconds so far, by rank and along the path of the slowest."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids
        n = len(ids)
        self.memory, self.compute, self.fixed = [0.0] * n, [0.0] * n, [0.0] * n
        self.wait, self.link, self.waited = [0.0] * n, [0.0] * n, [0.0] * n
        self.path = [0.0, 0.0, 0.0, 0.0]
        self.host = 0.0

    def add_block(
        self, block: BlockWorkload, works: Sequence[_Work], seconds: Sequence[float], link: float
    ) -> None:
        """Blocks of one kind; `seconds` is when each rank of the group is done."""
        count = block.count
        slowest = max(seconds, default=0.0)
        for rank, work, done in zip(block.group, works, seconds, strict=True):
            self.memory[rank] += count * (work.memory + done - work.own)  # shared with others
            self.compute[rank] += count * work.compute
            self.fixed[rank] += count * (work.own - work.memory - work.compute)
            self.wait[rank] += count * (slowest - done)
            self.link[rank] += count * link
        if not seconds:
            return
        last = seconds.index(slowest)
        if len(seconds) > 1:
            self.waited[block.group[last]] += count * (slowest - sorted(seconds)[-2])
        work = works[last]
        fixed = work.own - work.memory - work.compute
        parts = work.memory + slowest - work.own, work.compute, fixed, link
        self._extend_path(*(count * part for part in parts))

    def add_link(self, ranks: set[int], seconds: float) -> None:
        """An exchange of some ranks."""
        for rank in ranks:
            self.link[rank] += seconds
        self._extend_path(0.0, 0.0, 0.0, seconds)

    def _extend_path(self, *seconds: float) -> None:
        self.path = [a + b for a, b in zip(self.path, seconds, strict=True)]

    def add(self, other: _Totals, count: int) -> None:
        """What another one has, so many times."""
        for name in ("memory", "compute", "fixed", "wait", "link", "waited", "path"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(self, name, [a + count * b for a, b in pairs])
        self.host += count * other.host

    def prediction(self, n_tokens: int) -> Prediction:
        """All of it."""
        memory, compute, fixed, link = self.path
        path = Path(memory, compute, fixed, link, self.host)
        in_passes = sum(self.path)
        ranks = []
        for rank, device in enumerate(self._ids):
            spent = (
                self.memory[rank], self.compute[rank], self.fixed[rank], self.wait[rank],
                self.link[rank],
            )  # fmt: skip
            idle = max(0.0, in_passes - sum(spent))
            ranks.append(RankTime(rank, device, *spent, idle, self.waited[rank]))
        return Prediction(n_tokens, in_passes + self.host, tuple(ranks), path)
