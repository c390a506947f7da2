"""What two GPUs write for each other when a link is tried: packets in rounds, and many at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from engine.devices.routes import Place
from engine.gpu.comm.slots import PacketSlot
from engine.gpu.kernels import link_trial
from engine.gpu.launch.kernel_launch import launch
from engine.gpu.launch.target import target_of
from engine.planning.speed.link_records import TrialRecord

N_PROGRAMS = 8
SIZE = 128
"""Pairs of packets that a program of as many threads writes at once."""

BULK_SIZE = 512

LIMIT = 200_000_000 >> 10
"""How long a kernel waits for a round, in units of 1024 ns: 0.2 s."""

LIMIT_POLLS = 200_000
"""The same where kernels have no clock: a poll takes a microsecond or so."""

INTERPRETED_POLLS = 2
"""Interpreted kernels run one after the other: what has not come by then never comes."""

PATIENCE_S = 5.0
"""How long the host waits for all that it began; kernels give up before."""

PASSED = TrialRecord("passed")


class LinkBench(Protocol):
    """Two devices and what connects them.

    Attributes:
        devices: in torch.
        names: their ids.
        spins: kernels of both run at once, so one can wait for what the other writes.
    """

    devices: tuple[torch.device, torch.device]
    names: tuple[str, str]
    spins: bool

    def slot(self, writer: int, place: Place, n_packet: int) -> PacketSlot:
        """Memory for packets that device `writer` (0 or 1) writes, all zeros.

        Raises:
            EngineError: there is no such memory.
        """
        ...

    def carry(self, slot: PacketSlot) -> None:
        """Called between writing and reading where nothing spins."""
        ...

    def copy(self, source: int, place: Place, x: Tensor, y: Tensor) -> None:
        """Begin to copy x on device `source` to y on the other one, in one step or by the host."""
        ...

    def gather(self, values: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Begin to bring both devices' values, one after the other, to both, by NCCL.

        Raises:
            EngineError: there is no NCCL, or it fails.
        """
        ...

    def on(self, side: int) -> AbstractContextManager[object]:
        """Begin what comes on that device, beside what the other one does."""
        ...

    def finish(self, seconds: float) -> bool:
        """Wait for all that was begun on both devices; False if it takes longer."""
        ...

    def lanes(self, source: int) -> tuple[int, int]:
        """Generation and width of a device's slot now; zeros where the driver does not tell."""
        ...


class Exchange:
    """Rounds of packets between two devices.

    Args:
        slots: what the first device writes, and what the second one writes.
        n_pairs: that a program of each writes per round.
        n_rows: rounds until data come again.
    """

    def __init__(
        self,
        bench: LinkBench,
        slots: tuple[PacketSlot, PacketSlot],
        n_pairs: tuple[int, int],
        n_rows: int,
    ) -> None:
        self._bench, self._slots, self._n_pairs = bench, slots, n_pairs
        self._n_rows, self._most = n_rows, max(n_pairs)
        words = [random_words(n_rows, N_PROGRAMS, 2 * self._most) for _ in range(2)]
        self._words = [[w.to(device) for w in words] for device in bench.devices]
        self._tables = [
            torch.tensor([slots[i].source, slots[1 - i].goal], dtype=torch.int64).to(device)
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
            return 0.0, [hung(self)] * 2
        begun = time.perf_counter()
        if self._bench.spins:
            for side in (0, 1):
                with self._bench.on(side):
                    self.start(side, n_rounds)
        else:
            for at in range(n_rounds):
                self.step(self._first + at)
        if not self._bench.finish(PATIENCE_S):
            return 0.0, [hung(self)] * 2
        seconds = time.perf_counter() - begun
        self._first += n_rounds
        return seconds, self._verdicts(n_rounds)

    def start(self, side: int, n_rounds: int) -> None:
        """Begin rounds on one device, in one kernel, while the other one does the same."""
        has_asm = target_of(self._bench.devices[side]).has_asm
        launch(
            link_trial.exchange, (N_PROGRAMS,), self._words[side][side],
            self._words[side][1 - side], self._tables[side], self._status[side], self._first,
            n_rounds, self._n_rows, self._n_pairs[side], self._n_pairs[1 - side], self._most,
            LIMIT if has_asm else LIMIT_POLLS, SIZE=SIZE, ASM=has_asm,
        )  # fmt: skip

    def step(self, number: int) -> None:
        """One round by kernels that run one after the other."""
        for side in (0, 1):
            launch(
                link_trial.write_round, (N_PROGRAMS,), self._words[side][side],
                self._tables[side], number, self._n_rows, self._n_pairs[side], self._most,
                SIZE=SIZE, ASM=False,
            )  # fmt: skip
        for slot in self._slots:
            self._bench.carry(slot)
        for side in (0, 1):
            launch(
                link_trial.read_round, (N_PROGRAMS,), self._words[side][1 - side],
                self._tables[side], self._status[side], number, self._n_rows,
                self._n_pairs[1 - side], self._most, INTERPRETED_POLLS, SIZE=SIZE, ASM=False,
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
                found.append(TrialRecord("wrong", f"{n_wrong} pairs of words differ"))
            elif (n_lost or reached[goal] < n_rounds) and reached[goal] <= reached[source]:
                why = f"after {reached[goal]} of {n_rounds} exchanges"
                found.append(TrialRecord("lost", why))
            else:
                found.append(PASSED)
        return found


def warm_up(device: torch.device) -> None:
    """Begin each kernel once, so that it is compiled and on the device, without doing anything."""
    words = torch.zeros(2, dtype=torch.int32, device=device)
    table = torch.zeros(2, dtype=torch.int64, device=device)
    status = torch.zeros(N_PROGRAMS, 3, dtype=torch.int64, device=device)
    has_asm = target_of(device).has_asm
    launch(
        link_trial.exchange, (N_PROGRAMS,), words, words, table, status, 0, 0, 1, 0, 0, 1, 0,
        SIZE=SIZE, ASM=has_asm,
    )  # fmt: skip
    store_pairs(words[:0], table, 0)
    load_pairs(words[:0], table)


def store_pairs(words: Tensor, table: Tensor, flag: int) -> None:
    """Begin to write words (2 n,) int32 as packets to the address that `table` names first."""
    n = len(words) // 2
    launch(
        link_trial.store_pairs, (max(1, -(-n // BULK_SIZE)),), words, table, flag, n,
        SIZE=BULK_SIZE, ASM=target_of(words.device).has_asm,
    )  # fmt: skip


def load_pairs(out: Tensor, table: Tensor) -> None:
    """Begin to read packets, as words and flags by turns (4 n,) int32."""
    n = len(out) // 4
    launch(
        link_trial.load_pairs, (max(1, -(-n // BULK_SIZE)),), out, table, n, SIZE=BULK_SIZE,
        ASM=target_of(out.device).has_asm,
    )  # fmt: skip


def random_words(*shape: int) -> Tensor:
    """Fresh ones at each call, int32 of all bits, on the host."""
    generator = torch.Generator()
    generator.seed()
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, generator=generator)


def address_table(slot: PacketSlot, device: torch.device, *, is_writer: bool) -> Tensor:
    """What kernels on a device find a slot by."""
    address = slot.source if is_writer else slot.goal
    return torch.tensor([address], dtype=torch.int64).to(device)


def compared(found: Tensor, expected: Tensor, sent: Tensor) -> TrialRecord:
    """What arrived against what is known there by another way, and its sum against the host's."""
    n_wrong = int((found != expected).sum())
    if n_wrong and not bool(found.any()):
        return TrialRecord("lost", "nothing was written")
    if n_wrong:
        return TrialRecord("wrong", f"{n_wrong} of {len(sent)} words differ")
    if int(found.sum(dtype=torch.int64)) != int(sent.sum(dtype=torch.int64)):
        return TrialRecord("wrong", "their sum differs")
    return PASSED


_abandoned: list[object] = []
"""What devices may still write to."""


def hung(*held: object) -> TrialRecord:
    """For what does not come to its end; `held` is never used for anything else."""
    _abandoned.append(held)
    return TrialRecord("hung", f"for {PATIENCE_S:.0f} s")


def with_figures(
    trials: Sequence[TrialRecord], seconds: dict[int, float], lanes: Sequence[tuple[int, int]] = ()
) -> tuple[TrialRecord, TrialRecord]:
    """Trials that passed, with what was measured of both directions at once."""
    there, back = (
        TrialRecord(trial.verdict, trial.why, seconds, *lanes[n : n + 1])
        for n, trial in enumerate(trials)
    )
    return there, back
