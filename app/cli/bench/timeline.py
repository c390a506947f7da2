"""The table of `bench --timeline`: how each rank spends the time of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.cli.output import percent, table

if TYPE_CHECKING:
    from app.cli.bench.row import BenchRow

HEADERS = ("SPLIT", "TEST", "RANK", "DEVICE", "TOKEN", "COMPUTES", "WAITS", "PYTHON")
RIGHT = frozenset({2, 4, 5, 6, 7})


@dataclass(frozen=True)
class RankTimeline:
    """Time of a token on one rank, in seconds and as fractions of the whole token (0 to 1)."""

    rank: int
    device: str
    token_s: float
    computed_s: float
    waited_s: float
    python_s: float
    computed: float
    waited: float
    python: float


def timeline(row: BenchRow) -> list[RankTimeline]:
    """Return the time of a token on each rank; an empty list for tests with a prompt."""
    result = row.result
    if result is None or not result.ranks:
        return []
    found, token_s = [], result.token_s
    for rank, (device, times) in enumerate(zip(row.params.all_devices, result.ranks, strict=True)):
        python_s = max(0.0, token_s - times.computed_s - times.waited_s)
        seconds = (times.computed_s, times.waited_s, python_s)
        parts = (part / token_s for part in seconds)
        found.append(RankTimeline(rank, device, token_s, *seconds, *parts))
    return found


def timeline_table(rows: Sequence[BenchRow], splits: Sequence[str]) -> str:
    """Return a table with a row per rank; "" if no test generated anything.

    Args:
        splits: split of each row, as text.
    """
    cells = [
        (
            split, str(row.test), str(found.rank), found.device, _milliseconds(found.token_s),
            f"{_milliseconds(found.computed_s)} ({percent(found.computed)})",
            f"{_milliseconds(found.waited_s)} ({percent(found.waited)})",
            f"{_milliseconds(found.python_s)} ({percent(found.python)})",
        )
        for row, split in zip(rows, splits, strict=True)
        for found in timeline(row)
    ]  # fmt: skip
    return table(HEADERS, cells, RIGHT) if cells else ""


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
