"""The table of `bench --kernels` for the CPU: its products with each type of weights."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import engine  # names that need torch are resolved when they are used
from app.cli.output import note_progress, table
from engine import EngineError

if TYPE_CHECKING:
    from app.cli.bench.row import BenchRow
    from engine import ModelInfo, ProductSpeed

HEADERS = ("TYPE", "BITS", "1 TOKEN", "A SUM", "8 TOKENS", "512 TOKENS", "512 IN")
RIGHT = frozenset({1, 2, 3, 4, 5})

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
    return f"{head}\n{table(HEADERS, cells, RIGHT)}"


def product_fields(speeds: Sequence[ProductSpeed]) -> list[dict[str, Any]]:
    """Return the speeds for JSON."""
    return [asdict(speed) for speed in speeds]


def _giga(number: float) -> str:
    return f"{number / 1e9:.1f} G"
