"""Passes of a load: they compile, record and measure, so that the first answer does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine.errors import CommError
from engine.model.forward.batch import Batch
from engine.runtime.passes import micro_batches
from engine.runtime.rank import FEW_ROWS, rehearsed_rows
from engine.runtime.recording.sizes import n_until_recorded

if TYPE_CHECKING:
    from engine.backends.executor import RankExecutor
    from engine.decoding.sampling.token_source import Logits
    from engine.runtime.passes.prompt_batches import PromptBatches
    from engine.runtime.rank import Rank
    from engine.runtime.recording.one_shot_use import OneShotUse


class ColdRunner(Protocol):
    """A runner of passes that have not been computed before; see `ModelRunner`."""

    ranks: list[Rank]
    executor: RankExecutor
    batches: PromptBatches
    meeting: OneShotUse
    n_ctx: int
    n_batch: int

    @property
    def has_kernels(self) -> bool:
        """Whether any rank has kernels whose calls can be recorded or captured."""
        ...

    def compute(self, ids: Sequence[int], batch: Batch) -> Logits:
        """Run the rows of a batch."""
        ...

    def rehearse(self, n: int) -> bool:
        """Compute n tokens while no kernel waits for another rank, if any could."""
        ...


def warm_up(runner: ColdRunner) -> None:
    """Compile, record and measure now, so that the first prompt and token do not wait for it.

    If the ranks' kernels wait for each other in vain, all is computed once more, then without
    one-shot all-reduces.

    Raises:
        EngineError: a pass failed otherwise.
    """
    if not runner.has_kernels:
        return
    while True:
        try:
            _compute_once(runner)
        except CommError as error:
            if runner.executor.lost or not runner.meeting.may_try_again(str(error)):
                raise
        else:
            runner.meeting.note_success()
            return


def _compute_once(runner: ColdRunner) -> None:
    """Compute the passes of `warm_up` once."""
    for _ in range(n_until_recorded(runner.ranks)):
        runner.compute([0], Batch.of_one(0, 1, 0))
    compiles = any(rank.backend.compiles for rank in runner.ranks)
    if compiles or runner.meeting.meetings.wait:  # perhaps on other machines alone
        most = min(runner.n_ctx, runner.n_batch)
        for n in rehearsed_rows(most):
            is_done = runner.rehearse(n) and n > FEW_ROWS  # no kernel of large sums waits
            if not is_done:
                runner.compute([0] * n, Batch.of_one(0, n, n - 1))
        _try_micro_batches(runner, min(most, micro_batches.TRIED_ROWS))
    for rank in runner.ranks:
        rank.backend.prepare()


def _try_micro_batches(runner: ColdRunner, n: int) -> None:
    """Measure whether batches of n tokens take less time in micro-batches; keep the answer."""
    if n < micro_batches.LEAST_ROWS or not any(rank.micro_batches for rank in runner.ranks):
        return

    def compute(in_micro_batches: bool) -> None:
        runner.batches.in_micro_batches = in_micro_batches
        runner.compute([0] * n, Batch.of_one(0, n, n - 1))

    runner.batches.in_micro_batches = micro_batches.micro_batches_pay(compute)
