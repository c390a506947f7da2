"""A batch of tokens as two halves that take turns: while ranks add up one, they compute the other.

In each block the first half is ahead of the second, so what the second one sees in the caches is
there. Sums between devices that take as long as the products then cost next to nothing, and of
ranks that follow on each other both compute at once; but each matrix is read, or dequantised,
twice. Which of the two weighs more depends on links and cards, so it is measured when a model is
loaded; then it stays so, as a batch in halves may differ in the last bits from a whole one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.parallel.turns import Turns

if TYPE_CHECKING:
    from engine.forward.context import Context
    from engine.models.base import CausalLM

LEAST_ROWS = 128
"""Fewer tokens are added up by kernels, within microseconds."""

ORDER = (False, True, True, False)
"""What is measured, in halves or not: each twice, since clocks and other things drift."""

LEAST_GAIN = 0.03
"""Of the time: less may come from whatever else the machine does."""


@runtime_checkable
class TakesTurns(Protocol):
    """What a rank meets the others by.

    Attributes:
        turns: where a sum is under way, lets another computation of this rank go on.
    """

    turns: Turns | None


class MicroBatches:
    """Computes batches in halves on one rank.

    Args:
        make_twin: a context for the second half, with the same cache.
    """

    def __init__(self, comm: TakesTurns, make_twin: Callable[[], Context]) -> None:
        self._comm = comm
        self._make_twin = make_twin
        self._twin: Context | None = None
        self._turns: Turns | None = None

    def compute(
        self, model: CausalLM, first: Context, ids: Tensor, n_past: int, first_logit: int
    ) -> Tensor | None:
        """`CausalLM.forward` of ids (T,) after `n_past` cached tokens.

        Args:
            first: for the first T // 2 of them.
            first_logit: not below T // 2.
        """
        n = len(ids) // 2
        assert n <= first_logit, "logits of the first half are asked for"
        second = self._twin = self._twin or self._make_twin()
        turns = self._turns = self._turns or Turns()
        second.directions = first.directions
        run = _as_here(first.device)

        def half(context: Context, start: int, stop: int, first_row: int) -> Tensor | None:
            context.begin(n_past + start, stop - start, first_row)
            return model.forward(ids[start:stop].to(context.device), context)

        self._comm.turns = turns
        try:
            return turns.both(
                lambda: half(first, 0, n, n),
                lambda: run(lambda: half(second, n, len(ids), first_logit - n)),
            )[1]
        finally:
            self._comm.turns = None

    def forget(self) -> None:
        """Let go of what the second half computes with."""
        self._twin = None


def _as_here(device: torch.device) -> Callable[[Callable[[], Tensor | None]], Tensor | None]:
    """Runs something on another thread in what this one has around it."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run(work: Callable[[], Tensor | None]) -> Tensor | None:
        with torch.inference_mode(), _on(device, stream):
            return work()

    return run


@contextmanager
def _on(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Have this thread use a device and a stream; None where there is no such thing."""
    if stream is None:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def micro_batches_pay(compute: Callable[[bool], object]) -> bool:
    """Whether a batch takes less time in halves.

    Args:
        compute: does one, in halves or whole; all that is made once is there already.
    """
    seconds = {False: 0.0, True: 0.0}
    for in_micro_batches in ORDER:
        begun = time.perf_counter()
        compute(in_micro_batches)
        seconds[in_micro_batches] += time.perf_counter() - begun
    return seconds[True] < (1 - LEAST_GAIN) * seconds[False]
