"""Rows of activations for the products of few rows: rounded once for all matrices they meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.gpu.kernels import quantise as kernels
from engine.gpu.launch.kernel_launch import launch
from engine.gpu.launch.target import target_of
from engine.quants.extent import Extent
from engine.quants.layout import BLOCK

MOST_ROWS = 8
"""That products of few rows serve."""

N_COUNTERS = 2048
"""Tiles of a launch that several programs may share."""

BLOCKS = 16
"""Of 32 columns, for each program."""


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Activations laid out for an extent, see `engine.gpu.kernels.quantise`.

    Attributes:
        numbers: uint8 (n_row, n_blocks, bytes): 32 bytes, or 64 of two bytes each, or 128 of F32.
        facts: uint8 (n_row, n_blocks, 16), or (n_row, n_blocks, 8) for those in F32.
        counters: int32 (N_COUNTERS,), zeros before and after each product.
        x_bytes: of each number; 0 for F32.
        extent: what it is laid out for.
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
        """Numbers and facts as the kernels write them."""
        if self.x_bytes:
            return self.numbers.view(torch.int8), self.facts.view(torch.int32)
        return self.numbers.view(torch.float32), self.facts.view(torch.float32)


def quantise(x: Tensor, extent: Extent, x_bytes: int) -> QuantisedRows:
    """Rows x (n, extent.n_columns), F32 without gaps; those kept with x if there are such.

    Args:
        x_bytes: of each number where the device multiplies bytes, 1 or 2.
    """
    if target_of(x.device).arithmetic == "numbers":
        x_bytes = 0
    kept: QuantisedRows | None = getattr(x, _KEPT, None)
    if kept is not None and kept.x_bytes == x_bytes and _place(kept.extent) == _place(extent):
        return kept
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
    """Memory for rows that a kernel will write.

    Args:
        x_bytes: 0 for F32.
        counters: zeros by the time the rows are multiplied.
    """
    shape = (n_row, extent.n_blocks)
    numbers = counters.new_empty(*shape, BLOCK * (x_bytes or 4), dtype=torch.uint8)
    facts = counters.new_empty(*shape, 16 if x_bytes else 8, dtype=torch.uint8)
    return QuantisedRows(numbers, facts, counters, x_bytes, extent)


def allocate_rows_like(x: Tensor, x_bytes: int | None) -> QuantisedRows | None:
    """Memory for something like x, if that is few rows (n, n_columns) of whole blocks.

    Args:
        x_bytes: of each number where the device multiplies bytes; None if nobody multiplies.
    """
    extent = Extent.of(0, x.shape[-1])
    if x_bytes is None or x.dim() != 2 or x.shape[0] > MOST_ROWS or not extent.is_exact:
        return None
    if target_of(x.device).arithmetic == "numbers":
        x_bytes = 0
    counters = torch.empty(N_COUNTERS, dtype=torch.int32, device=x.device)
    return allocate_rows(x.shape[0], extent, x_bytes, counters)


_KEPT = "_rows_of_few"


def attach_rows(x: Tensor, rows: QuantisedRows) -> None:
    """Let products of x find it rounded, as long as there is x; who wrote x wrote the rows, too."""
    setattr(x, _KEPT, rows)


def _place(extent: Extent) -> tuple[int, int, int]:
    """What rows depend on."""
    return extent.lead, extent.n_columns, extent.n_blocks
