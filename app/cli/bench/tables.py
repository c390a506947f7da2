"""Tables of `bench --kernels` and `--timeline`: products, kernels, and each rank's time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import engine  # names that need torch are resolved when they are used
from app.cli.output import note_progress, percent, table
from engine import EngineError, Fallback, LoadParams

if TYPE_CHECKING:
    from engine import BenchResult, BenchTest, ModelInfo, ProductSpeed


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


PRODUCT_HEADERS = ("TYPE", "BITS", "1 TOKEN", "A SUM", "8 TOKENS", "512 TOKENS", "512 IN")
PRODUCT_RIGHT = frozenset({1, 2, 3, 4, 5})

VECTORS = "F32"
"""Type of vectors such as the weights of norms, in files whose matrices have others."""

ALL = "all"
"""Word for all quantised types that have kernels."""


def add_kernels(group: argparse._ArgumentGroup) -> None:
    """Add the options for times of kernels."""
    group.add_argument(
        "--kernels", action="store_true",
        help="show which kernels GPUs run for a token, and for how long, and the speed of the "
        "CPU's products with each type of weights",
    )  # fmt: skip
    group.add_argument(
        "--kernel-types", metavar="TYPES",
        help="types for --kernels on the CPU, such as Q4_K,Q6_K, or 'all' (default: the file's)",
    )  # fmt: skip


def product_types(text: str | None, info: ModelInfo) -> list[str]:
    """Return the wanted types: those of the model's file for None, an empty list for all.

    Raises:
        EngineError: a type is unknown or has no kernels.
    """
    if text == ALL:
        return []
    known = engine.product_types()
    if text is None:
        names = [name for name, _ in info.tensor_types if name in known]
        return [name for name in names if name != VECTORS] or names
    names = [name.strip().upper() for name in text.split(",")]
    for name in names:
        if name not in known:
            message = f"Products with '{name}' have no kernels on CPUs."
            raise EngineError(message, f"Give 'all' or some of {', '.join(known)}.")
    return names


def measured_products(rows: Sequence[BenchRow], types: Sequence[str]) -> list[ProductSpeed]:
    """Measure the CPU's products as the first load that uses the CPU does; an empty list for none.

    Args:
        types: see `product_types`.
    """
    row = next((row for row in rows if row.result and "cpu" in row.params.all_devices), None)
    if row is None:
        return []
    found = []
    params, n_threads = row.params, row.n_threads
    for speed in engine.measure_products(types, n_threads, fast_prompts=params.fast_prompts):
        found.append(speed)
        note_progress(f"Measured products with {speed.kind} …")
    return found


def product_table(speeds: Sequence[ProductSpeed]) -> str:
    """Return a table of the CPU's products with a sentence above it; "" for none."""
    if not speeds:
        return ""
    first = speeds[0]
    cells = [
        (
            speed.kind, f"{speed.bits:.2f}", f"{_giga(speed.bytes_per_s)}B/s",
            f"{_giga(speed.read_bytes_per_s)}B/s",
            f"{_giga(speed.few_op_per_s)}OP/s", f"{_giga(speed.many_op_per_s)}OP/s",
            speed.arithmetic,
        )
        for speed in speeds
    ]  # fmt: skip
    isa = first.instruction_set
    head = f"Products on the CPU, threads: {first.n_threads}, instruction set: {isa}"
    return f"{head}\n{table(PRODUCT_HEADERS, cells, PRODUCT_RIGHT)}"


def product_fields(speeds: Sequence[ProductSpeed]) -> list[dict[str, Any]]:
    """Return the speeds for JSON."""
    return [asdict(speed) for speed in speeds]


def _giga(number: float) -> str:
    return f"{number / 1e9:.1f} G"


KERNEL_HEADERS = ("DEVICE", "KERNEL", "STARTS", "TIME", "OF THE TOKEN")
KERNEL_RIGHT = frozenset({2, 3, 4})

MAX_ROWS = 16
"""Most kernels shown one by one; all further ones share a row."""


def kernel_tables(rows: Sequence[BenchRow], products: Sequence[ProductSpeed]) -> str:
    """Return a table for each test that only generates on GPUs, and one of the CPU's products.

    Without any, it is a sentence on why there is none.
    """
    found = [_table(row) for row in rows if row.result is not None and row.result.gpu]
    if products:
        found.append(product_table(products))
    return "\n\n".join(found) or "No kernels were recorded: no test generated anything."


def _table(row: BenchRow) -> str:
    result = row.result
    assert result is not None, "only rows with a result have a table"
    assert result.gpu is not None, "only rows with GPUs have a table"
    kernels, token_s = result.gpu.kernels, result.token_s
    cells = [
        (k.device, k.name, f"{k.count:.4g}", _microseconds(k.seconds), percent(k.seconds / token_s))
        for k in kernels[:MAX_ROWS]
    ]
    if rest := kernels[MAX_ROWS:]:
        seconds = sum(k.seconds for k in rest)
        count = f"{sum(k.count for k in rest):.4g}"
        name = f"{len(rest)} others"
        cells.append(("", name, count, _microseconds(seconds), percent(seconds / token_s)))
    for device, seconds in result.gpu.busy_s.items():
        cells.append((device, "busy", "", _microseconds(seconds), percent(seconds / token_s)))
    head = f"{row.test}, {_microseconds(token_s)} a token"
    return f"{head}\n{table(KERNEL_HEADERS, cells, KERNEL_RIGHT)}"


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs"


TIMELINE_HEADERS = ("SPLIT", "TEST", "RANK", "DEVICE", "TOKEN", "COMPUTES", "WAITS", "PYTHON")
TIMELINE_RIGHT = frozenset({2, 4, 5, 6, 7})


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
    return table(TIMELINE_HEADERS, cells, TIMELINE_RIGHT) if cells else ""


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
