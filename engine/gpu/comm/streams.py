"""Operations that devices do later, in queues: what copies between GPUs are written with.

A queue is a stream of a GPU. Its operations happen in the order in which they were put there; only
events order those of different queues. Where kernels are interpreted everything happens at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import CommError
from engine.hardware.host_memory import HostTensor

STALL_S = 4.0
"""When no rank ends anything for this long while the host waits, one hangs: between two sums of a
pass there is half a block's work."""

WAKING_S = 0.5
"""Until kernels that waited have ended, once they were told to: they look all the time."""

POLL_S = 50e-6
"""Between looks at an event, in which other threads run."""


class DeviceEvent(Protocol):
    """A point in a queue."""

    def query(self) -> bool:
        """Whether all that was in the queue before it has been done."""
        ...


class Queue(Protocol):
    """What one device shall do, in this order."""

    def run(self, step: Callable[[], object]) -> None:
        """Compute with torch on the device, in memory that stays until it was done."""
        ...

    def copy(self, goal: Tensor, source: Tensor) -> None:
        """From or to the memory of the host or of another GPU; both without gaps."""
        ...

    def record(self) -> DeviceEvent:
        """Where the queue ends now."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Do what comes from now on after an event that was recorded already."""
        ...


class Queues(Protocol):
    """The queues of one rank, and memory for them."""

    @property
    def compute(self) -> Queue:
        """Where the model computes."""
        ...

    @property
    def sums(self) -> Queue:
        """Beside it, what adds up values."""
        ...

    @property
    def up(self) -> Queue:
        """Copies to the host."""
        ...

    @property
    def down(self) -> Queue:
        """Copies from there, or from other GPUs."""
        ...

    def all(self) -> Sequence[Queue]:
        """Those above, the first one as it was for the thread that made this."""
        ...

    def empty(self, n_bytes: int) -> Tensor:
        """Memory of the device, uint8."""
        ...

    def pinned(self, n_bytes: int) -> HostTensor:
        """Memory of the host that the GPUs read and write by themselves, uint8."""
        ...


class _Done:
    """An event of a queue whose operations happen at once."""

    def query(self) -> bool:
        return True


class HostQueue:
    """Does everything at once."""

    def run(self, step: Callable[[], object]) -> None:
        step()

    def copy(self, goal: Tensor, source: Tensor) -> None:
        goal.copy_(source)

    def record(self) -> DeviceEvent:
        return _Done()

    def wait(self, event: DeviceEvent) -> None:
        """It was done before it could be recorded."""


class HostQueues:
    """Of a rank whose kernels are interpreted."""

    def __init__(self) -> None:
        self.compute = self.sums = self.up = self.down = HostQueue()

    def all(self) -> Sequence[Queue]:
        return (self.compute,)

    def empty(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def pinned(self, n_bytes: int) -> HostTensor:
        return HostTensor((n_bytes,), torch.uint8, torch.device("cpu"))


class CudaQueue:
    """A stream.

    Args:
        stream: None for the one that is the thread's current one at each time.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._own = stream
        self._beside: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream; where it is the current one, at this time on this thread."""
        return self._own or torch.cuda.current_stream(self._device)

    def run(self, step: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            step()

    def copy(self, goal: Tensor, source: Tensor) -> None:
        """See `Queue.copy`.

        Torch copies between GPUs in the current stream of the one that gives, which must not be
        the one that a rank computes in; both streams wait for each other before and after.
        """
        with ExitStack() as stack:
            if source.is_cuda and source.device != self._device:
                stack.enter_context(torch.cuda.stream(self._beside_on(source.device)))
            stack.enter_context(torch.cuda.stream(self.stream))
            goal.copy_(source, non_blocking=True)

    def record(self) -> DeviceEvent:
        event: torch.cuda.Event = self.stream.record_event()
        return event

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)

    def _beside_on(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._beside:
            self._beside[device] = new_stream(device)
        return self._beside[device]


class CudaQueues:
    """Of a rank on a GPU: its stream, and three beside it."""

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


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Another stream of a GPU."""
    make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
    return make(device)


def queues_of(device: torch.device) -> Queues:
    """The queues of a rank on a device."""
    return CudaQueues(device) if device.type == "cuda" else HostQueues()


class Marks:
    """How far the ranks' devices are, by events that ranks leave behind as they go.

    Args:
        devices: of the ranks, as people know them.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._marks: list[deque[tuple[float, DeviceEvent]]] = [deque() for _ in devices]
        self._seen = [0] * len(devices)
        self._n_over = [0] * len(devices)
        self._problem: CommError | None = None

    def leave(self, rank: int, event: DeviceEvent) -> None:
        """Note where a rank's work ends now."""
        with self._lock:
            self._pass_over(rank)
            self._marks[rank].append((time.perf_counter(), event))

    def has_moved(self, rank: int) -> bool | None:
        """Whether a device has ended something since this was asked last; None if it has nothing.

        That is what it was given up to the last mark.
        """
        with self._lock:
            self._pass_over(rank)
            has_moved = self._n_over[rank] != self._seen[rank]
            self._seen[rank] = self._n_over[rank]
            return has_moved if self._marks[rank] else None

    def until(self, events: Sequence[DeviceEvent], grace_s: float = 0.0) -> None:
        """Wait for events.

        Args:
            grace_s: how long to wait at least, where a rank hangs that may have been woken since.

        Raises:
            CommError: no rank has ended anything for `STALL_S`; names the one whose work has been
                waiting longest, for without that the others cannot go on. Once it is so, it is
                not waited for again.
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
        """Expect nothing any more of what was noted, and nothing bad of what comes."""
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
        """Of what all ranks have ended."""
        with self._lock:
            for rank in range(len(self._marks)):
                self._pass_over(rank)
            return sum(self._n_over)

    def _stalled(self) -> CommError:
        with self._lock:
            oldest = [(m[0][0], rank) for rank, m in enumerate(self._marks) if m]
        rank = min(oldest)[1] if oldest else 0
        problem = f"has ended nothing of what it was given for {STALL_S:.0f} seconds"
        return CommError(rank, problem, self._devices[rank])
