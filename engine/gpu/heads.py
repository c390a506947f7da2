"""Products with one matrix for each head, as attention over latents has them.

Few rows are multiplied by kernels that read planes, many by the vendor's library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.gpu import long, rows
from engine.gpu.kernels import heads
from engine.gpu.launch import launch
from engine.gpu.layouts import constants_of
from engine.gpu.steps import power_of_two
from engine.kernels.extent import Extent
from engine.kernels.layout import TILE

if TYPE_CHECKING:
    from engine.gpu.weights import GpuPlain, GpuPlanes

MOST_ROWS = 8

BLOCKS = 2
"""Of 32 columns, that a program reads at a time."""

PLAIN: Mapping[str, Any] = MappingProxyType({
    "LOW": 0, "HIGH": 0, "ZERO": 0, "TABLE": (), "SCALE": "", "SUB": 32, "SIGNED": False,
})  # fmt: skip
"""What `engine.gpu.layouts.constants_of` says of matrices that are in no planes."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """One matrix for each head, of which some rows count.

    Attributes:
        data: planes (n_head, n_tile, tile_bytes), or numbers (n_head, n_rows, n_columns).
        type_number: the GGML type; None if these are no planes.
        first, stop: the rows that count.
    """

    data: Tensor
    type_number: int | None
    n_rows: int
    extent: Extent
    first: int
    stop: int

    @classmethod
    def of_planes(cls, weight: GpuPlanes, part: slice) -> Matrices:
        """Some rows of matrices in planes."""
        first, stop, _ = part.indices(weight.n_rows)
        return cls(weight.planes, weight.type_number, weight.n_rows, weight.extent, first, stop)

    @classmethod
    def of_plain(cls, weight: GpuPlain, part: slice) -> Matrices:
        """Some rows of plain matrices."""
        first, stop, _ = part.indices(weight.n_rows)
        extent = Extent.of(0, weight.data.shape[-1])
        return cls(weight.data, None, weight.n_rows, extent, first, stop)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The rows that count as numbers, (n_head, rows, n_columns)."""
        if self.type_number is None:
            return self.data[:, self.first : self.stop].to(dtype)
        n_head, n_tile, tile_bytes = self.data.shape
        n_rows = n_head * n_tile * TILE
        found = rows.dequantised_rows(
            self.data.view(-1, tile_bytes), self.type_number, self.extent, n_rows, 0, n_rows, dtype
        )
        return found.view(n_head, n_tile * TILE, -1)[:, self.first : self.stop]


def product(x: Tensor, held: Matrices, *, is_transposed: bool) -> Tensor:
    """`x Wᵀ` of each head, or `x W`; see `engine.ops.weights.Weight.per_head`.

    Args:
        x: F32 (T, n_head, n); of up to `MOST_ROWS` rows, each has the same bits alone.
    """
    if 0 < x.shape[0] <= MOST_ROWS and held.data.is_contiguous():
        return _few(x, held, is_transposed)
    dtype = long.short_dtype(x.device)
    if held.type_number is None and held.data.dtype != torch.bfloat16:
        dtype = held.data.dtype  # what is held with more digits is multiplied with them
    values = held.values(dtype)
    numbers, scale = long.shortened(x.transpose(0, 1), dtype)
    y = long.batches(numbers, values if is_transposed else values.mT)
    return (y if scale is None else y * scale).transpose(0, 1)


def _few(x: Tensor, held: Matrices, is_transposed: bool) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    (n_row, n_head, _), extent, n_part = x.shape, held.extent, held.stop - held.first
    n_tile, tile_bytes = held.data.shape[1:]
    n_program = -(-extent.n_blocks // BLOCKS)
    if not is_transposed:
        n_program = -(-held.stop // TILE) - held.first // TILE
    y = x.new_empty(n_row, n_head, extent.n_columns if is_transposed else n_part)
    launch(
        heads.transposed if is_transposed else heads.product, (n_head, n_program if n_part else 0),
        x, held.data, y, tile_bytes, n_tile, extent.n_blocks, extent.skip, held.n_rows, extent.lead,
        extent.n_columns, held.first, n_part, n_row, x.stride(0), x.stride(1),
        M=power_of_two(n_row), BLOCKS=BLOCKS,
        **(PLAIN if held.type_number is None else constants_of(held.type_number)),
    )  # fmt: skip
    return y
