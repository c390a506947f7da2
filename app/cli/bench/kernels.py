"""The tables of `bench --kernels`: kernels that GPUs run for a token, and products on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.cli.bench.products import product_table
from app.cli.output import percent, table

if TYPE_CHECKING:
    from app.cli.bench.row import BenchRow
    from engine import ProductSpeed

HEADERS = ("DEVICE", "KERNEL", "STARTS", "TIME", "OF THE TOKEN")
RIGHT = frozenset({2, 3, 4})

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
    return f"{row.test}, {_microseconds(token_s)} a token\n{table(HEADERS, cells, RIGHT)}"


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs"
