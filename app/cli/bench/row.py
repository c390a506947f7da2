"""A row of a benchmark: one test on one load, with its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine import Fallback, LoadParams

if TYPE_CHECKING:
    from engine import BenchResult, BenchTest


@dataclass(frozen=True)
class LoadSpeed:
    """Duration and read rate of a load.

    Attributes:
        read_bytes_per_s: read rate of the file's weights, summed over all devices; None if the
            load was too quick to tell.
    """

    seconds: float
    read_bytes_per_s: float | None


@dataclass(frozen=True)
class BenchRow:
    """One test on one load, with its result or the reason why there is none.

    Attributes:
        test_time: start of the test, UTC in ISO 8601.
        n_threads: CPU threads of all ranks together; as requested if nothing was loaded.
        n_batch: prompt tokens per batch; None if nothing was loaded and none were asked for.
        storage: how weights are held, see `Plan.storage`; empty if nothing was loaded.
        loaded: duration and read rate of the load; None if nothing was loaded.
        error: reason why there is no result; not the exception, which would keep the model alive.
        hint: what to do about the error.
        fallbacks: what made GPUs slower than they could be; see `Model.fallbacks`.
    """

    params: LoadParams
    test: BenchTest
    test_time: str
    n_threads: int | None = None
    n_batch: int | None = None
    storage: str = ""
    loaded: LoadSpeed | None = None
    result: BenchResult | None = None
    error: str = ""
    hint: str = ""
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def split(self) -> tuple[float, ...]:
        """Requested share of each rank."""
        return self.params.split or (1.0,) * len(self.params.devices)
