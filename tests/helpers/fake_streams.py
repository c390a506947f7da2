"""Fake GPUs whose operations happen late, in any order that streams and events allow.

Queued operations run in `Machine.drain` or when the host asks for an event, in random order: a
queue may get far ahead of another one, or far behind. So a wait that is missing, or a buffer that
is written too early, gives wrong numbers for some seed.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from engine.hardware.host_memory import HostTensor

GARBAGE = 0xFF
"""Byte that fills new memory: it makes NaN in every float type."""


class Machine:
    """All queues of all devices.

    Args:
        seed: seed of the order in which operations run.
        dropped: name of a wait to leave out, as in `sites`; "" for none.
        is_pinned: whether devices can read and write the host's memory.

    Attributes:
        sites: places in the engine's code that made queues wait: "file:line".
        is_hung: whether no operation runs any more.
    """

    def __init__(self, seed: int, dropped: str = "", *, is_pinned: bool = True) -> None:
        self.dropped = dropped
        self.is_pinned = is_pinned
        self.sites: set[str] = set()
        self.lock = threading.RLock()
        self._random = Random(seed)
        self._queues: list[FakeQueue] = []
        self._order: list[FakeQueue] = []
        self._pageable: list[tuple[int, int]] = []
        self.is_hung = False

    def queue(self) -> FakeQueue:
        """Return a new queue."""
        with self.lock:
            self._queues.append(made := FakeQueue(self))
            self._order.append(made)
            return made

    def drain(self) -> None:
        """Do all operations."""
        while self.step():
            pass
        assert not any(queue.left for queue in self._queues), "queues wait for each other for ever"

    def step(self) -> bool:
        """Do one operation of any queue; return False if none can go on."""
        with self.lock:
            if self.is_hung:
                return False
            if self._random.random() < 0.1:
                self._random.shuffle(self._order)
            return any(queue.do_next() for queue in self._order)

    def pinned(self, n_bytes: int) -> HostTensor:
        """Return memory of the host, pinned if the machine can do that."""
        held = HostTensor((n_bytes,), torch.uint8, torch.device("cpu"))
        held.value.fill_(GARBAGE)
        held.is_pinned = self.is_pinned
        if not self.is_pinned:
            start = held.value.data_ptr()
            self._pageable.append((start, start + n_bytes))
        return held

    def is_pageable(self, x: Tensor) -> bool:
        """Return whether x lies in memory of the host that is not pinned."""
        return any(start <= x.data_ptr() < stop for start, stop in self._pageable)


class FakeEvent:
    """Event that is over when its queue gets to it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.is_over = False

    def query(self) -> bool:
        if not self.is_over:
            self._machine.step()
        return self.is_over


class FakeQueue:
    """CUDA stream: operations that run in order."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.left: deque[Callable[[], bool]] = deque()

    def do_next(self) -> bool:
        """Do the first operation, if it need not wait; return whether it was done."""
        if self.left and self.left[0]():
            self.left.popleft()
            return True
        return False

    def _append(self, step: Callable[[], object]) -> None:
        def do() -> bool:
            step()
            return True

        with self._machine.lock:
            self.left.append(do)

    def run(self, step: Callable[[], object]) -> None:
        self._append(step)

    def copy(self, goal: Tensor, source: Tensor) -> None:
        assert goal.shape == source.shape
        assert goal.dtype == source.dtype
        assert goal.is_contiguous()
        assert source.is_contiguous()
        if self._machine.is_pageable(source):
            source = source.clone()  # the driver takes it at once
        self._append(lambda: goal.copy_(source))
        if self._machine.is_pageable(goal):
            event = self.record()
            while not event.query():
                pass

    def record(self) -> FakeEvent:
        event = FakeEvent(self._machine)
        self._append(lambda: setattr(event, "is_over", True))
        return event

    def wait(self, event: FakeEvent) -> None:
        frame = sys._getframe(1)
        site = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        with self._machine.lock:
            self._machine.sites.add(site)
            if site != self._machine.dropped:
                self.left.append(lambda: event.is_over)


class FakeQueues:
    """The queues of one rank."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.compute, self.sums, self.up, self.down = (machine.queue() for _ in range(4))

    def all(self) -> list[FakeQueue]:
        return [self.compute, self.sums, self.up, self.down]

    def empty(self, n_bytes: int) -> Tensor:
        return torch.full((n_bytes,), GARBAGE, dtype=torch.uint8)

    def pinned(self, n_bytes: int) -> HostTensor:
        return self._machine.pinned(n_bytes)
