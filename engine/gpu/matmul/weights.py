"""Matrices as a GPU's kernels read them: quantised ones in planes, others as in the file.

How a product is made depends on how many rows are multiplied: few of them by a kernel that reads
each weight once for all, some by one that turns weights into F16 or BF16 on their way to the tensor
cores, many by the vendor's library from weights that were turned into such in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.forward.weight import ALL
from engine.gpu.matmul import (
    dequant_gemm,
    dequantise,
    experts,
    gemv,
    per_head,
    tile_gemm,
    unquantised,
)

if TYPE_CHECKING:
    from engine.forward.expert_rows import Groups
    from engine.quants.extent import Extent


class GpuPlanes:
    """A quantised matrix, or one per expert or head, in planes (`engine.quants.layout`).

    Args:
        planes: uint8, (n_tile, tile_bytes) or (n, n_tile, tile_bytes).
        type_number: the GGML type.
        n_rows: of each matrix.
        extent: its columns.
        x_bytes: of a quantised activation, see `engine.planning.footprint.x_bytes`.
    """

    def __init__(
        self, planes: Tensor, type_number: int, n_rows: int, extent: Extent, x_bytes: int
    ) -> None:
        self.planes = planes
        self.type_number = type_number
        self.n_rows = n_rows
        self.extent = extent
        self.x_bytes = x_bytes

    @property
    def n_bytes(self) -> int:
        return self.planes.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        y = gemv.product(x, self)
        if y is None:
            y = tile_gemm.product(x, self)
        return dequant_gemm.product(x, self) if y is None else y

    def lookup(self, ids: Tensor) -> Tensor:
        return dequantise.look_up(self.planes, self.type_number, self.extent, self.n_rows, ids)

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        y = experts.grouped(self, x, groups)
        if y is None:
            y = torch.cat([self.one(expert).matmul(x[part]) for expert, part in groups])
        return y

    def one(self, index: int) -> GpuPlanes:
        """The matrix of one expert or head."""
        return GpuPlanes(
            self.planes[index], self.type_number, self.n_rows, self.extent, self.x_bytes
        )

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        held = per_head.HeadMatrices.of_planes(self, rows)
        return per_head.product(x, held, is_transposed=transposed)


class GpuPlain:
    """A matrix in F16, BF16 or F32 as in the file, or one per expert or head.

    Args:
        data: (n_out, n_in) or (n, n_out, n_in).
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def n_rows(self) -> int:
        """Of each matrix."""
        return self.data.shape[-2]

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        y = unquantised.product(x, self.data)
        return dequant_gemm.unquantised_product(x, self.data) if y is None else y

    def lookup(self, ids: Tensor) -> Tensor:
        return unquantised.look_up(self.data, ids)

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        y = experts.grouped(self, x, groups)
        if y is None:
            y = torch.cat([GpuPlain(self.data[n]).matmul(x[part]) for n, part in groups])
        return y

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        held = per_head.HeadMatrices.of_plain(self.data, rows)
        return per_head.product(x, held, is_transposed=transposed)
