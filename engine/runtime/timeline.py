"""Times of a token on each rank: computing, waiting for other ranks, and the rest.

They are read from clocks that run anyway, so a measurement costs some microseconds.
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
    """Times of one rank for one token.

    Attributes:
        computed_s: seconds spent in kernels.
        waited_s: seconds spent waiting for other ranks in collectives.
    """

    computed_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Times of one token.

    Attributes:
        position: position of the token in the context.
        seconds: seconds from its id to its logits; a rank that neither computes nor waits is in
            Python code.
        ranks: times of each rank, in rank order.
    """

    position: int
    seconds: float
    ranks: tuple[RankTimes, ...]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Time of one kernel, or one kind of copy, on one device, per token.

    Attributes:
        device: id of the device.
        name: name of the kernel.
        count: number of starts.
        seconds: seconds of all starts together.
    """

    device: str
    name: str
    count: float
    seconds: float


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """Average times of a token on the GPUs.

    Attributes:
        kernels: times of the kernels, the longest first.
        busy_s: seconds in which anything ran on a device, by the device's id.
    """

    kernels: tuple[KernelTime, ...]
    busy_s: dict[str, float]


class _Clock(NamedTuple):
    """Clock readings of one rank.

    Attributes:
        worked_s: seconds spent in kernels so far; None if nothing measures them.
        waited_s: seconds spent waiting for other ranks so far.
    """

    worked_s: float | None
    waited_s: float


def timed(
    ranks: Sequence[Rank], position: int, compute: Callable[[], T], begun: float | None = None
) -> tuple[T, TokenTimes]:
    """Compute a token; return the result and the times of each rank.

    On ranks whose kernels are not timed (GPUs, the reference) all time but waiting counts as
    computing.

    Args:
        ranks: ranks that compute the token.
        position: position of the token in the context.
        compute: computes the token.
        begun: start of the token, in seconds of `time.perf_counter`; None for now.
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
    """Return a rank's times between two readings that are `seconds` apart."""
    waited = min(seconds, after.waited_s - before.waited_s)
    if before.worked_s is None or after.worked_s is None:
        return RankTimes(seconds - waited, waited)
    return RankTimes(min(seconds - waited, after.worked_s - before.worked_s), waited)
