"""Two-batch overlap: a prompt batch in two micro-batches, one computed while the other is reduced.

In each block, the first micro-batch is ahead of the second, so that the cache has the keys and
values to which the second one attends. All-reduces that take as long as the matmuls become nearly
free, and pipelined ranks compute simultaneously; but each matrix is read, or dequantised, twice.
Which matters more depends on links and GPUs, so both are timed when a model is loaded. The choice
is then kept, because the results of micro-batches may differ in their last bits from those of a
whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.parallel.batch_overlap import BatchOverlap

if TYPE_CHECKING:
    from engine.backends.gpu.comm.communicator import DeviceCommunicator
    from engine.model.architectures.base import CausalLM
    from engine.model.forward.batch import Batch
    from engine.model.forward.context import Context

MIN_MICRO_ROWS = 128
"""Minimum number of tokens in a batch to split; all-reduces for fewer take microseconds."""

TRIED_ROWS = 512
"""Maximum batch size, in tokens, to measure with, as a load computes four such batches. Splitting
larger batches costs less, so if it pays at this size, it pays at larger ones."""

ORDER = (False, True, True, False)
"""Order of the measurements: True for micro-batches; each twice, because clock rates drift."""

MIN_GAIN = 0.03
"""Minimum gain that counts, as a share of the time; less may be noise."""


class MicroBatches:
    """Computation of prompt batches as two micro-batches, on one rank.

    Args:
        comm: the rank's communicator.
        make_twin: returns a context for the second micro-batch, with the same cache.
    """

    def __init__(self, comm: DeviceCommunicator, make_twin: Callable[[], Context]) -> None:
        self._comm = comm
        self._make_twin = make_twin
        self._twin: Context | None = None
        self._overlap: BatchOverlap | None = None

    def compute(self, model: CausalLM, first: Context, ids: Tensor, batch: Batch) -> Tensor | None:
        """Compute ids (T,) as `CausalLM.forward` does.

        Args:
            first: context of the first T // 2 tokens.
            batch: tokens of one sequence, with logits only for tokens from T // 2 on.
        """
        (piece,), n = batch.pieces, len(ids) // 2
        n_past, first_logit = piece.n_past, batch.first_logit
        assert n <= first_logit, "logits of the first micro-batch were requested"
        second = self._twin = self._twin or self._make_twin()
        overlap = self._overlap = self._overlap or BatchOverlap()
        second.directions = first.directions
        run = _with_this_stream(first.device)

        def half(context: Context, start: int, stop: int, first_row: int) -> Tensor | None:
            part = piece._replace(n_past=n_past + start, n=stop - start)
            context.begin(batch._replace(pieces=(part,), first_logit=first_row))
            return model.forward(ids[start:stop].to(context.device, non_blocking=True), context)

        self._comm.overlap = overlap
        try:
            return overlap.both(
                lambda: half(first, 0, n, n),
                lambda: run(lambda: half(second, n, len(ids), first_logit - n)),
            )[1]
        finally:
            self._comm.overlap = None

    def forget(self) -> None:
        """Drop the second micro-batch's context, which references weights and caches."""
        self._twin = None


def _with_this_stream(
    device: torch.device,
) -> Callable[[Callable[[], Tensor | None]], Tensor | None]:
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run(work: Callable[[], Tensor | None]) -> Tensor | None:
        with torch.inference_mode(), _on(device, stream):
            return work()

    return run


@contextmanager
def _on(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def micro_batches_pay(compute: Callable[[bool], object]) -> bool:
    """Return whether a batch takes less time in micro-batches than as a whole.

    Args:
        compute: computes a batch, in micro-batches if True; all kernels are already compiled.
    """
    seconds = {False: 0.0, True: 0.0}
    for in_micro_batches in ORDER:
        begun = time.perf_counter()
        compute(in_micro_batches)
        seconds[in_micro_batches] += time.perf_counter() - begun
    return seconds[True] < (1 - MIN_GAIN) * seconds[False]
