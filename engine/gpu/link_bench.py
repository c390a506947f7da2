"""Two real GPUs to try links on: memory that one writes and the other reads, copies, waiting."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.gpu.kernels import link_trial as kernels
from engine.gpu.launch import launch
from engine.gpu.link_trial import BULK_SIZE, N_PROGRAMS, SIZE, Slots
from engine.gpu.target import target_of
from engine.parallel.ways import Place

CHUNK_BYTES = 1 << 20
"""Of a copy by way of the host: so much goes up before it goes down."""

POLL_S = 20e-6


class GpuBench:
    """Two GPUs of this process; see `engine.gpu.link_trial.LinkBench`.

    Args:
        numbers: of the GPUs, as CUDA counts them.
        names: what they are called.
    """

    spins = True

    def __init__(self, numbers: Sequence[int], names: tuple[str, str]) -> None:
        first, second = (torch.device("cuda", number) for number in numbers)
        self.devices = first, second
        self.names = names
        # two copies at once need streams that do not wait for each other
        self._streams = [[_stream(device) for device in self.devices] for _ in (0, 1)]
        self._staging: dict[int, Tensor] = {}

    def warm_up(self) -> None:
        """Make contexts, and compile and load the kernels.

        Raises:
            EngineError: kernels cannot be started here.
        """
        for device in self.devices:
            words = torch.zeros(N_PROGRAMS, 1, dtype=torch.int32, device=device)
            table = torch.tensor([words.data_ptr()] * 2, dtype=torch.int64, device=device)
            status = torch.zeros(N_PROGRAMS, 3, dtype=torch.int64, device=device)
            has_asm = target_of(device).has_asm
            launch(
                kernels.exchange, (N_PROGRAMS,), words, words, table, status, 0, 0, 1, 0, 0, 1, 0,
                SIZE=SIZE, ASM=has_asm,
            )  # fmt: skip
            launch(kernels.store_words, (1,), table, table, 0, SIZE=BULK_SIZE, ASM=has_asm)
        if not self.finish(60):
            raise EngineError(f"{' or '.join(self.names)} does not answer.")

    def slots(self, writer: int, place: Place, n: int) -> Slots:
        """See `LinkBench.slots`."""
        goal = self.devices[1 - writer]
        if place == "host":
            memory = torch.zeros(n, dtype=torch.int64, pin_memory=True)
        else:
            self._open_peers()
            memory = torch.zeros(n, dtype=torch.int64, device=goal)
        return Slots(memory.data_ptr(), memory.data_ptr(), memory)

    def carry(self, slots: Slots) -> None:
        """Memory that both see needs nothing."""

    def copy(self, source: int, place: Place, x: Tensor, y: Tensor) -> None:
        """See `LinkBench.copy`."""
        here, there = self._streams[source][source], self._streams[source][1 - source]
        if place == "peer":
            with torch.cuda.stream(there), torch.cuda.stream(here):
                y.copy_(x, non_blocking=True)
            return
        staging = self._staged(source, x)
        for start in range(0, len(x), CHUNK_BYTES // x.itemsize):
            part = slice(start, start + CHUNK_BYTES // x.itemsize)
            with torch.cuda.stream(here):
                staging[part].copy_(x[part], non_blocking=True)
            there.wait_event(here.record_event())
            with torch.cuda.stream(there):
                y[part].copy_(staging[part], non_blocking=True)

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

    def _staged(self, source: int, x: Tensor) -> Tensor:
        """Pinned memory of the host for what one device sends."""
        held = self._staging.get(source)
        if held is None or len(held) < len(x):
            held = torch.empty(len(x), dtype=x.dtype, pin_memory=True)
            self._staging[source] = held
        return held

    def _open_peers(self) -> None:
        """Let each of them reach the other's memory; torch does that for its first copy."""
        ones = [torch.ones(1, device=device) for device in self.devices]
        for source in (0, 1):
            ones[1 - source].copy_(ones[source])


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
