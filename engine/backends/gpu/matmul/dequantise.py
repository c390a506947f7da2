"""Dequantised rows of matrices in planes, for GEMM by torch and for embedding look-ups."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.gpu.kernels import dequantise as kernels
from engine.backends.gpu.launch.kernel_launch import FixedConstants, launch
from engine.backends.gpu.launch.refusals import allows
from engine.backends.gpu.matmul.planes import constants_of
from engine.formats.quants.extent import DEVICE_CHUNK
from engine.formats.quants.layout import TILE

if TYPE_CHECKING:
    from engine.formats.quants.extent import Extent

BLOCKS = 8
"""Number of blocks of 32 columns that a program dequantises, of 16 rows each."""

BLOCKS_OF_ROW = 32
"""Number of blocks of 32 columns that a program of a look-up dequantises, of one row."""


def dequantise_rows(
    planes: Tensor, type_number: int, extent: Extent, n_rows: int, first: int, n: int,
    dtype: torch.dtype, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Dequantise rows `first` to `first + n` of a matrix; in F32 bit-equal to the dequantised file.

    Args:
        planes: planes of one matrix, uint8 (n_tile, tile_bytes).
        n_rows: number of rows of the matrix.
        dtype: F32, F16 or BF16; the latter are rounded to the nearest.
        out: contiguous output (n, extent.n_columns) of `dtype`; None to allocate one.
    """
    assert 0 <= first <= first + n <= n_rows, "there are no such rows"
    if out is None:
        out = torch.empty(n, extent.n_columns, dtype=dtype, device=planes.device)
    n_tile = -(-(first + n) // TILE) - first // TILE if n else 0
    launch(
        kernels.dequantise, (n_tile, -(-extent.n_blocks // BLOCKS)),
        planes, planes.shape[-1], extent.n_blocks, extent.skip, extent.lead, extent.n_columns,
        n, first, out, fixed=_constants(type_number, extent.is_exact),
    )  # fmt: skip
    return out


@cache
def _constants(type_number: int, is_exact: bool) -> FixedConstants:
    """Return the constants of the kernel that dequantises; it starts most often in a prompt."""
    return FixedConstants({"BLOCKS": BLOCKS, "IS_EXACT": is_exact, **constants_of(type_number)})


def look_up(planes: Tensor, type_number: int, extent: Extent, n_rows: int, ids: Tensor) -> Tensor:
    """Return rows `ids` (T,) of a matrix as F32 (T, extent.n_columns).

    Args:
        planes: planes of one matrix, uint8 (n_tile, tile_bytes).
        n_rows: number of rows of the matrix; ids out of range give rows of zeros.
    """
    if not allows(planes.device, "look_up", type_number):
        return _searched(planes, type_number, extent, n_rows, ids)
    out = torch.empty(len(ids), extent.n_columns, device=planes.device)
    launch(
        kernels.look_up, (len(ids), -(-extent.n_blocks // BLOCKS_OF_ROW)),
        planes, planes.shape[-1], extent.n_blocks, extent.skip, extent.lead, extent.n_columns,
        n_rows, ids.contiguous(), out, BLOCKS=BLOCKS_OF_ROW, num_warps=1,
        **constants_of(type_number),
    )  # fmt: skip
    return out


def _searched(planes: Tensor, type_number: int, extent: Extent, n_rows: int, ids: Tensor) -> Tensor:
    """Compute `look_up` from all rows, dequantised some at a time: the host does not know ids."""
    out = torch.zeros(len(ids), extent.n_columns, device=planes.device)
    step = max(TILE, DEVICE_CHUNK // extent.n_columns // TILE * TILE)
    for first in range(0, n_rows, step):
        n = min(step, n_rows - first)
        rows = dequantise_rows(planes, type_number, extent, n_rows, first, n, torch.float32)
        is_here = (ids >= first) & (ids < first + n)
        here = rows.index_select(0, (ids - first).clamp(0, n - 1))
        out = here.where(is_here[:, None], out)
    return out
