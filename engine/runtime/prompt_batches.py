"""Prompt batches on all ranks; the host does not wait for those without logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.runtime import micro_batches

if TYPE_CHECKING:
    from engine.backends.executor import RankExecutor, WorkMark
    from engine.model.forward.batch import Batch
    from engine.runtime.rank import Rank

MAX_AHEAD = 2
"""Maximum number of batches that run or wait on devices: with one, devices would idle while hosts
start the next; with more, cancelling would take longer."""


class PromptBatches:
    """Prompt batches on all of a model's ranks.

    Attributes:
        in_micro_batches: whether large batches are computed in two halves.
    """

    def __init__(self, executor: RankExecutor) -> None:
        self._executor = executor
        self._started: deque[tuple[int, WorkMark]] = deque()
        self.in_micro_batches = False

    def task(
        self, ranks: Sequence[Rank], ids: Sequence[int], batch: Batch
    ) -> Callable[[int], Tensor | None]:
        """Return the function that computes tokens on a rank, given the rank's number."""
        whole, n = torch.tensor(ids), len(ids)
        if self._executor.has_gpus:
            whole = whole.pin_memory()  # so that the copy to devices does not wait for earlier work
        in_halves = (
            self.in_micro_batches
            and len(batch.pieces) == 1
            and not batch.pictures
            and n >= micro_batches.MIN_MICRO_ROWS
            and n // 2 <= batch.first_logit
        )
        return lambda rank: ranks[rank].compute(whole, batch, in_micro_batches=in_halves)

    def start(self, ranks: Sequence[Rank], ids: Sequence[int], batch: Batch) -> None:
        """Start a batch without logits; wait only while more than `MAX_AHEAD` batches run."""
        task = self.task(ranks, ids, batch)
        self._executor.run(task, is_watched=True, is_awaited=False)
        self._started.append((len(ids), self._executor.mark()))
        self._wait(MAX_AHEAD)

    @property
    def n_running(self) -> int:
        """Number of tokens that were started without logits and have not been computed yet."""
        return sum(n for n, mark in self._started if mark.late)

    def finish(self) -> None:
        """Wait until all batches have finished.

        Raises:
            CommError: see `RankExecutor.wait_for`.
        """
        self._wait(0)

    def _wait(self, n: int) -> None:
        while len(self._started) > n:
            self._executor.wait_for(self._started[0][1])
            self._started.popleft()

    def forget(self) -> None:
        """Discard all batches after a failure."""
        self._started.clear()
