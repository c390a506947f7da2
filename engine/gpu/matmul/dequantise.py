"""Rows of planes as numbers: for products of many rows by torch, and for looking up tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.gpu.kernels import dequantise as kernels
from engine.gpu.launch.kernel_launch import launch
from engine.gpu.matmul.planes import constants_of
from engine.quants.layout import TILE

if TYPE_CHECKING:
    from engine.quants.extent import Extent

BLOCKS = 8
"""Of 32 columns, that a program turns into numbers, for 16 rows."""

BLOCKS_OF_ROW = 32
"""The same for one row."""


def dequantise_rows(
    planes: Tensor, type_number: int, extent: Extent, n_rows: int, first: int, n: int,
    dtype: torch.dtype, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rows `first` to `first + n` of a matrix; in F32 bit-equal to the dequantised file.

    Args:
        planes: uint8 (n_tile, tile_bytes), of one matrix.
        n_rows: of the matrix.
        dtype: F32, F16 or BF16; the latter are rounded to the nearest.
        out: (n, extent.n_columns) of `dtype` without gaps, to fill and return.
    """
    assert 0 <= first <= first + n <= n_rows, "there are no such rows"
    if out is None:
        out = torch.empty(n, extent.n_columns, dtype=dtype, device=planes.device)
    n_tile = -(-(first + n) // TILE) - first // TILE if n else 0
    launch(
        kernels.dequantise, (n_tile, -(-extent.n_blocks // BLOCKS)),
        planes, planes.shape[-1], extent.n_blocks, extent.skip, extent.lead, extent.n_columns,
        n, first, out, BLOCKS=BLOCKS, IS_EXACT=extent.is_exact, **constants_of(type_number),
    )  # fmt: skip
    return out


def look_up(planes: Tensor, type_number: int, extent: Extent, n_rows: int, ids: Tensor) -> Tensor:
    """Rows `ids` (T,) of a matrix as (T, extent.n_columns) in F32; zeros where there is none.

    Args:
        planes: uint8 (n_tile, tile_bytes), of one matrix.
        n_rows: of the matrix; ids may be any numbers.
    """
    out = torch.empty(len(ids), extent.n_columns, device=planes.device)
    launch(
        kernels.look_up, (len(ids), -(-extent.n_blocks // BLOCKS_OF_ROW)),
        planes, planes.shape[-1], extent.n_blocks, extent.skip, extent.lead, extent.n_columns,
        n_rows, ids.contiguous(), out, BLOCKS=BLOCKS_OF_ROW, num_warps=1,
        **constants_of(type_number),
    )  # fmt: skip
    return out
