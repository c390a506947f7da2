"""Ranks that are threads, without a model."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.backends.cpu.thread_comm import ThreadCommunicator, ThreadGroup
from engine.parallel.rank_threads import RankThreads

CPU = torch.device("cpu")


class Ranks:
    """Threads of some ranks, and the ranks' communicators."""

    def __init__(self, n: int, *, spins: bool = False) -> None:
        self.group = ThreadGroup(spins=spins)
        self.comms = [ThreadCommunicator(self.group, rank, CPU) for rank in range(n)]
        self.everyone = tuple(range(n))
        self.pool = RankThreads(n, self.group.abort, lambda: None, self.group)

    def run(self, fn: Callable[[ThreadCommunicator], Tensor | None]) -> list[Tensor | None]:
        try:
            return self.pool.call_on_all(lambda rank: fn(self.comms[rank]))
        finally:
            self.group.settle()
