"""A token's times on each rank: computing, waiting for other ranks, and the rest.

They are read from clocks that run anyway, so measuring takes only microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from engine.runtime.rank import Rank

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's seconds for one token: in kernels, and waiting for others in collectives."""

    computed_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Times of one token.

    Attributes:
        position: position of the token in the context.
        seconds: seconds from its id to its logits; a rank that neither computes nor waits is in
            Python code.
        ranks: each rank's times, in rank order.
    """

    position: int
    seconds: float
    ranks: tuple[RankTimes, ...]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Time of one kernel, or one kind of copy, on one device, per token.

    Attributes:
        count: number of launches.
        seconds: total seconds over all launches.
    """

    device: str
    name: str
    count: float
    seconds: float


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """Average times per token on the GPUs.

    Attributes:
        kernels: the kernels' times, longest first.
        busy_s: seconds in which anything ran, by device id.
    """

    kernels: tuple[KernelTime, ...]
    busy_s: dict[str, float]


class _Clock(NamedTuple):
    """One rank's clock readings; `worked_s` is None if its kernels are not timed."""

    worked_s: float | None
    waited_s: float


def timed(
    ranks: Sequence[Rank], position: int, compute: Callable[[], T], begun: float | None = None
) -> tuple[T, TokenTimes]:
    """Compute a token; return the result and each rank's times.

    On ranks whose kernels are not timed (GPUs, the reference), all time except waiting counts as
    computing.

    Args:
        position: position of the token in the context.
        begun: `time.perf_counter()` when the token started; None for now.
    """
    before = [_clock(rank) for rank in ranks]
    start = time.perf_counter() if begun is None else begun
    result = compute()
    seconds = time.perf_counter() - start
    after = [_clock(rank) for rank in ranks]
    times = tuple(_times(a, b, seconds) for a, b in zip(before, after, strict=True))
    return result, TokenTimes(position, seconds, times)


def _clock(rank: Rank) -> _Clock:
    waited = rank.context.waited_s
    return _Clock(rank.backend.kernel_s, waited + rank.backend.waited_s)


def _times(before: _Clock, after: _Clock, seconds: float) -> RankTimes:
    waited = min(seconds, after.waited_s - before.waited_s)
    if before.worked_s is None or after.worked_s is None:
        return RankTimes(seconds - waited, waited)
    return RankTimes(min(seconds - waited, after.worked_s - before.worked_s), waited)
