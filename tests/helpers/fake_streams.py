"""Made-up GPUs whose operations happen late, in any order that streams and events allow.

What was put into queues is done by `Machine.drain` or when the host asks for an event, and then
by whim: a queue may get far ahead of another one, or far behind. So a wait that is missing, or a
buffer that is written too early, gives wrong numbers for some seed.
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
"""What new memory holds: no number, in every type."""


class Machine:
    """All queues of all devices.

    Args:
        dropped: the wait that never happens, as `sites` names it.
        is_pinned: the host's memory can be read and written by devices.

    Attributes:
        sites: where in the engine's code queues were told to wait: "file:line".
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
        """A new one."""
        with self.lock:
            self._queues.append(made := FakeQueue(self))
            self._order.append(made)
            return made

    def drain(self) -> None:
        """Do everything."""
        while self.step():
            pass
        assert not any(queue.left for queue in self._queues), "queues wait for each other for ever"

    def step(self) -> bool:
        """Do one operation of any queue; False if none can go on."""
        with self.lock:
            if self.is_hung:
                return False
            if self._random.random() < 0.1:
                self._random.shuffle(self._order)
            return any(queue.do_next() for queue in self._order)

    def pinned(self, n_bytes: int) -> HostTensor:
        """Memory of the host."""
        held = HostTensor((n_bytes,), torch.uint8, torch.device("cpu"))
        held.value.fill_(GARBAGE)
        held.is_pinned = self.is_pinned
        if not self.is_pinned:
            start = held.value.data_ptr()
            self._pageable.append((start, start + n_bytes))
        return held

    def is_pageable(self, x: Tensor) -> bool:
        """Whether it lies in memory of the host that is not pinned."""
        return any(start <= x.data_ptr() < stop for start, stop in self._pageable)


class FakeEvent:
    """Happens when its queue gets there."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.is_over = False

    def query(self) -> bool:
        if not self.is_over:
            self._machine.step()
        return self.is_over


class FakeQueue:
    """A stream."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.left: deque[Callable[[], bool]] = deque()

    def do_next(self) -> bool:
        """Do the first operation, if it need not wait."""
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
    """Of one rank."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.compute, self.sums, self.up, self.down = (machine.queue() for _ in range(4))

    def all(self) -> list[FakeQueue]:
        return [self.compute, self.sums, self.up, self.down]

    def empty(self, n_bytes: int) -> Tensor:
        return torch.full((n_bytes,), GARBAGE, dtype=torch.uint8)

    def pinned(self, n_bytes: int) -> HostTensor:
        return self._machine.pinned(n_bytes)
