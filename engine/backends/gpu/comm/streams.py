"""Queues of device work, CUDA streams and events, used to write copies between GPUs.

A queue is a CUDA stream: its operations run in order, and only events order operations in different
queues. With interpreted kernels, everything runs immediately.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from engine.errors import CommError, Sentence
from engine.hardware.host_memory import HostTensor

STALL_S = 4.0
"""If no rank makes progress for this many seconds while the host waits, a rank counts as hung;
between two all-reduces in a pass, there is only half a block's work."""

WAKING_S = 0.5  # seconds for waiting kernels to finish after an abort; they poll constantly
POLL_S = 50e-6  # seconds between polls of an event; other threads run meanwhile


class DoneEvent:
    """Event in a queue that runs operations immediately."""

    def query(self) -> bool:
        """Return whether all work before the event in its queue is done."""
        return True


DeviceEvent = torch.cuda.Event | DoneEvent


class HostQueue:
    """One device's operations, in order; here they run immediately, on the host."""

    def run(self, step: Callable[[], object]) -> None:
        """Compute with torch on the device, in memory that is kept until the work is done."""
        step()

    def copy(self, goal: Tensor, source: Tensor) -> None:
        """Copy from or to host memory or another GPU's memory; both tensors are contiguous."""
        goal.copy_(source)

    def record(self) -> DeviceEvent:
        """Return an event at the current end of the queue."""
        return DoneEvent()

    def wait(self, event: DeviceEvent) -> None:
        """Make all later operations wait for a recorded event; here, it has already occurred."""


class HostQueues:
    """A rank's queues, and memory for them; here for interpreted kernels.

    Attributes:
        compute: queue in which the model computes.
        sums: queue in which all-reduces add values.
        up: queue for copies to the host.
        down: queue for copies from the host or from other GPUs.
    """

    def __init__(self) -> None:
        self.compute = self.sums = self.up = self.down = HostQueue()

    def all(self) -> Sequence[Queue]:
        """Return all queues, with the creating thread's current stream as `compute`."""
        return (self.compute,)

    def empty(self, n_bytes: int) -> Tensor:
        """Return uninitialised device memory, uint8."""
        return torch.empty(n_bytes, dtype=torch.uint8)

    def pinned(self, n_bytes: int) -> HostTensor:
        """Return pinned host memory, uint8, which GPUs access directly."""
        return HostTensor((n_bytes,), torch.uint8, torch.device("cpu"))


class CudaQueue:
    """A queue backed by a CUDA stream; if None, by the calling thread's current stream."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._own = stream
        self._sources: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._device)

    def run(self, step: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            step()

    def copy(self, goal: Tensor, source: Tensor) -> None:
        """See `HostQueue.copy`.

        Torch copies between GPUs in the source device's current stream, which must not be the
        stream in which a rank computes; the two streams wait for each other before and after.
        """
        with ExitStack() as stack:
            if source.is_cuda and source.device != self._device:
                stack.enter_context(torch.cuda.stream(self._stream_on(source.device)))
            stack.enter_context(torch.cuda.stream(self.stream))
            goal.copy_(source, non_blocking=True)

    def record(self) -> DeviceEvent:
        event: torch.cuda.Event = self.stream.record_event()
        return event

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)

    def _stream_on(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._sources:
            self._sources[device] = new_stream(device)
        return self._sources[device]


class CudaQueues:
    """Queues of a rank on a GPU: the stream in which it computes, and three others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.compute = CudaQueue(device, None)
        self.sums = CudaQueue(device, new_stream(device))
        self.up = CudaQueue(device, new_stream(device))
        self.down = CudaQueue(device, new_stream(device))
        self._home = CudaQueue(device, torch.cuda.current_stream(device))

    def all(self) -> Sequence[Queue]:
        return self._home, self.sums, self.up, self.down

    def empty(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device=self._device)

    def pinned(self, n_bytes: int) -> HostTensor:
        return HostTensor((n_bytes,), torch.uint8, self._device)


Queue = HostQueue | CudaQueue
Queues = HostQueues | CudaQueues


def new_stream(device: torch.device) -> torch.cuda.Stream:
    make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
    return make(device)


def queues_of(device: torch.device) -> Queues:
    return CudaQueues(device) if device.type == "cuda" else HostQueues()


class Marks:
    """Progress of the ranks' devices, measured by events that ranks record as they go.

    Args:
        devices: names of the ranks' devices, for error messages.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._marks: list[deque[tuple[float, DeviceEvent]]] = [deque() for _ in devices]
        self._seen = [0] * len(devices)
        self._n_over = [0] * len(devices)
        self._problem: CommError | None = None

    def leave(self, rank: int, event: DeviceEvent) -> None:
        """Record an event at the current end of a rank's work."""
        with self._lock:
            self._pass_over(rank)
            self._marks[rank].append((time.perf_counter(), event))

    def has_moved(self, rank: int) -> bool | None:
        """Return whether a device passed a mark since the last call; None if no mark is left."""
        with self._lock:
            self._pass_over(rank)
            has_moved = self._n_over[rank] != self._seen[rank]
            self._seen[rank] = self._n_over[rank]
            return has_moved if self._marks[rank] else None

    def until(self, events: Sequence[DeviceEvent], grace_s: float = 0.0) -> None:
        """Wait for events.

        Args:
            grace_s: minimum seconds to wait even if a rank is known to hang, since it may recover.

        Raises:
            CommError: no rank has made progress for `STALL_S`. It names the rank with the oldest
                unfinished mark, for which the others wait. Later calls do not wait again.
        """
        seen, deadline, patient_until = (-1, -1), 0.0, time.monotonic() + grace_s
        while n_left := sum(not event.query() for event in events):
            if self._problem is not None and time.monotonic() >= patient_until:
                raise self._problem
            now = n_left, self._total()
            if now != seen:
                seen, deadline = now, time.monotonic() + STALL_S
            if time.monotonic() > deadline:
                self._problem = self._stalled()
            time.sleep(POLL_S)

    def forget(self) -> None:
        """Discard all recorded marks, and the error if there is one."""
        with self._lock:
            self._problem = None
            for marks in self._marks:
                marks.clear()

    def _pass_over(self, rank: int) -> None:
        marks = self._marks[rank]
        while marks and marks[0][1].query():
            marks.popleft()
            self._n_over[rank] += 1

    def _total(self) -> int:
        with self._lock:
            for rank in range(len(self._marks)):
                self._pass_over(rank)
            return sum(self._n_over)

    def _stalled(self) -> CommError:
        with self._lock:
            oldest = [(m[0][0], rank) for rank, m in enumerate(self._marks) if m]
        rank = min(oldest)[1] if oldest else 0
        problem = Sentence("has made no progress for {seconds:.0f} seconds", seconds=STALL_S)
        return CommError(rank, problem, self._devices[rank])
