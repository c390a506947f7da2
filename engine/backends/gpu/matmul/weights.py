"""Weights of a GPU: quantised matrices in planes, others as in the file.

The number of rows x decides how they are multiplied: few by gemv, which reads each weight once for
all rows (`reference.few_rows`); up to some hundred by a tile GEMM, which converts weights to
F16 or BF16 on their way to the tensor cores; more by the vendor's library, from weights converted
in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.gpu import moe
from engine.backends.gpu.launch.configs import target_of
from engine.backends.gpu.matmul import dequant_gemm, gemv, per_head, tile_gemm
from engine.backends.gpu.quantised import QuantisedMatrix
from engine.errors import EngineError
from engine.formats.gguf.tensors import TYPES
from engine.model.forward.batch import SMALL_BATCH
from engine.model.forward.operands import ALL

if TYPE_CHECKING:
    from engine.model.forward.expert_rows import Groups


class GpuPlanes(QuantisedMatrix):
    """A quantised matrix, or one per expert or head, in planes (`engine.formats.quants.layout`).

    Args:
        planes: uint8, (n_tile, tile_bytes) or (n, n_tile, tile_bytes).
        x_bytes: see `engine.planning.footprint.x_bytes`.
        type_number, n_rows, extent: see `QuantisedMatrix`.
    """

    @property
    def n_bytes(self) -> int:
        return self.planes.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        y = None
        if x.shape[0] <= tile_gemm.most_rows(target_of(x.device)):
            y = gemv.product(x, self)
            if y is None:
                y = tile_gemm.product(x, self)
        if y is None and dequant_gemm.serves(x, [self]):
            y = dequant_gemm.product(x, self)
        return self._in_pieces(x) if y is None else y

    def _in_pieces(self, x: Tensor) -> Tensor:
        """Multiply some rows at a time, where the way for many is refused.

        Raises:
            EngineError: all ways are refused.
        """
        most_rows = tile_gemm.most_rows(target_of(x.device))
        for product, most in ((tile_gemm.product, most_rows), (gemv.product, SMALL_BATCH)):
            if len(x) > most:
                found = [product(some, self) for some in torch.split(x, most)]
                pieces = [y for y in found if y is not None]
                if len(pieces) == len(found):
                    return torch.cat(pieces)
        name = TYPES[self.type_number].name
        raise EngineError(
            f"No kernel multiplies {name} weights correctly on this GPU.",
            "Set TANDEM_BACKEND=reference to do without kernels of Tandem's own.",
        )

    def lookup(self, ids: Tensor) -> Tensor:
        return dequant_gemm.look_up(self.planes, self.type_number, self.extent, self.n_rows, ids)

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        y = moe.grouped(self, x, groups)
        if y is None:
            parts = moe.by_expert(groups)
            y = torch.cat([self.one(expert).matmul(x[part]) for expert, part in parts])
        return y

    def one(self, index: int) -> GpuPlanes:
        """Return the matrix of one expert or head."""
        return GpuPlanes(
            self.planes[index], self.type_number, self.n_rows, self.extent, self.x_bytes
        )

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        held = per_head.HeadMatrices.of_planes(self, rows)
        return per_head.product(x, held, is_transposed=transposed)


class GpuPlain:
    """A matrix in F16, BF16 or F32 as in the file, or one per expert or head.

    Args:
        data: elements, (n_out, n_in) or (n, n_out, n_in).
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def n_rows(self) -> int:
        """Number of rows of each matrix."""
        return self.data.shape[-2]

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        y = gemv.plain_product(x, self.data)
        return dequant_gemm.product(x, self.data) if y is None else y

    def lookup(self, ids: Tensor) -> Tensor:
        return gemv.look_up(self.data, ids)

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        y = moe.grouped(self, x, groups)
        if y is None:
            parts = moe.by_expert(groups)
            y = torch.cat([GpuPlain(self.data[n]).matmul(x[part]) for n, part in parts])
        return y

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        held = per_head.HeadMatrices.of_plain(self.data, rows)
        return per_head.product(x, held, is_transposed=transposed)
