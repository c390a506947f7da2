"""Faults of one rank of a model: it hangs, fails, or computes something else."""

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.kernels.running.call_log import CHECKED
from engine.backends.cpu.kernels.running.replay import KernelReplay
from engine.backends.cpu.thread_comm import ThreadCommunicator
from engine.model.forward.communicator import Group

OUT = 5
"""Index of the argument of an all-reduce that is the address of the sum."""


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranks count as silent soon."""
    monkeypatch.setattr("engine.parallel.watchdog.SILENT_S", 0.4)
    monkeypatch.setattr("engine.parallel.watchdog.LOOK_S", 0.05)
    monkeypatch.setattr("engine.parallel.rank_threads.LOOK_S", 0.05)
    monkeypatch.setattr("engine.parallel.rank_threads.GRACE_S", 0.1)


def this_rank() -> int:
    """Return the rank of the current thread; -1 for other threads."""
    name = threading.current_thread().name
    return int(name.removeprefix("tandem-rank-")) if name.startswith("tandem-rank-") else -1


class Fault:
    """A fault that happens once, on one rank, in the middle of a pass or of its replay.

    Args:
        rank: rank that has the fault.
        strike: returns the values to use in place of a sum (F32) that the rank has just received.

    Attributes:
        n_struck: number of times that the fault has happened.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, rank: int, strike: Callable[[Tensor], Tensor]
    ) -> None:
        self.rank = rank
        self.n_struck = 0
        self._strike = strike
        self._n_seen = 0
        sum_up, run = ThreadCommunicator.all_reduce, KernelReplay.run

        def all_reduce(
            comm: ThreadCommunicator, x: Tensor | None, group: Group, *shape: object
        ) -> Tensor:
            total = sum_up(comm, x, group)
            return self._at(total) if comm.rank == rank else total

        def repeat(replay: KernelReplay, start: int, stop: int) -> None:
            if this_rank() != rank or self.n_struck:
                run(replay, start, stop)
                return
            for end, address, n in _sums(replay, start, stop):
                run(replay, start, end)
                start = end
                numbers = (ctypes.c_float * n).from_address(address)
                total = torch.frombuffer(numbers, dtype=torch.float32)
                total.copy_(self._at(total))
            run(replay, start, stop)

        monkeypatch.setattr(ThreadCommunicator, "all_reduce", all_reduce)
        monkeypatch.setattr(KernelReplay, "run", repeat)

    def _at(self, total: Tensor) -> Tensor:
        """Return a sum, changed if it is the second one: by then all ranks are under way."""
        self._n_seen += 1
        if self._n_seen != 2:
            return total
        self.n_struck += 1
        return self._strike(total)


def _sums(replay: KernelReplay, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return the all-reduces among recorded calls: index of the next call, address, numbers."""
    found, words = [], [int(word) for word in replay._words]
    while start < stop:
        n = words[start + 1] & (CHECKED - 1)
        end = start + 2 + n
        if words[start + 1] >= CHECKED:
            arguments = words[start + 2 : end]
            found.append((end, arguments[OUT], arguments[OUT - 1]))
        start = end
    return found


def flipped(total: Tensor) -> Tensor:
    """Return a sum with one bit flipped."""
    wrong = total.clone()
    wrong.view(torch.int32).view(-1)[3] ^= 1 << 22
    return wrong
