"""Where a token's time goes on each rank: computing, waiting for the others, and what is left.

Read off clocks that run anyway, so a sample costs some microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from engine.runtime.interface import Runtime
    from engine.runtime.rank import Rank

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds of one rank.

    Attributes:
        computed_s: in kernels.
        waited_s: for other ranks, until all have met and their sum is there.
    """

    computed_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """One token.

    Attributes:
        position: its place in the context.
        seconds: from its id to its logits; what a rank neither computes nor waits is Python's.
    """

    position: int
    seconds: float
    ranks: tuple[RankTimes, ...]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel, or kind of copy, on one device; per token.

    Attributes:
        count: starts.
        seconds: of all of them together.
    """

    device: str
    name: str
    count: float
    seconds: float


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """What GPUs did for a token, on average.

    Attributes:
        kernels: the longest first.
        busy_s: seconds in which something ran, by device.
    """

    kernels: tuple[KernelTime, ...]
    busy_s: dict[str, float]


class _Clock(NamedTuple):
    """Seconds of one rank so far; `worked_s` is None where only waiting is known."""

    worked_s: float | None
    waited_s: float


def timed(
    runtime: Runtime, position: int, compute: Callable[[], T], begun: float | None = None
) -> tuple[T, TokenTimes]:
    """Compute a token on a runtime and say what took how long.

    On ranks without a clock for their kernels (GPUs, the reference) all that is not waiting counts
    as computing.

    Args:
        begun: when it began, in seconds of `time.perf_counter`, if that was before.
    """
    before = [_clock(rank) for rank in runtime.ranks]
    start = time.perf_counter() if begun is None else begun
    result = compute()
    seconds = time.perf_counter() - start
    after = [_clock(rank) for rank in runtime.ranks]
    ranks = tuple(_times(a, b, seconds) for a, b in zip(before, after, strict=True))
    return result, TokenTimes(position, seconds, ranks)


def _clock(rank: Rank) -> _Clock:
    waited = rank.context.waited_s
    return _Clock(rank.backend.kernel_s, waited + rank.backend.waited_s)


def _times(before: _Clock, after: _Clock, seconds: float) -> RankTimes:
    waited = min(seconds, after.waited_s - before.waited_s)
    if before.worked_s is None or after.worked_s is None:
        return RankTimes(seconds - waited, waited)
    return RankTimes(min(seconds - waited, after.worked_s - before.worked_s), waited)
