"""Tables for `bench --kernels` and `--timeline`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import engine  # modules that need torch are imported on first use
from app.cli.output import microseconds, note_progress, percent, table
from engine import EngineError, Fallback, LoadParams

if TYPE_CHECKING:
    from engine import BenchResult, BenchTest, ModelInfo, ProductSpeed


@dataclass(frozen=True)
class LoadSpeed:
    """Duration of a load, and its read rate over all devices (None if the load was too short)."""

    seconds: float
    read_bytes_per_s: float | None


@dataclass(frozen=True)
class BenchRow:
    """One test of a loaded model, with its result or error.

    Attributes:
        test_time: when the test started, as UTC in ISO 8601 format.
        n_threads: total CPU threads over all ranks; as requested if nothing was loaded.
        n_batch: prompt tokens per batch; None if unknown.
        storage: how weights are stored (see `Plan.storage`); "" if nothing was loaded.
        error: the error's message; storing the exception would keep the model alive.
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
        """Each rank's requested share."""
        return self.params.split or (1.0,) * len(self.params.devices)


PRODUCT_HEADERS = ("TYPE", "BITS", "1 TOKEN", "A SUM", "8 TOKENS", "512 TOKENS", "512 IN")
PRODUCT_RIGHT = frozenset({1, 2, 3, 4, 5})

VECTORS = "F32"  # type of vectors, e.g. norm weights; matrices may have another type
ALL = "all"


def add_kernels(group: argparse._ArgumentGroup) -> None:
    """Add the options for kernel times."""
    group.add_argument(
        "--kernels", action="store_true",
        help="show the GPU kernels run per token with their times, and the speed of the CPU's "
        "matrix products for each weight type",
    )  # fmt: skip
    group.add_argument(
        "--kernel-types", metavar="TYPES",
        help="weight types for --kernels on the CPU, for example Q4_K,Q6_K, or 'all' (default: "
        "those in the file)",
    )  # fmt: skip


def product_types(text: str | None, info: ModelInfo) -> list[str]:
    """Return the types to measure, by default those in the model file; [] for all.

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
            raise EngineError(
                "There are no CPU kernels for '{name}'.",
                "Use 'all', or one or more of {names}.",
                name=name,
                names=", ".join(known),
            )
    return names


def measured_products(rows: Sequence[BenchRow], types: Sequence[str]) -> list[ProductSpeed]:
    """Measure the CPU's matrix products with the settings of the first load on the CPU, if any."""
    row = next((row for row in rows if row.result and "cpu" in row.params.all_devices), None)
    if row is None:
        return []
    speeds = []
    params, n_threads = row.params, row.n_threads
    for speed in engine.measure_products(types, n_threads, fast_prompts=params.fast_prompts):
        speeds.append(speed)
        note_progress(f"Measured matrix products with {speed.kind} …")
    return speeds


def product_table(speeds: Sequence[ProductSpeed]) -> str:
    """Return a table of the CPU's matrix products; "" if none were measured."""
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
    head = f"Matrix products on the CPU; threads: {first.n_threads}, instruction set: {isa}"
    return f"{head}\n{table(PRODUCT_HEADERS, cells, PRODUCT_RIGHT)}"


def _giga(number: float) -> str:
    return f"{number / 1e9:.1f} G"


KERNEL_HEADERS = ("DEVICE", "KERNEL", "STARTS", "TIME", "OF THE TOKEN")
KERNEL_RIGHT = frozenset({2, 3, 4})

MAX_ROWS = 16  # maximum number of kernels with their own row; the others share one


def kernel_tables(rows: Sequence[BenchRow], products: Sequence[ProductSpeed]) -> str:
    """Return a table of GPU kernels per test, and one of the CPU's matrix products, if any."""
    tables = [_table(row) for row in rows if row.result is not None and row.result.gpu]
    if products:
        tables.append(product_table(products))
    return "\n\n".join(tables) or "No kernels were recorded, since no test generated tokens."


def _table(row: BenchRow) -> str:
    result = row.result
    assert result is not None, "only rows with a result have a table"
    assert result.gpu is not None, "only rows with GPUs have a table"
    kernels, token_s = result.gpu.kernels, result.token_s
    cells = [
        (k.device, k.name, f"{k.count:.4g}", microseconds(k.seconds), percent(k.seconds / token_s))
        for k in kernels[:MAX_ROWS]
    ]
    if rest := kernels[MAX_ROWS:]:
        seconds = sum(k.seconds for k in rest)
        count = f"{sum(k.count for k in rest):.4g}"
        name = f"{len(rest)} others"
        cells.append(("", name, count, microseconds(seconds), percent(seconds / token_s)))
    for device, seconds in result.gpu.busy_s.items():
        cells.append((device, "busy", "", microseconds(seconds), percent(seconds / token_s)))
    head = f"{row.test}, {microseconds(token_s)} per token"
    return f"{head}\n{table(KERNEL_HEADERS, cells, KERNEL_RIGHT)}"


TIMELINE_HEADERS = ("SPLIT", "TEST", "RANK", "DEVICE", "TOKEN", "COMPUTES", "WAITS", "PYTHON")
TIMELINE_RIGHT = frozenset({2, 4, 5, 6, 7})


@dataclass(frozen=True)
class RankTimeline:
    """How one rank spends the time per token, in seconds and as fractions."""

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
    """Return how each rank spends the time per token; [] for tests with a prompt."""
    result = row.result
    if result is None or not result.ranks:
        return []
    timelines, token_s = [], result.token_s
    for rank, (device, times) in enumerate(zip(row.params.all_devices, result.ranks, strict=True)):
        python_s = max(0.0, token_s - times.computed_s - times.waited_s)
        seconds = (times.computed_s, times.waited_s, python_s)
        parts = (part / token_s for part in seconds)
        timelines.append(RankTimeline(rank, device, token_s, *seconds, *parts))
    return timelines


def timeline_table(rows: Sequence[BenchRow], splits: Sequence[str]) -> str:
    """Return a table with one row per rank, or ""; `splits` are the rows' splits as text."""
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
