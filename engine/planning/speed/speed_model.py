"""The speed model: predicted time for a token or prompt on a split, by cause. Imports no torch.

A rank's time follows the roofline model (Williams, Waterman and Patterson, CACM 52, 2009): for each
kind of weights, the time to read or to multiply them, whichever is longer, plus an overhead per
matrix. The ranks in a group wait for the slowest before each all-reduce; groups compute one after
the other. Ranks on the same device share its memory and cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.hardware.devices.types import CPU, far_id, is_cpu, machine_of
from engine.model.forward.batch import SMALL_BATCH
from engine.model.forward.state import F32_BYTES
from engine.planning.evaluation.workload import (
    DEQUANTISED,
    BlockWorkload,
    ModelWorkload,
    RankWorkload,
    Weights,
)
from engine.planning.speed.facts import CACHE, DeviceFacts, Path, Prediction, RankTime
from engine.planning.speed.links import Links

CANDIDATE_BYTES = 2048
"""Maximum size, in bytes, of the top-k candidates that GPUs exchange to sample a token."""

READY = frozenset({"F32", "F16", "BF16", DEQUANTISED})
"""Kinds of weights that need no dequantising per batch, or whose reading time includes it."""


class _Times(NamedTuple):
    """Times that a rank takes in one block until the next all-reduce, in seconds.

    Attributes:
        own: time with the rank's own threads, if it has the device to itself.
        whole: time with the whole device, excluding overheads.
        memory, compute: parts of `own` spent reading and multiplying; the rest is overhead.
    """

    own: float
    whole: float
    memory: float
    compute: float


class _Span(NamedTuple):
    """Tokens in one forward pass: `n` of them, after `first` others."""

    n: int
    first: int

    @property
    def last(self) -> _Span:
        return _Span(1, self.first + self.n - 1)

    def n_seen(self, window: int) -> float:
        """Return the number of attended positions, summed over all tokens."""
        return _sum_up_to(self.first + self.n, window) - _sum_up_to(self.first, window)

    def n_read(self, window: int) -> int:
        """Return the number of positions that at least one token attends to."""
        last = self.first + self.n
        return min(last, window + self.n - 1) if window else last


def _sum_up_to(n: int, window: int) -> float:
    # min(1, window) + min(2, window) + … + min(n, window); a window of 0 means no limit
    inside = min(n, window) if window else n
    return inside * (inside + 1) / 2 + (n - inside) * window


NOTHING = _Times(0.0, 0.0, 0.0, 0.0)

MAX_KNOWN = 1 << 14
"""Maximum number of cached times; consecutive splits during a drag share most of them."""

_Known = dict[tuple[int, int, _Span], tuple[RankWorkload, _Times]]
"""Times by workload id, rank and span; storing the workload keeps its id unique."""


class SpeedModel:
    """Speed model for one set of ranks; a prediction takes well under a millisecond.

    Args:
        n_threads: total CPU threads over all ranks; None for all that were measured.
    """

    def __init__(
        self, devices: Sequence[DeviceFacts], links: Links, n_threads: int | None = None
    ) -> None:
        self._devices = tuple(devices)
        self._ids = tuple(device.device for device in devices)
        self._links = links
        self._known: _Known = {}
        self._threads = [
            max(1, min(n_threads or d.n_threads, d.n_threads) // self._ids.count(d.device))
            if d.n_threads
            else 0
            for d in devices
        ]

    def decode(self, load: ModelWorkload, position: int = 0) -> Prediction:
        """Predict the time for one token after `position` others."""
        totals = self._pass(load, _Span(1, position))
        totals.add(self._ends(load, samples=True), 1)
        return totals.prediction(1)

    def prefill(
        self, load: ModelWorkload, n_tokens: int, n_batch: int, position: int = 0
    ) -> Prediction:
        """Predict the time for a prompt in batches after `position` others, with its last logits.

        All full batches together take as long as the same number of copies of the middle batch,
        because the number of attended positions grows linearly.
        """
        n_full, rest = divmod(n_tokens, n_batch)
        totals = _Totals(self._ids)
        if n_full:
            middle = position + (n_full - 1) * n_batch // 2
            totals.add(self._pass(load, _Span(n_batch, middle)), n_full)
        if rest:
            totals.add(self._pass(load, _Span(rest, position + n_full * n_batch)), 1)
        totals.add(self._ends(load), 1)
        return totals.prediction(n_tokens)

    def _pass(self, load: ModelWorkload, span: _Span) -> _Totals:
        run = self._run(span)
        hidden = F32_BYTES * load.n_embd
        last = tuple(load.embedding)
        run.compute(BlockWorkload(1, last, load.embedding, 1), hidden * span.n)
        for block in load.blocks:
            if block.is_ending:
                run.span = run.span.last
            run.move(last, block.group, hidden * run.span.n)
            run.compute(block, hidden * run.span.n)
            last = block.group
        run.totals.host += max((device.host_s for device in self._devices), default=0.0)
        return run.totals

    def _ends(self, load: ModelWorkload, *, samples: bool = False) -> _Totals:
        groups = [tuple(load.embedding), *(block.group for block in load.blocks)]
        head, ends = tuple(load.head), self._run(_Span(1, 0))
        ends.ordered.update(machine_of(device) for device in self._ids)  # by the previous pass
        ends.move(groups[-1], head, F32_BYTES * load.n_embd)
        ends.compute(BlockWorkload(1, head, load.head, 0), 0.0)
        for ranks in self._by_machine(head):
            if samples and not any(is_cpu(self._ids[rank]) for rank in ranks):
                ends.sample(ranks)
            else:
                ends.gather(ranks, F32_BYTES * load.n_vocab * len(ranks) / len(head))
        ends.send_samples(head)
        return ends.totals

    def _by_machine(self, ranks: Sequence[int]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(machine_of(self._ids[rank]), []).append(rank)
        return list(found.values())

    def _run(self, span: _Span) -> _Run:
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        return _Run(self._devices, self._ids, self._threads, self._links, span, self._known)


class _Run:
    """Sum of the times in one forward pass over the tokens in `span`."""

    def __init__(
        self, devices: Sequence[DeviceFacts], ids: Sequence[str], threads: Sequence[int],
        links: Links, span: _Span, known: _Known,
    ) -> None:  # fmt: skip
        self.totals = _Totals(ids)
        self._devices = devices
        self._ids = ids
        self._threads = threads
        self._links = links
        self.span = span
        self._known = known
        self.ordered = {0}  # machines that have received the command for this pass

    def compute(self, block: BlockWorkload, n_bytes: float) -> None:
        """Add equal blocks, in which all ranks wait for the slowest, then all-reduce `n_bytes`."""
        self._order(block.group, waits=False)
        times = [self._times(rank, block.ranks.get(rank)) for rank in block.group]
        ids = [self._ids[rank] for rank in block.group]
        link = block.n_reduce * self._links.all_reduce_s(ids, n_bytes)
        self.totals.add_block(block, times, shared_seconds(ids, times), link)

    def move(self, before: Sequence[int], after: Sequence[int], n_bytes: float) -> None:
        """Add a move of `n_bytes` to another group, unless the first group contains it."""
        if not before or set(after) <= set(before):
            return
        self._order(after, waits=True)
        source = before[0]
        targets = [self._ids[rank] for rank in after if rank != source]
        seconds = self._links.move_s(self._ids[source], targets, n_bytes)
        self.totals.add_link({source, *after}, seconds)

    def _order(self, ranks: Sequence[int], *, waits: bool) -> None:
        """Add the remaining time until other machines have received the command for this pass."""
        for machine in {machine_of(self._ids[rank]) for rank in ranks} - self.ordered:
            self.ordered.add(machine)
            begun_s = sum(self.totals.path)
            left = self._links.wires.order_s(machine, begun_s, waits=waits)
            self.totals.add_link(set(ranks), left)

    def send_samples(self, head: Sequence[int]) -> None:
        far = {machine_of(self._ids[rank]) for rank in head} - {0}
        if far:
            wires = self._links.wires
            seconds = max(wires.message_s(machine, (0,), CANDIDATE_BYTES) for machine in far)
            self.totals.add_link(set(head), seconds)

    def sample(self, head: Sequence[int]) -> None:
        ids = [self._ids[rank] for rank in head]
        self.totals.add_link(set(head), self._links.all_reduce_s(ids, CANDIDATE_BYTES))

    def gather(self, head: Sequence[int], n_bytes: float) -> None:
        """Add moving all logits to the head's first rank, and then to the host."""
        first, *others = head
        links = [self._links.between(self._ids[rank], self._ids[first]) for rank in others]
        part = n_bytes / len(head)
        if not is_cpu(self._ids[first]):
            host = far_id(machine_of(self._ids[first]), CPU)
            links.append(self._links.between(self._ids[first], host))
        seconds = max((link.latency_s for link in links), default=0.0)
        seconds += sum(link.payload_s(part) for link in links)
        self.totals.add_link(set(head), seconds)

    def _times(self, rank: int, load: RankWorkload | None) -> _Times:
        if load is None:
            return NOTHING
        key = id(load), rank, self.span
        found = self._known.get(key)
        if found is None:
            spent = rank_times(self._devices[rank], self._threads[rank], load, self.span)
            found = self._known[key] = load, spent
        return found[1]


def rank_times(device: DeviceFacts, n_threads: int, load: RankWorkload, span: _Span) -> _Times:
    """Return the times that the tokens in `span` take in one block on one device."""
    is_routed = load.batch_bytes > load.read_bytes > 0
    n_times = min(load.batch_bytes / load.read_bytes, span.n) if is_routed else 1.0
    roof = _Roofline(device, n_threads)
    for kind, n_bytes, flop in _kinds(load):
        roof.add(kind, n_times * n_bytes, span.n * flop)
        if span.n > SMALL_BATCH and kind not in READY:
            roof.move_bytes(n_times * flop / 2 * device.unpack_bytes)
    seen, read = span.n_seen(load.window), span.n_read(load.window)
    roof.add(CACHE, read * load.kv_bytes, seen * load.kv_flop)
    fixed = load.n_op * (device.routed_op_s if is_routed else device.op_s)
    return _Times(roof.memory + roof.compute + fixed, roof.whole, roof.memory, roof.compute)


class _Roofline:
    """Sum of one rank's times per kind of weights: reading or multiplying, whichever is longer."""

    def __init__(self, device: DeviceFacts, n_threads: int) -> None:
        self.memory = self.compute = self.whole = 0.0
        self._device = device
        self._n_threads = n_threads
        self._part = n_threads / device.n_threads if device.n_threads else 1.0

    def add(self, kind: str, n_bytes: float, flop: float) -> None:
        rate = self._device.rate(kind)
        own = rate.bytes_per_s
        if self._n_threads:  # threads add up to the bandwidth; a GPU has no threads
            own = min(own, self._n_threads * rate.thread_bytes_per_s)
        read, multiply = n_bytes / own, flop / (self._part * rate.flop_per_s)
        if read >= multiply:
            self.memory += read
        else:
            self.compute += multiply
        self.whole += max(n_bytes / rate.bytes_per_s, flop / rate.flop_per_s)

    def move_bytes(self, n_bytes: float) -> None:
        seconds = n_bytes / self._device.bytes_per_s
        self.memory += seconds
        self.whole += seconds


def _kinds(load: RankWorkload) -> Sequence[Weights]:
    # weights not listed in `load.kinds` count as F32
    n_bytes = load.read_bytes - sum(kind.read_bytes for kind in load.kinds)
    flop = load.flop - sum(kind.flop for kind in load.kinds)
    if n_bytes <= 0 and flop <= 0:
        return load.kinds
    return (*load.kinds, Weights("F32", max(0.0, n_bytes), max(0.0, flop)))


def shared_seconds(ids: Sequence[str], times: Sequence[_Times]) -> list[float]:
    """Return when each rank finishes, in seconds; ranks on one device share it evenly."""
    seconds = [time.own for time in times]
    for device in {device for device in ids if ids.count(device) > 1}:
        left = {at: 1.0 for at, time in enumerate(times) if ids[at] == device and time.own > 0}
        clock = 0.0
        while left:
            pace = {at: max(times[at].own, len(left) * times[at].whole) for at in left}
            next_done = min(left, key=lambda at: left[at] * pace[at])
            step = left[next_done] * pace[next_done]
            clock += step
            seconds[next_done] = clock
            del left[next_done]
            left = {at: part - step / pace[at] for at, part in left.items()}
    return seconds


class _Totals:
    """Times so far in seconds, by rank and along the path of the slowest rank."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids
        n = len(ids)
        self.memory, self.compute, self.fixed = [0.0] * n, [0.0] * n, [0.0] * n
        self.wait, self.link, self.waited = [0.0] * n, [0.0] * n, [0.0] * n
        self.path = [0.0, 0.0, 0.0, 0.0]
        self.host = 0.0

    def add_block(
        self, block: BlockWorkload, times: Sequence[_Times], seconds: Sequence[float], link: float
    ) -> None:
        count = block.count
        slowest = max(seconds, default=0.0)
        for rank, time, done in zip(block.group, times, seconds, strict=True):
            self.memory[rank] += count * (
                time.memory + done - time.own
            )  # with time lost to sharing
            self.compute[rank] += count * time.compute
            self.fixed[rank] += count * (time.own - time.memory - time.compute)
            self.wait[rank] += count * (slowest - done)
            self.link[rank] += count * link
        if not seconds:
            return
        last = seconds.index(slowest)
        if len(seconds) > 1:
            self.waited[block.group[last]] += count * (slowest - sorted(seconds)[-2])
        time = times[last]
        fixed = time.own - time.memory - time.compute
        parts = time.memory + slowest - time.own, time.compute, fixed, link
        self._extend_path(*(count * part for part in parts))

    def add_link(self, ranks: set[int], seconds: float) -> None:
        for rank in ranks:
            self.link[rank] += seconds
        self._extend_path(0.0, 0.0, 0.0, seconds)

    def _extend_path(self, *seconds: float) -> None:
        self.path = [a + b for a, b in zip(self.path, seconds, strict=True)]

    def add(self, other: _Totals, count: int) -> None:
        for name in ("memory", "compute", "fixed", "wait", "link", "waited", "path"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(self, name, [a + count * b for a, b in pairs])
        self.host += count * other.host

    def prediction(self, n_tokens: int) -> Prediction:
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
