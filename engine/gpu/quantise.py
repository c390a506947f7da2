"""Rows of activations for the products of few rows: rounded once for all matrices they meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.gpu.kernels import quantise as kernels
from engine.gpu.launch import launch
from engine.gpu.target import target_of
from engine.kernels.layout import BLOCK

if TYPE_CHECKING:
    from engine.kernels.extent import Extent

N_COUNTERS = 2048
"""Tiles of a launch that several programs may share."""

BLOCKS = 16
"""Of 32 columns, for each program."""


@dataclass(frozen=True, slots=True)
class Rows:
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


def quantised(x: Tensor, extent: Extent, x_bytes: int) -> Rows:
    """Rows x (n, extent.n_columns), F32 without gaps.

    Args:
        x_bytes: of each number where the device multiplies bytes, 1 or 2.
    """
    if target_of(x.device).arithmetic == "numbers":
        x_bytes = 0
    n_row, n_blocks = x.shape[0], extent.n_blocks
    per_block = BLOCK * (x_bytes or 4)
    numbers = torch.empty(n_row, n_blocks, per_block, dtype=torch.uint8, device=x.device)
    counters = torch.empty(N_COUNTERS, dtype=torch.int32, device=x.device)
    grid = (n_row, -(-n_blocks // BLOCKS))
    place = (extent.lead, extent.n_columns, n_blocks)
    if x_bytes:
        facts = torch.empty(n_row, n_blocks, 4, dtype=torch.int32, device=x.device)
        launch(
            kernels.as_bytes, grid, x, *place, numbers.view(torch.int8), facts, counters,
            X_BYTES=x_bytes, BLOCKS=BLOCKS, N_COUNTERS=N_COUNTERS,
        )  # fmt: skip
    else:
        facts = torch.empty(n_row, n_blocks, 2, device=x.device)
        launch(
            kernels.as_numbers, grid, x, *place, numbers.view(torch.float32), facts, counters,
            BLOCKS=BLOCKS, N_COUNTERS=N_COUNTERS,
        )  # fmt: skip
    return Rows(numbers, facts.view(torch.uint8), counters, x_bytes, extent)
