"""One row of a benchmark: a test of a load, with its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine import LoadParams

if TYPE_CHECKING:
    from engine import BenchResult, BenchTest


@dataclass(frozen=True)
class LoadSpeed:
    """What a load took.

    Attributes:
        read_bytes_per_s: of the file's weights, over all devices; None where it was too quick.
    """

    seconds: float
    read_bytes_per_s: float | None


@dataclass(frozen=True)
class BenchRow:
    """One test of one load, with its result or the reason why there is none.

    Attributes:
        n_threads: CPU threads of all ranks together; as asked where nothing was loaded.
        storage: how weights were held, see `Plan.storage`; empty where nothing was loaded.
        test_time: when the test began, in UTC and ISO 8601.
        error: why there is no result; not the exception, which would hold on to the model.
    """

    params: LoadParams
    test: BenchTest
    test_time: str
    n_threads: int | None = None
    storage: str = ""
    loaded: LoadSpeed | None = None
    result: BenchResult | None = None
    error: str = ""
    hint: str = ""

    @property
    def split(self) -> tuple[float, ...]:
        """The share of each rank, as asked."""
        return self.params.split or (1.0,) * len(self.params.devices)
