"""Trials of the routes between two GPUs: random data is sent, compared bit by bit, and timed.

A driver that reports peer access proves nothing: behind some chipsets and settings, kernels' writes
are lost or damaged without an error while copies arrive. So each route is tried as it will be used,
in each direction and in both at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.cuda import nccl

from engine.backends.gpu.comm.slots import PacketSlot, new_slot
from engine.errors import EngineError
from engine.hardware.devices.topology import Place, read_topology
from engine.hardware.host_memory import HostTensor
from engine.hardware.torch_devices import is_out_of_memory
from engine.planning.speed.link_records import Means, TrialRecord
from engine.runtime.interconnect import exchange
from engine.runtime.interconnect.exchange import (
    PASSED,
    PATIENCE_S,
    Exchange,
    LinkBench,
    address_table,
    compared,
    hung,
    load_pairs,
    random_words,
    store_pairs,
    warm_up,
    with_figures,
)

__all__ = [
    "FULL",
    "QUICK",
    "BothDirections",
    "Effort",
    "failed_trials",
    "try_copies",
    "try_nccl",
    "try_route",
    "try_stores",
]  # fmt: skip

BothDirections = tuple[TrialRecord, TrialRecord]
"""Results from the first device to the second, and back."""

NCCL_PATIENCE_S = 15.0
"""Seconds for NCCL's first collective, before which it explores the whole machine."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes and counts of a trial.

    Attributes:
        n_rounds: number of exchanges by packets.
        n_pairs: pairs of packets per program and exchange.
        n_rows: number of exchanges after which the data repeat.
        n_bulk: pairs of packets that are written at once.
        copied: sizes in bytes of the copies that are compared.
        timed_stores, timed_copies: sizes in bytes that are timed.
        n_timed: number of exchanges per timing.
    """

    n_rounds: int
    n_pairs: int
    n_rows: int
    n_bulk: int
    copied: Sequence[int]
    timed_stores: Sequence[int] = ()
    timed_copies: Sequence[int] = ()
    n_timed: int = 0


FULL = Effort(
    n_rounds=1000, n_pairs=256, n_rows=1000, n_bulk=1 << 17,
    copied=(4 << 10, 64 << 10, 1 << 20, 16 << 20),
    timed_stores=tuple(1 << n for n in range(10, 19)),
    timed_copies=tuple(1 << n for n in range(18, 27, 2)), n_timed=200,
)  # fmt: skip

QUICK = Effort(n_rounds=8, n_pairs=64, n_rows=8, n_bulk=1024, copied=(32 << 10,))


def try_route(bench: LinkBench, means: Means, place: Place, effort: Effort) -> BothDirections:
    """Try one route in both directions.

    Raises:
        EngineError: there is no memory for the trial.
    """
    if means == "nccl":
        return try_nccl(bench, effort)
    return (try_stores if means == "stores" else try_copies)(bench, place, effort)


def try_stores(bench: LinkBench, place: Place, effort: Effort) -> BothDirections:
    """Let kernels write packets: in each direction, then in both at once, then in bulk.

    While one direction is tried, the answers go through host memory, so that it is known which
    direction fails. Both directions get the same times: an exchange takes two.
    """
    found = [_one_way(bench, source, place, effort) for source in (0, 1)]
    if all(trial.passed for trial in found):
        found = _both_ways(bench, place, effort)
    if all(trial.passed for trial in found):
        found = [_bulk(bench, source, place, effort) for source in (0, 1)]
    if all(trial.passed for trial in found):
        return with_figures(found, _store_times(bench, place, effort))
    return found[0], found[1]


def try_copies(bench: LinkBench, place: Place, effort: Effort) -> BothDirections:
    """Copy random buffers in each direction, then in both at once, and compare what arrives."""
    found = [PASSED, PASSED]
    for n_bytes in effort.copied:
        for sources in ((0,), (1,), (0, 1)):
            for source, trial in _copied(bench, place, n_bytes, sources).items():
                if found[source].passed:
                    found[source] = trial
            if any(trial.verdict == "hung" for trial in found):
                return found[0], found[1]
    if not all(trial.passed for trial in found):
        return found[0], found[1]
    seconds = _copy_times(bench, place, effort)
    if seconds is None:
        return hung(), hung()
    # an idle slot slows down: its speed is read right after use
    return with_figures(found, seconds, [bench.lanes(n) for n in (0, 1)] if seconds else ())


def try_nccl(bench: LinkBench, effort: Effort) -> BothDirections:
    """Let NCCL all-gather random values of both devices, and compare them."""
    found = [PASSED, PASSED]
    for n_bytes in effort.copied:
        words = [random_words(n_bytes // 4) for _ in (0, 1)]
        sent = [w.to(device) for w, device in zip(words, bench.devices, strict=True)]
        outputs = [torch.zeros_like(w.repeat(2)) for w in sent]
        if not (bench.finish(PATIENCE_S) and _gathered(bench, sent, outputs)):
            found = [hung(sent, outputs)] * 2
            return found[0], found[1]
        for source in (0, 1):
            n = len(words[source])
            arrived = outputs[1 - source][source * n :][:n]
            trial = compared(arrived, words[source].to(arrived.device), words[source])
            if found[source].passed:
                found[source] = trial
    if not all(trial.passed for trial in found):
        return found[0], found[1]
    times: dict[int, float] = {}
    for n_bytes in effort.timed_copies:
        x = [torch.ones(n_bytes // 4, dtype=torch.int32, device=d) for d in bench.devices]
        y = [torch.empty_like(value.repeat(2)) for value in x]
        best = _best_s(bench, partial(bench.gather, x, y))
        if best is None:
            return hung(x, y), hung()
        times[n_bytes] = best
    return with_figures(found, times)


def _gathered(bench: LinkBench, values: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """All-gather values by NCCL; return whether it ends in time."""
    bench.gather(values, outputs)
    return bench.finish(NCCL_PATIENCE_S)


def failed_trials(error: EngineError | RuntimeError) -> BothDirections:
    """Return the results of a trial that could not start, or ended with an error of the driver."""
    is_refused = isinstance(error, EngineError) or is_out_of_memory(error)
    why = str(error).partition("\n")[0][:120].rstrip(".")
    found = TrialRecord("refused" if is_refused else "crashed", why)
    return found, found


def _one_way(bench: LinkBench, source: int, place: Place, effort: Effort) -> TrialRecord:
    """Run rounds in which `source` writes data and the other device answers with one pair."""
    n = effort.n_pairs
    there, back = _slot(bench, source, place, n), _slot(bench, 1 - source, "host", n)
    slots, n_pairs = ((there, back), (n, 1)) if source == 0 else ((back, there), (1, n))
    swap = Exchange(bench, slots, n_pairs, effort.n_rows)
    found = swap.run(effort.n_rounds)[1]
    if found[source].passed and not found[1 - source].passed:
        return TrialRecord("lost", "an answer through host memory does not arrive")
    return found[source]


def _both_ways(bench: LinkBench, place: Place, effort: Effort) -> list[TrialRecord]:
    """Run rounds in which both devices write data at once."""
    n = effort.n_pairs
    slots = _slot(bench, 0, place, n), _slot(bench, 1, place, n)
    return Exchange(bench, slots, (n, n), effort.n_rows).run(effort.n_rounds)[1]


def _bulk(bench: LinkBench, source: int, place: Place, effort: Effort) -> TrialRecord:
    """Write many packets at once, and read them after the writing kernel has ended."""
    device, goal, n = bench.devices[source], bench.devices[1 - source], effort.n_bulk
    slot = bench.slot(source, place, 2 * n)
    words, flag = random_words(2 * n), int(random_words(1))
    sent = torch.stack([words, torch.full_like(words, flag)], dim=1).view(-1)
    expected, found = sent.to(goal), torch.zeros(4 * n, dtype=torch.int32, device=goal)
    there = address_table(slot, device, is_writer=True)
    here = address_table(slot, goal, is_writer=False)
    given = words.to(device)
    if not bench.finish(PATIENCE_S):
        return hung(slot, given, found)
    store_pairs(given, there, flag)
    if not bench.finish(PATIENCE_S):
        return hung(slot, given, found)
    bench.carry(slot)
    load_pairs(found, here)
    if not bench.finish(PATIENCE_S):
        return hung(slot, given, found)
    return compared(found, expected, sent)


def _store_times(bench: LinkBench, place: Place, effort: Effort) -> dict[int, float]:
    """Return the seconds of an exchange by the bytes that each side writes, without flags."""
    found = {}
    for n_bytes in effort.timed_stores:
        n = n_bytes // 8 // exchange.N_PROGRAMS
        slots = _slot(bench, 0, place, n), _slot(bench, 1, place, n)
        swap = Exchange(bench, slots, (n, n), n_rows=4)
        times = [swap.run(effort.n_timed) for _ in range(3)]
        if all(trial.passed for _, both in times for trial in both):
            found[n_bytes] = min(seconds for seconds, _ in times) / effort.n_timed
    return found


def _copied(
    bench: LinkBench, place: Place, n_bytes: int, sources: Sequence[int]
) -> dict[int, TrialRecord]:
    """Copy n_bytes from each of `sources` at the same time; return the results by source."""
    words = {source: random_words(n_bytes // 4) for source in sources}
    sent = {source: words[source].to(bench.devices[source]) for source in sources}
    expected = {source: words[source].to(bench.devices[1 - source]) for source in sources}
    found = {source: torch.zeros_like(expected[source]) for source in sources}
    if not bench.finish(PATIENCE_S):
        return dict.fromkeys(sources, hung(sent, found))
    for source in sources:
        bench.copy(source, place, sent[source], found[source])
    if not bench.finish(PATIENCE_S):
        return dict.fromkeys(sources, hung(sent, found))
    return {s: compared(found[s], expected[s], words[s]) for s in sources}


def _copy_times(bench: LinkBench, place: Place, effort: Effort) -> dict[int, float] | None:
    """Return the seconds of two opposite copies at once by the bytes of one; None if one hangs."""
    times: dict[int, float] = {}
    for n_bytes in effort.timed_copies:
        x = [torch.ones(n_bytes // 4, dtype=torch.int32, device=d) for d in bench.devices]
        y = [torch.empty_like(x[1 - source]) for source in (0, 1)]
        best = _best_s(bench, partial(_copy_both, bench, place, x, y))
        if best is None:
            hung(x, y)
            return None
        times[n_bytes] = best
    return times


def _copy_both(bench: LinkBench, place: Place, x: Sequence[Tensor], y: Sequence[Tensor]) -> None:
    """Begin a copy in each direction."""
    for source in (0, 1):
        bench.copy(source, place, x[source], y[source])


def _best_s(bench: LinkBench, begin: Callable[[], None]) -> float | None:
    """Return the shortest time of three runs after a warm-up, in seconds; None if one hangs."""
    seconds = []
    for _ in range(4):
        if not bench.finish(PATIENCE_S):
            return None
        begun = time.perf_counter()
        begin()
        if not bench.finish(PATIENCE_S):
            return None
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def _slot(bench: LinkBench, writer: int, place: Place, n_pairs: int) -> PacketSlot:
    return bench.slot(writer, place, exchange.N_PROGRAMS * 2 * 2 * n_pairs)


CHUNK_BYTES = 1 << 20
"""Bytes of a chunk of a copy through host memory: it goes up, then down."""

POLL_S = 20e-6
"""Seconds between polls of an event."""


class GpuBench:
    """Two GPUs of this process; see `engine.runtime.interconnect.exchange.LinkBench`.

    Args:
        numbers: CUDA numbers of the GPUs.
        names: ids of the GPUs.
    """

    spins = True

    def __init__(self, numbers: Sequence[int], names: tuple[str, str]) -> None:
        first, second = (torch.device("cuda", number) for number in numbers)
        self.devices = first, second
        self.names = names
        # two copies at once need streams that do not wait for each other
        self._streams = [[_stream(device) for device in self.devices] for _ in (0, 1)]
        self._staging: dict[int, HostTensor] = {}

    def warm_up(self) -> None:
        """Create contexts, and compile and load the kernels.

        Raises:
            EngineError: kernels cannot be started on these GPUs.
        """
        for device in self.devices:
            warm_up(device)
        if not self.finish(60):
            raise EngineError(f"{' or '.join(self.names)} does not answer.")

    def slot(self, writer: int, place: Place, n_packet: int) -> PacketSlot:
        """See `LinkBench.slot`; the memory is the kind that the one-shot all-reduce uses."""
        if place == "peer" and torch.version.hip:
            raise EngineError("Kernels on AMD GPUs can meet in host memory only.")
        return new_slot(place, n_packet, self.devices[writer], self.devices[1 - writer])

    def carry(self, slot: PacketSlot) -> None:
        """Do nothing: both devices see the same memory."""

    def copy(self, source: int, place: Place, x: Tensor, y: Tensor) -> None:
        """See `LinkBench.copy`."""
        here, there = self._streams[source][source], self._streams[source][1 - source]
        if place == "peer":
            with _current(there), _current(here):
                y.copy_(x, non_blocking=True)
            return
        staging = self._staged(source, x)
        for start in range(0, len(x), CHUNK_BYTES // x.itemsize):
            part = slice(start, start + CHUNK_BYTES // x.itemsize)
            with _current(here):
                staging[part].copy_(x[part], non_blocking=True)
            there.wait_event(here.record_event())
            with _current(there):
                y[part].copy_(staging[part], non_blocking=True)

    def gather(self, values: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """See `LinkBench.gather`."""
        streams = [self._streams[side][side] for side in (0, 1)]
        try:
            nccl.all_gather(values, outputs, streams=streams)
        except (RuntimeError, AttributeError) as error:
            raise EngineError(f"NCCL: {error}".partition("\n")[0][:120]) from error

    def on(self, side: int) -> AbstractContextManager[object]:
        """See `LinkBench.on`."""
        return _current(self._streams[side][side])

    def finish(self, seconds: float) -> bool:
        """See `LinkBench.finish`."""
        streams = [stream for pair in self._streams for stream in pair]
        streams += [torch.cuda.current_stream(device) for device in self.devices]
        events = [stream.record_event() for stream in streams]
        deadline = time.perf_counter() + seconds
        for event in events:
            while not event.query():
                if time.perf_counter() > deadline:
                    return False
                time.sleep(POLL_S)
        return True

    def lanes(self, source: int) -> tuple[int, int]:
        """See `LinkBench.lanes`."""
        slot = read_topology().pcie.get(str(self.devices[source]))
        return (slot.generation, slot.width) if slot else (0, 0)

    def _staged(self, source: int, x: Tensor) -> Tensor:
        """Return pinned host memory for what one device sends."""
        held = self._staging.get(source)
        if held is None or len(held.value) < len(x):
            held = HostTensor(x.shape, x.dtype, self.devices[source])
            self._staging[source] = held
        return held.value


@contextmanager
def _current(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream torch's current one, and its device the current device.

    The device comes first: leaving a stream makes the device from before current, which would
    create a context of hundreds of MB on a GPU that is not under test.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
