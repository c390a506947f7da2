"""Operands of products with quantised matrices: matrices in planes, and rows rounded for gemv.

A kernel that reads planes takes the names in `constants_of` as `tl.constexpr` parameters and passes
them to the functions in `engine.backends.gpu.kernels.planes`, so one kernel serves all types. Rows
are rounded once for all the matrices by which they are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.backends.gpu.kernels import elementwise as kernels
from engine.backends.gpu.launch.configs import target_of
from engine.backends.gpu.launch.kernel_launch import launch
from engine.formats.quants.layout import BLOCK, LAYOUTS, Extent
from engine.model.forward.attention import most_few_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

N_COUNTERS = 2048  # max. tiles in a launch with several programs per tile; each has a counter
BLOCKS = 16  # blocks of 32 columns that each program quantises


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Activations in the blocks of an extent; see `engine.backends.gpu.kernels.elementwise`.

    Attributes:
        numbers: rounded numbers as bytes, uint8 (n_row, n_blocks, 32 * bytes per number).
        facts: the blocks' scales and sums as bytes, uint8 (n_row, n_blocks, 16); for F32 only sums,
            (n_row, n_blocks, 8).
        counters: counters for programs that share a tile, int32 (N_COUNTERS,), zero before and
            after each product.
        x_bytes: bytes per number, 1 or 2; 0 for F32.
        extent: extent of the matrices by which the rows can be multiplied.
    """

    numbers: Tensor
    facts: Tensor
    counters: Tensor
    x_bytes: int
    extent: Extent

    @property
    def n_row(self) -> int:
        return self.numbers.shape[0]

    @property
    def typed(self) -> tuple[Tensor, Tensor]:
        """Numbers and facts as tensors with the types that the kernels write."""
        if self.x_bytes:
            return self.numbers.view(torch.int8), self.facts.view(torch.int32)
        return self.numbers.view(torch.float32), self.facts.view(torch.float32)


def quantise(x: Tensor, extent: Extent, x_bytes: int) -> QuantisedRows:
    """Quantise rows x (n, extent.n_columns), contiguous F32, or return those attached to x.

    Args:
        x_bytes: bytes per number, 1 or 2, if the device multiplies bytes.
    """
    if target_of(x.device).gemv_operands == "f32":
        x_bytes = 0
    rows = attached(x)
    if rows is not None and rows.x_bytes == x_bytes and _blocks(rows.extent) == _blocks(extent):
        return rows
    counters = torch.empty(N_COUNTERS, dtype=torch.int32, device=x.device)
    rows = allocate_rows(x.shape[0], extent, x_bytes, counters)
    grid = (x.shape[0], -(-extent.n_blocks // BLOCKS))
    arguments = (x, extent.lead, extent.n_columns, extent.n_blocks, *rows.typed, counters)
    if x_bytes:
        launch(
            kernels.as_bytes, grid, *arguments, X_BYTES=x_bytes, BLOCKS=BLOCKS,
            N_COUNTERS=N_COUNTERS,
        )  # fmt: skip
    else:
        launch(kernels.as_numbers, grid, *arguments, BLOCKS=BLOCKS, N_COUNTERS=N_COUNTERS)
    return rows


def allocate_rows(n_row: int, extent: Extent, x_bytes: int, counters: Tensor) -> QuantisedRows:
    """Allocate rows for a kernel to write; `counters` are zeroed before the rows are multiplied."""
    shape = (n_row, extent.n_blocks)
    numbers = counters.new_empty(*shape, BLOCK * (x_bytes or 4), dtype=torch.uint8)
    facts = counters.new_empty(*shape, 16 if x_bytes else 8, dtype=torch.uint8)
    return QuantisedRows(numbers, facts, counters, x_bytes, extent)


def allocate_rows_like(x: Tensor, x_bytes: int | None) -> QuantisedRows | None:
    """Allocate quantised rows for x (n, n_columns); return None if gemv does not support the shape.

    Args:
        x_bytes: bytes per number if the device multiplies bytes; None if no product follows.
    """
    if x_bytes is None or x.dim() != 2 or x.shape[0] > most_few_rows():
        return None
    extent = Extent.of(0, x.shape[-1])
    if not extent.is_exact:
        return None
    if target_of(x.device).gemv_operands == "f32":
        x_bytes = 0
    counters = torch.empty(N_COUNTERS, dtype=torch.int32, device=x.device)
    return allocate_rows(x.shape[0], extent, x_bytes, counters)


_ATTRIBUTE = "_quantised_rows"  # name of the attribute in which a tensor keeps its quantised rows


def attach_rows(x: Tensor, rows: QuantisedRows) -> None:
    """Attach quantised rows, written by the kernel that wrote x, to x for later products."""
    setattr(x, _ATTRIBUTE, rows)


def attached(x: Tensor) -> QuantisedRows | None:
    """Return the quantised rows attached to x, if any."""
    return getattr(x, _ATTRIBUTE, None)


def _blocks(extent: Extent) -> tuple[int, int, int]:
    return extent.lead, extent.n_columns, extent.n_blocks


@dataclass(eq=False)
class QuantisedMatrix:
    """A matrix (n_rows, extent.n_columns) in planes; see `engine.formats.quants.layout`.

    Attributes:
        planes: uint8 (n_tile, tile_bytes).
        extent: the columns of the file's matrix that are stored.
        x_bytes: bytes per number in the quantised activations multiplied by it, 1 or 2.
    """

    planes: Tensor
    type_number: int
    n_rows: int
    extent: Extent
    x_bytes: int


@cache
def constants_of(type_number: int) -> Mapping[str, Any]:
    """Return the constants for a GGML type, a key of `LAYOUTS`, as keywords for `launch`.

    `Layout` explains them. A type always gives the same dictionary object, which is the fastest
    way to pass keywords.
    """
    layout = LAYOUTS[type_number]
    return {
        "LOW": layout.low,
        "HIGH": layout.high,
        "ZERO": layout.zero,
        "TABLE": layout.table,
        "SCALE": layout.scale,
        "SUB": layout.sub,
        "SIGNED": layout.signed_scale,
    }
