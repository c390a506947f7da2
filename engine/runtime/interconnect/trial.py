"""Trials of the routes between two GPUs: random data is sent, compared bit by bit, and timed.

A driver's report of peer access proves nothing: with some chipsets and settings, kernels' writes
are silently lost or corrupted, although copies arrive. So each route is tried as it will be used,
in each direction and in both simultaneously.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.backends.gpu.comm.slots import PacketSlot
from engine.errors import EngineError, Sentence
from engine.hardware.devices.topology import Place
from engine.hardware.torch_devices import is_out_of_memory
from engine.planning.speed.link_records import Means, TrialRecord
from engine.runtime.interconnect import exchange
from engine.runtime.interconnect.exchange import (
    PASSED,
    PATIENCE_S,
    Exchange,
    GpuBench,
    address_table,
    compared,
    hung,
    load_pairs,
    random_words,
    store_pairs,
    with_figures,
)

BothDirections = tuple[TrialRecord, TrialRecord]
"""Results from the first device to the second, and for the opposite direction."""

NCCL_PATIENCE_S = 15.0
"""Seconds for NCCL's first collective, before which NCCL explores the whole machine."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes and counts for a trial.

    Attributes:
        n_rounds: number of packet exchanges.
        n_pairs: number of packet pairs per program and exchange.
        n_rows: number of exchanges after which the data repeats.
        n_bulk: number of packet pairs that are written together.
        copied: sizes, in bytes, of copies to compare.
        timed_stores, timed_copies: sizes, in bytes, to time.
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


def try_route(bench: GpuBench, means: Means, place: Place, effort: Effort) -> BothDirections:
    """Try one route in both directions.

    Raises:
        EngineError: there is not enough memory for the trial.
    """
    if means == "nccl":
        return try_nccl(bench, effort)
    return (try_stores if means == "stores" else try_copies)(bench, place, effort)


def try_stores(bench: GpuBench, place: Place, effort: Effort) -> BothDirections:
    """Have kernels write packets in each direction, then in both simultaneously, then in bulk.

    While one direction is tried, the replies go through host memory, so that the failing direction
    is known. Both directions get the same times, as an exchange uses both.
    """
    found = [_one_way(bench, source, place, effort) for source in (0, 1)]
    if all(trial.passed for trial in found):
        found = _both_ways(bench, place, effort)
    if all(trial.passed for trial in found):
        found = [_bulk(bench, source, place, effort) for source in (0, 1)]
    if all(trial.passed for trial in found):
        return with_figures(found, _store_times(bench, place, effort))
    return found[0], found[1]


def try_copies(bench: GpuBench, place: Place, effort: Effort) -> BothDirections:
    """Copy random buffers in each direction, then both simultaneously; compare what arrives."""
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
    # an idle slot slows down, so read its speed right after use
    return with_figures(found, seconds, [bench.lanes(n) for n in (0, 1)] if seconds else ())


def try_nccl(bench: GpuBench, effort: Effort) -> BothDirections:
    """Have NCCL all-gather random values from both devices, and compare them."""
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


def _gathered(bench: GpuBench, values: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    bench.gather(values, outputs)
    return bench.finish(NCCL_PATIENCE_S)


def failed_trials(error: EngineError | RuntimeError) -> BothDirections:
    """Return the results of a trial that could not start or failed with a driver error."""
    is_refused = isinstance(error, EngineError) or is_out_of_memory(error)
    why = str(error).partition("\n")[0][:120].rstrip(".")
    found = TrialRecord("refused" if is_refused else "crashed", why)
    return found, found


def _one_way(bench: GpuBench, source: int, place: Place, effort: Effort) -> TrialRecord:
    n = effort.n_pairs
    there, back = _slot(bench, source, place, n), _slot(bench, 1 - source, "host", n)
    slots, n_pairs = ((there, back), (n, 1)) if source == 0 else ((back, there), (1, n))
    swap = Exchange(bench, slots, n_pairs, effort.n_rows)
    found = swap.run(effort.n_rounds)[1]
    if found[source].passed and not found[1 - source].passed:
        return TrialRecord("lost", Sentence("a reply through host memory does not arrive"))
    return found[source]


def _both_ways(bench: GpuBench, place: Place, effort: Effort) -> list[TrialRecord]:
    n = effort.n_pairs
    slots = _slot(bench, 0, place, n), _slot(bench, 1, place, n)
    return Exchange(bench, slots, (n, n), effort.n_rows).run(effort.n_rounds)[1]


def _bulk(bench: GpuBench, source: int, place: Place, effort: Effort) -> TrialRecord:
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


def _store_times(bench: GpuBench, place: Place, effort: Effort) -> dict[int, float]:
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
    bench: GpuBench, place: Place, n_bytes: int, sources: Sequence[int]
) -> dict[int, TrialRecord]:
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


def _copy_times(bench: GpuBench, place: Place, effort: Effort) -> dict[int, float] | None:
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


def _copy_both(bench: GpuBench, place: Place, x: Sequence[Tensor], y: Sequence[Tensor]) -> None:
    for source in (0, 1):
        bench.copy(source, place, x[source], y[source])


def _best_s(bench: GpuBench, begin: Callable[[], None]) -> float | None:
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


def _slot(bench: GpuBench, writer: int, place: Place, n_pairs: int) -> PacketSlot:
    return bench.slot(writer, place, exchange.N_PROGRAMS * 2 * 2 * n_pairs)
