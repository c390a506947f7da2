"""Trials of the ways between two GPUs: random data there, compared bit by bit, and timed.

A driver that says two GPUs reach each other proves nothing: behind some chipsets and settings what
kernels write is lost or damaged without an error, while copies arrive. So each way is tried as it
will be used, in each direction and in both at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.gpu.kernels import link_trial
from engine.gpu.launch import launch
from engine.gpu.target import target_of
from engine.parallel.ways import Place
from engine.planning.link_records import Means, TrialRecord

N_PROGRAMS = 8
SIZE = 512
"""Packets that a program writes at once."""

BULK_SIZE = 1024

ROUND_NS = 200_000_000
"""How long a kernel waits for a round."""

ROUND_READS = 200_000
"""The same where kernels have no clock: reads, of half a microsecond and more."""

INTERPRETED_READS = 2
"""Interpreted kernels run one after the other: what has not come by then never comes."""

PATIENCE_S = 5.0
"""How long the host waits for all rounds; kernels give up before."""

Both = tuple[TrialRecord, TrialRecord]
"""From the first device to the second, and back."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory that one device writes and the other one reads.

    Attributes:
        to, at: its address for who writes and for who reads.
        memory: int64 (n,), as who reads has it.
        held: what has to live as long.
    """

    to: int
    at: int
    memory: Tensor
    held: object = None


class LinkBench(Protocol):
    """Two devices and what connects them.

    Attributes:
        devices: in torch; names: their ids.
        spins: kernels of both run at once, so one can wait for what the other writes.
    """

    devices: tuple[torch.device, torch.device]
    names: tuple[str, str]
    spins: bool

    def slots(self, writer: int, place: Place, n: int) -> Slots:
        """Memory for n times 64 bits that device `writer` (0 or 1) writes.

        Raises:
            EngineError: there is no such memory.
        """
        ...

    def carry(self, slots: Slots) -> None:
        """Called between writing and reading where nothing spins."""
        ...

    def copy(self, source: int, place: Place, x: Tensor, y: Tensor) -> None:
        """Begin to copy x on device `source` to y on the other one, in one step or by the host."""
        ...

    def finish(self, seconds: float) -> bool:
        """Wait for all that was begun on both devices; False if it takes longer."""
        ...


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried.

    Attributes:
        n_rounds, n_words: of exchanges by packets, and of four-byte words in each per program.
        n_rows: rounds until data come again.
        n_bulk: words of 64 bits that kernels write without flags.
        copied: bytes of copies that are compared.
        timed_stores, timed_copies: bytes that are timed.
        n_timed: exchanges for a time.
    """

    n_rounds: int
    n_words: int
    n_rows: int
    n_bulk: int
    copied: Sequence[int]
    timed_stores: Sequence[int] = ()
    timed_copies: Sequence[int] = ()
    n_timed: int = 0


FULL = Effort(
    n_rounds=1000, n_words=256, n_rows=1000, n_bulk=1 << 18,
    copied=(4 << 10, 64 << 10, 1 << 20, 16 << 20),
    timed_stores=tuple(1 << n for n in range(10, 19)),
    timed_copies=tuple(1 << n for n in range(18, 27, 2)), n_timed=200,
)  # fmt: skip

QUICK = Effort(n_rounds=8, n_words=64, n_rows=8, n_bulk=2048, copied=(32 << 10,))

PASSED = TrialRecord("passed")


def tried(bench: LinkBench, means: Means, place: Place, effort: Effort) -> Both:
    """Try one way in both directions.

    Raises:
        EngineError: there is no memory for it.
    """
    return (try_stores if means == "stores" else try_copies)(bench, place, effort)


def try_stores(bench: LinkBench, place: Place, effort: Effort) -> Both:
    """Let kernels write packets and plain words in each direction, then in both at once.

    Who reads answers by way of the host's memory while only one direction is tried, so what fails
    is known. Both then have the same figures: an exchange takes two.
    """
    found = [_one_way(bench, source, place, effort) for source in (0, 1)]
    if all(trial.passed for trial in found):
        found = list(_both_ways(bench, place, effort))
    if all(trial.passed for trial in found):
        found = [_bulk(bench, source, place, effort) for source in (0, 1)]
    if all(trial.passed for trial in found):
        seconds = _store_times(bench, place, effort)
        return TrialRecord("passed", "", seconds), TrialRecord("passed", "", seconds)
    return found[0], found[1]


def try_copies(bench: LinkBench, place: Place, effort: Effort) -> Both:
    """Copy random buffers in each direction, then in both at once, and compare them where they
    arrive, also by a sum that the host knows."""
    found = [PASSED, PASSED]
    for n_bytes in effort.copied:
        for sources in ((0,), (1,), (0, 1)):
            for source, trial in _copied(bench, place, n_bytes, sources).items():
                if found[source].passed:
                    found[source] = trial
        if any(trial.verdict == "hung" for trial in found):
            return found[0], found[1]
    if all(trial.passed for trial in found):
        seconds = _copy_times(bench, place, effort)
        return TrialRecord("passed", "", seconds), TrialRecord("passed", "", seconds)
    return found[0], found[1]


class Exchange:
    """Rounds of packets between two devices.

    Args:
        slots: what the first device writes, and what the second one writes.
        n_words: that a program of each writes per round.
        n_rows: rounds until data come again.
    """

    def __init__(
        self, bench: LinkBench, slots: tuple[Slots, Slots], n_words: tuple[int, int], n_rows: int
    ) -> None:
        self._bench, self._slots, self._n_words = bench, slots, n_words
        self._n_rows, self._most = n_rows, max(n_words)
        words = [_random(n_rows, N_PROGRAMS, self._most, dtype=torch.int32) for _ in range(2)]
        self._words = [[w.to(device) for w in words] for device in bench.devices]
        self._tables = [
            torch.tensor([slots[i].to, slots[1 - i].at], dtype=torch.int64).to(device)
            for i, device in enumerate(bench.devices)
        ]
        self._status = [
            torch.zeros(N_PROGRAMS, 3, dtype=torch.int64).to(device) for device in bench.devices
        ]
        self._first = 0

    def run(self, n_rounds: int) -> tuple[float, list[TrialRecord]]:
        """Seconds of all rounds, and what came of each direction."""
        for status in self._status:
            status.zero_()
        if not self._bench.finish(PATIENCE_S):
            return 0.0, [_hung()] * 2
        begun = time.perf_counter()
        if self._bench.spins:
            for side in (0, 1):
                self.start(side, n_rounds)
        else:
            for at in range(n_rounds):
                self.step(self._first + at)
        if not self._bench.finish(PATIENCE_S):
            return 0.0, [_hung()] * 2
        seconds = time.perf_counter() - begun
        self._first += n_rounds
        return seconds, self._verdicts(n_rounds)

    def start(self, side: int, n_rounds: int) -> None:
        """Begin rounds on one device, in one kernel, while the other one does the same."""
        device = self._bench.devices[side]
        has_asm = target_of(device).has_asm
        launch(
            link_trial.exchange, (N_PROGRAMS,), self._words[side][side],
            self._words[side][1 - side], self._tables[side], self._status[side], self._first,
            n_rounds, self._n_rows, self._n_words[side], self._n_words[1 - side], self._most,
            ROUND_NS if has_asm else ROUND_READS, SIZE=SIZE, ASM=has_asm,
        )  # fmt: skip

    def step(self, round_number: int) -> None:
        """One round by kernels that run one after the other."""
        for side in (0, 1):
            launch(
                link_trial.write_round, (N_PROGRAMS,), self._words[side][side],
                self._tables[side], round_number, self._n_rows, self._n_words[side], self._most,
                SIZE=SIZE, ASM=False,
            )  # fmt: skip
        for slots in self._slots:
            self._bench.carry(slots)
        for side in (0, 1):
            launch(
                link_trial.read_round, (N_PROGRAMS,), self._words[side][1 - side],
                self._tables[side], self._status[side], round_number, self._n_rows,
                self._n_words[1 - side], self._most, INTERPRETED_READS, SIZE=SIZE, ASM=False,
            )  # fmt: skip

    def _verdicts(self, n_rounds: int) -> list[TrialRecord]:
        """By direction: what a side did not get, the other one did not send, or the link lost.

        A side that misses an answer stops; then the other one misses what comes later. So of two
        that miss something, the one that got as far as the other or less is right.
        """
        seen = [status.cpu() for status in self._status]
        reached = [int(status[:, 0].min()) for status in seen]
        found = []
        for source in (0, 1):
            goal = 1 - source
            n_lost, n_wrong = (int(n) for n in seen[goal][:, 1:].sum(dim=0))
            if n_wrong:
                found.append(TrialRecord("wrong", f"{n_wrong} words differ"))
            elif (n_lost or reached[goal] < n_rounds) and reached[goal] <= reached[source]:
                why = f"after {reached[goal]} of {n_rounds} exchanges"
                found.append(TrialRecord("lost", why))
            else:
                found.append(PASSED)
        return found


def _one_way(bench: LinkBench, source: int, place: Place, effort: Effort) -> TrialRecord:
    """Rounds in which `source` writes data and the other one an answer of one packet."""
    there = _slots(bench, source, place, effort.n_words)
    back = _slots(bench, 1 - source, "host", 1, effort.n_words)
    slots = (there, back) if source == 0 else (back, there)
    n_words = (effort.n_words, 1) if source == 0 else (1, effort.n_words)
    exchange = Exchange(bench, slots, n_words, effort.n_rows)
    exchange.run(0)  # so that both kernels are on their devices
    found = exchange.run(effort.n_rounds)[1]
    if found[source].passed and not found[1 - source].passed:
        return TrialRecord("lost", "an answer by way of the host does not arrive")
    return found[source]


def _both_ways(bench: LinkBench, place: Place, effort: Effort) -> Both:
    n = effort.n_words
    slots = _slots(bench, 0, place, n), _slots(bench, 1, place, n)
    first, second = Exchange(bench, slots, (n, n), effort.n_rows).run(effort.n_rounds)[1]
    return first, second


def _bulk(bench: LinkBench, source: int, place: Place, effort: Effort) -> TrialRecord:
    """Random words of 64 bits, as many as there are, compared once the kernel is done."""
    device, goal, n = bench.devices[source], bench.devices[1 - source], effort.n_bulk
    slots = bench.slots(source, place, n)
    slots.memory.zero_()
    words = _random(n, dtype=torch.int64)
    expected = words.to(goal)
    table = torch.tensor([slots.to], dtype=torch.int64).to(device)
    if not bench.finish(PATIENCE_S):
        return _hung()
    store_words(words.to(device), table)
    bench.carry(slots)
    if not bench.finish(PATIENCE_S):
        return _hung()
    return _compared(slots.memory.to(goal), expected, words)


def store_words(words: Tensor, table: Tensor) -> None:
    """Begin to write words (n,) int64 to the address that `table` names."""
    n = len(words)
    launch(
        link_trial.store_words, (-(-n // BULK_SIZE),), words, table, n, SIZE=BULK_SIZE,
        ASM=target_of(words.device).has_asm,
    )  # fmt: skip


def _store_times(bench: LinkBench, place: Place, effort: Effort) -> Mapping[int, float]:
    """Seconds of an exchange by the bytes that each side writes, flags not counted."""
    found = {}
    for n_bytes in effort.timed_stores:
        n = n_bytes // 4 // N_PROGRAMS
        slots = _slots(bench, 0, place, n), _slots(bench, 1, place, n)
        exchange = Exchange(bench, slots, (n, n), n_rows=4)
        times = [exchange.run(effort.n_timed) for _ in range(3)]
        if all(trial.passed for _, both in times for trial in both):
            found[n_bytes] = min(seconds for seconds, _ in times) / effort.n_timed
    return found


def _copied(
    bench: LinkBench, place: Place, n_bytes: int, sources: Sequence[int]
) -> dict[int, TrialRecord]:
    """Copy so much from each of `sources` at the same time, and compare it."""
    words = {source: _random(n_bytes // 8, dtype=torch.int64) for source in sources}
    sent = {source: words[source].to(bench.devices[source]) for source in sources}
    expected = {source: words[source].to(bench.devices[1 - source]) for source in sources}
    found = {source: torch.zeros_like(expected[source]) for source in sources}
    if not bench.finish(PATIENCE_S):
        return dict.fromkeys(sources, _hung())
    for source in sources:
        bench.copy(source, place, sent[source], found[source])
    if not bench.finish(PATIENCE_S):
        return dict.fromkeys(sources, _hung())
    return {s: _compared(found[s], expected[s], words[s]) for s in sources}


def _copy_times(bench: LinkBench, place: Place, effort: Effort) -> Mapping[int, float]:
    """Seconds of two copies, one in each direction, by the bytes of one."""
    times: dict[int, float] = {}
    for n_bytes in effort.timed_copies:
        x = [torch.ones(n_bytes // 8, dtype=torch.int64, device=d) for d in bench.devices]
        y = [torch.empty_like(x[1 - source]) for source in (0, 1)]
        seconds = []
        for _ in range(4):
            if not bench.finish(PATIENCE_S):
                return times
            begun = time.perf_counter()
            for source in (0, 1):
                bench.copy(source, place, x[source], y[source])
            if not bench.finish(PATIENCE_S):
                return times
            seconds.append(time.perf_counter() - begun)
        times[n_bytes] = min(seconds[1:])
    return times


def _compared(found: Tensor, expected: Tensor, sent: Tensor) -> TrialRecord:
    """What arrived against what is known there by another way, and its sum against the host's."""
    n_wrong = int((found != expected).sum())
    if n_wrong == len(sent) and not bool(found.any()):
        return TrialRecord("lost", "nothing was written")
    if n_wrong:
        return TrialRecord("wrong", f"{n_wrong} of {len(sent)} words differ")
    if int(found.sum()) != int(sent.sum()):  # both wrap around
        return TrialRecord("wrong", "their sum differs")
    return PASSED


def _slots(bench: LinkBench, writer: int, place: Place, n_words: int, most: int = 0) -> Slots:
    """Empty slots for packets: so many words of each program and half."""
    slots = bench.slots(writer, place, N_PROGRAMS * 2 * max(n_words, most))
    slots.memory.zero_()
    return slots


def _hung() -> TrialRecord:
    return TrialRecord("hung", f"for {PATIENCE_S:.0f} s")


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Fresh ones at each call, on the host, of all bits."""
    generator = torch.Generator()
    generator.seed()
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype, generator=generator)


def refused(why: EngineError | str) -> Both:
    """For what could not be begun."""
    found = TrialRecord("refused", str(why).rstrip("."))
    return found, found


def crashed(error: BaseException) -> Both:
    """For what ended with an error of the driver."""
    found = TrialRecord("crashed", str(error).partition("\n")[0][:120].rstrip("."))
    return found, found
