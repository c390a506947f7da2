"""Exchanges in a link's trial: packets that two GPUs write for each other, in rounds or in bulk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.cuda import nccl

from engine.backends.gpu.comm.slots import PacketSlot, new_slot
from engine.backends.gpu.kernels import link_trial
from engine.backends.gpu.launch.configs import target_of
from engine.backends.gpu.launch.kernel_launch import launch
from engine.errors import EngineError, Sentence, either
from engine.hardware.devices.topology import Place, read_topology
from engine.hardware.host_memory import HostTensor
from engine.planning.speed.link_records import TrialRecord

N_PROGRAMS = 8
"""Number of programs per kernel in an exchange."""

SIZE = 128
"""Number of packet pairs that a program writes together, one per thread."""

BULK_SIZE = 512
"""Number of packet pairs per program in a bulk write or read."""

LIMIT = 200_000_000 >> 10
"""Timeout for a round in a kernel, in units of 1024 ns: 0.2 s."""

LIMIT_POLLS = 200_000
"""The same timeout in polls, for kernels without a clock; a poll takes about a microsecond."""

INTERPRETED_POLLS = 2
"""The same for interpreted kernels, which run one by one, so missing packets never come."""

PATIENCE_S = 5.0
"""Seconds the host waits for the devices; kernels give up earlier."""

PASSED = TrialRecord("passed")
"""Result of a passed trial, without times."""


CHUNK_BYTES = 1 << 20
"""Chunk size of a copy through host memory, in bytes; each chunk goes up, then down."""

POLL_S = 20e-6
"""Seconds between two polls of an event."""


class GpuBench:
    """Two GPUs of this process and the link between them, to be used by trials.

    Args:
        numbers: CUDA indices of the GPUs.
        names: ids of the GPUs.

    Attributes:
        devices: the torch devices.
        spins: whether kernels run concurrently on both, so that each can wait for the other.
    """

    spins = True

    def __init__(self, numbers: Sequence[int], names: tuple[str, str]) -> None:
        first, second = (torch.device("cuda", number) for number in numbers)
        self.devices = first, second
        self.names = names
        # two concurrent copies need streams that do not wait for each other
        self._streams = [[_stream(device) for device in self.devices] for _ in (0, 1)]
        self._staging: dict[int, HostTensor] = {}

    def warm_up(self) -> None:
        """Create contexts, and compile and load the kernels.

        Raises:
            EngineError: kernels cannot be launched on these GPUs.
        """
        for device in self.devices:
            warm_up(device)
        if not self.finish(60):
            raise EngineError("{devices} is not responding.", devices=either(self.names))

    def slot(self, writer: int, place: Place, n_packet: int) -> PacketSlot:
        """Return a zeroed slot, as in all-reduces, for packets from device `writer` (0 or 1).

        Raises:
            EngineError: such memory is not available.
        """
        if place == "peer" and torch.version.hip:
            raise EngineError("Kernels on AMD GPUs can exchange values in host memory only.")
        return new_slot(place, n_packet, self.devices[writer], self.devices[1 - writer])

    def carry(self, slot: PacketSlot) -> None:
        """Make written packets readable; called between writes and reads if not `spins`.

        Does nothing here, as both devices see the same memory.
        """

    def copy(self, source: int, place: Place, x: Tensor, y: Tensor) -> None:
        """Start copying x on device `source` to y on the other, directly or via the host."""
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
        """Start an all-gather of both devices' values with NCCL.

        Raises:
            EngineError: NCCL is missing or fails.
        """
        streams = [self._streams[side][side] for side in (0, 1)]
        try:
            nccl.all_gather(values, outputs, streams=streams)
        except (RuntimeError, AttributeError) as error:
            why = str(error).partition("\n")[0][:120]
            raise EngineError("NCCL: {problem}", problem=why) from error

    def on(self, side: int) -> AbstractContextManager[object]:
        """Enter the benchmark stream of device `side`."""
        return _current(self._streams[side][side])

    def finish(self, seconds: float) -> bool:
        """Wait for all work on both devices; return False if that takes longer than `seconds`."""
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
        """Return the current PCIe generation and lanes of a device's slot; zeros if unknown."""
        slot = read_topology().pcie.get(str(self.devices[source]))
        return (slot.generation, slot.width) if slot else (0, 0)

    def _staged(self, source: int, x: Tensor) -> Tensor:
        held = self._staging.get(source)
        if held is None or len(held.value) < len(x):
            held = HostTensor(x.shape, x.dtype, self.devices[source])
            self._staging[source] = held
        return held.value


@contextmanager
def _current(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream and its device torch's current ones.

    The device is set first, because leaving a stream restores the previous device, which would
    create a context of hundreds of MB on a GPU that is not under test.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


class Exchange:
    """Rounds of packets between two devices.

    Args:
        bench: the devices.
        slots: slots that the first and the second device write.
        n_pairs: number of packet pairs that each device's programs write per round.
        n_rows: number of rounds after which the data repeats.
    """

    def __init__(
        self, bench: GpuBench, slots: tuple[PacketSlot, PacketSlot], n_pairs: tuple[int, int],
        n_rows: int,
    ) -> None:  # fmt: skip
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
        """Run rounds; return their duration in seconds, and the result for each direction."""
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
        """Launch one device's kernel for all rounds; it waits for the other device's."""
        has_asm = target_of(self._bench.devices[side]).has_asm
        launch(
            link_trial.exchange, (N_PROGRAMS,), self._words[side][side],
            self._words[side][1 - side], self._tables[side], self._status[side], self._first,
            n_rounds, self._n_rows, self._n_pairs[side], self._n_pairs[1 - side], self._most,
            LIMIT if has_asm else LIMIT_POLLS, SIZE=SIZE, ASM=has_asm,
        )  # fmt: skip

    def step(self, number: int) -> None:
        """Run one round, with kernels one after the other."""
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
        """Return each direction's result, given both sides' counts of lost and wrong packets.

        A side that misses a packet stops, so the other side then misses later rounds as well. If
        both miss packets, the direction towards the side that stopped first has failed, or both
        directions if they stopped in the same round.
        """
        seen = [status.cpu() for status in self._status]
        reached = [int(status[:, 0].min()) for status in seen]
        found = []
        for source in (0, 1):
            goal = 1 - source
            n_lost, n_wrong = (int(n) for n in seen[goal][:, 1:].sum(dim=0))
            if n_wrong:
                why = Sentence("{n} pairs of words differ", n=n_wrong)
                found.append(TrialRecord("wrong", why))
            elif (n_lost or reached[goal] < n_rounds) and reached[goal] <= reached[source]:
                why = Sentence("after {n} of {total} exchanges", n=reached[goal], total=n_rounds)
                found.append(TrialRecord("lost", why))
            else:
                found.append(PASSED)
        return found


def warm_up(device: torch.device) -> None:
    """Launch each kernel once with nothing to do, so that it is compiled and loaded."""
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
    """Start writing words (2 n,), int32, as packets to the first address in `table`."""
    n = len(words) // 2
    launch(
        link_trial.store_pairs, (max(1, -(-n // BULK_SIZE)),), words, table, flag, n,
        SIZE=BULK_SIZE, ASM=target_of(words.device).has_asm,
    )  # fmt: skip


def load_pairs(out: Tensor, table: Tensor) -> None:
    """Start reading packets, alternating words and flags, from the first address in `table`.

    Args:
        out: output, (4 n,) int32.
    """
    n = len(out) // 4
    launch(
        link_trial.load_pairs, (max(1, -(-n // BULK_SIZE)),), out, table, n, SIZE=BULK_SIZE,
        ASM=target_of(out.device).has_asm,
    )  # fmt: skip


def random_words(*shape: int) -> Tensor:
    """Return random int32 words on the host, different for each call."""
    generator = torch.Generator()
    generator.seed()
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, generator=generator)


def address_table(slot: PacketSlot, device: torch.device, *, is_writer: bool) -> Tensor:
    """Return the address table through which kernels on a device find a slot."""
    address = slot.source if is_writer else slot.goal
    return torch.tensor([address], dtype=torch.int64).to(device)


def compared(found: Tensor, expected: Tensor, sent: Tensor) -> TrialRecord:
    """Compare received words with sent ones.

    Args:
        found: received words.
        expected: sent words on the same device, transferred by another route.
        sent: sent words on the host, for comparing sums.
    """
    n_wrong = int((found != expected).sum())
    if n_wrong and not bool(found.any()):
        return TrialRecord("lost", Sentence("nothing was written"))
    if n_wrong:
        return TrialRecord(
            "wrong", Sentence("{n} of {total} words differ", n=n_wrong, total=len(sent))
        )
    if int(found.sum(dtype=torch.int64)) != int(sent.sum(dtype=torch.int64)):
        return TrialRecord("wrong", Sentence("their sum differs"))
    return PASSED


_abandoned: list[object] = []
"""Memory that hung devices may still use."""


def hung(*held: object) -> TrialRecord:
    """Return the result for a trial that does not finish; memory in `held` is never freed."""
    _abandoned.append(held)
    return TrialRecord("hung", Sentence("for {n:.0f} s", n=PATIENCE_S))


def with_figures(
    trials: Sequence[TrialRecord], seconds: dict[int, float], lanes: Sequence[tuple[int, int]] = ()
) -> tuple[TrialRecord, TrialRecord]:
    """Return both directions' results with their common times.

    Args:
        trials: passed results, by direction.
        seconds: seconds by number of bytes.
        lanes: PCIe generation and lane count of each source's slot, if known.
    """
    there, back = (
        TrialRecord(trial.verdict, trial.why, seconds, *lanes[n : n + 1])
        for n, trial in enumerate(trials)
    )
    return there, back
