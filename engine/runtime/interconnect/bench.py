"""Test bench of two real GPUs: slots that one writes and the other reads, copies, waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.cuda import nccl

from engine.backends.gpu.comm.slots import PacketSlot, new_slot
from engine.errors import EngineError
from engine.hardware.devices.links import read_topology
from engine.hardware.devices.routes import Place
from engine.hardware.host_memory import HostTensor
from engine.runtime.interconnect.exchange import warm_up

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
    """Return a new stream of a GPU."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
