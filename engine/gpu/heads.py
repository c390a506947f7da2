"""Products with one matrix for each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.gpu import rows
from engine.kernels.layout import TILE

if TYPE_CHECKING:
    from engine.gpu.weights import GpuPlanes


def matrices(weight: GpuPlanes) -> Tensor:
    """The matrices of all heads, F32 (n_head, n_rows, n_columns)."""
    n_head, n_tile, tile_bytes = weight.planes.shape
    n_rows = n_head * n_tile * TILE
    found = rows.dequantised_rows(
        weight.planes.view(-1, tile_bytes), weight.type_number, weight.extent, n_rows, 0, n_rows,
        torch.float32,
    )  # fmt: skip
    return found.view(n_head, n_tile * TILE, -1)[:, : weight.n_rows]


def product(x: Tensor, matrices: Tensor, *, is_transposed: bool) -> Tensor:
    """`x Wᵀ` of each head, or `x W`; see `engine.ops.weights.Weight.per_head`.

    Args:
        x: F32 (T, n_head, n).
        matrices: (n_head, n_out, n_in).
    """
    held = matrices.float()
    return torch.bmm(x.transpose(0, 1), held if is_transposed else held.mT).transpose(0, 1)
