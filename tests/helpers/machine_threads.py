"""Machines that are threads of a test, with queues in place of connections."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
from engine import EngineError, LoadParams, Model
from engine.distributed.machine_runtime import follow, open_on_machines, shared_params
from engine.distributed.machines import END, Machines
from engine.runtime import thread_runtime as opening
from tests.helpers.queue_wires import Queues, QueueWire


class MachineThreads:
    """Machines of which all but the first follow on threads of their own.

    Args:
        n: number of machines.
        paths: each follower's path of the file; "" for that of the first machine.

    Attributes:
        ends: error with which each follower has ended; None if it was told to.
        failures: errors that machines have called fatal.
    """

    def __init__(self, n: int, paths: Sequence[str] = ()) -> None:
        self.queues = Queues(["cpu"] * n)
        self.failures: list[EngineError] = []
        self.wires = [QueueWire(self.queues, number) for number in range(n)]
        self.machines = [Machines(wire, self.failures.append) for wire in self.wires]
        self.ends: dict[int, EngineError | None] = {}
        given = [*paths, *[""] * n]
        self._threads = [
            threading.Thread(target=self._follow, args=(number, given[number - 1]), daemon=True)
            for number in range(1, n)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, number: int, path: str) -> None:
        try:
            follow(self.machines[number], path, 1)
            self.ends[number] = None
        except EngineError as error:
            self.ends[number] = error
            self.queues.is_broken.set()

    def close(self) -> None:
        """Have the followers leave, and wait for them."""
        if not self.queues.is_broken.is_set():
            self.machines[0].orders.send(END)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


@contextmanager
def machines(n: int, paths: Sequence[str] = ()) -> Iterator[MachineThreads]:
    """Have models of this process computed by n machines."""
    found = MachineThreads(n, paths)
    before = opening._opener_on_machines
    opening.open_on_machines_by(partial(open_on_machines, found.machines[0]))
    try:
        yield found
    finally:
        opening.open_on_machines_by(before)
        found.close()


def model_on(sizes: Sequence[int], params: LoadParams, **more: Any) -> Model:
    """Load a model on machines with so many ranks each."""
    return Model(replace(shared_params(params), machines=tuple(sizes), **more))
