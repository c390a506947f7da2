"""Weights on a GPU: quantised matrices in planes, others as in the file.

How they are multiplied depends on the number of rows x: a few by gemv, which reads each weight once
for all rows (`reference.few_rows`); up to a few hundred by a tile GEMM, which converts weights to
F16 or BF16 on their way to the tensor cores; more by the vendor's library, from weights converted
in memory. Multi-head latent attention has one matrix per head; kernels multiply a few rows by it,
and the library multiplies more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.gpu import moe
from engine.backends.gpu.kernels import unquantised as kernels
from engine.backends.gpu.launch.configs import allows, target_of
from engine.backends.gpu.launch.kernel_launch import launch
from engine.backends.gpu.matmul import dequant_gemm, gemv, tile_gemm
from engine.backends.gpu.quantised import QuantisedMatrix, constants_of
from engine.errors import EngineError
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.layout import DEVICE_CHUNK, LAYOUTS, TILE, Extent
from engine.model.forward.attention import most_few_rows
from engine.model.forward.batch import SMALL_BATCH
from engine.model.forward.operands import ALL

if TYPE_CHECKING:
    from engine.model.forward.expert_rows import Groups


class GpuPlanes(QuantisedMatrix):
    """A quantised matrix in planes, or one per expert or head if planes have three dimensions."""

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
        """Multiply some rows at a time if the kernel for many rows is refused.

        Raises:
            EngineError: all kernels are refused.
        """
        most_rows = tile_gemm.most_rows(target_of(x.device))
        for product, most in ((tile_gemm.product, most_rows), (gemv.product, SMALL_BATCH)):
            if len(x) > most:
                found = [product(some, self) for some in torch.split(x, most)]
                pieces = [y for y in found if y is not None]
                if len(pieces) == len(found):
                    return torch.cat(pieces)
        raise EngineError(
            "No kernel multiplies {type} weights correctly on this GPU.",
            "Set TANDEM_BACKEND=reference to run without Tandem's own kernels.",
            type=TYPES[self.type_number].name,
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
        """Return one expert's or head's matrix."""
        return GpuPlanes(
            self.planes[index], self.type_number, self.n_rows, self.extent, self.x_bytes
        )

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        first, stop, _ = rows.indices(self.n_rows)
        held = HeadMatrices(self.planes, self.type_number, self.extent, first, stop)
        return per_head_product(x, held, is_transposed=transposed)


class GpuPlain:
    """A matrix (n_out, n_in) in F16, BF16 or F32 as in the file, or one per expert or head."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def n_rows(self) -> int:
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
        first, stop, _ = rows.indices(self.n_rows)
        held = HeadMatrices(self.data, None, Extent.of(0, self.data.shape[-1]), first, stop)
        return per_head_product(x, held, is_transposed=transposed)


WORDS = 64  # words per row that a program of `x Wᵀ` reads from the plane `low` per iteration

WORDS_TRANSPOSED, NUMBERS_TRANSPOSED = 16, 512
"""Words per row that a program of `x W` reads from the plane `low` per iteration, and sums that it
keeps for each of them, since every weight in a word has a separate sum."""

ROWS, COLUMNS = 4, 256  # rows and columns that a program of `x Wᵀ` reads per iteration, unquantised
PLAIN_ROWS, PLAIN_COLUMNS = 16, 64  # the same for `x W`


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """A range of rows in each head's matrix.

    Attributes:
        data: planes (n_head, n_tile, tile_bytes), or elements (n_head, n_rows, n_columns).
        type_number: GGML type number of planes; None for elements.
        extent: the columns of the file's matrix that are stored.
        first, stop: first row in the range, and the one after its last.
    """

    data: Tensor
    type_number: int | None
    extent: Extent
    first: int
    stop: int

    @property
    def n_part(self) -> int:
        return self.stop - self.first

    def values(self, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Return the range's elements for heads `start` to `stop`, (heads, n_part, n_columns)."""
        data = self.data[start:stop]
        if self.type_number is None:
            return data[:, self.first : self.stop].to(dtype)
        n_head, n_tile, tile_bytes = data.shape
        n_rows = n_head * n_tile * TILE
        found = dequant_gemm.dequantise_rows(
            data.reshape(-1, tile_bytes), self.type_number, self.extent, n_rows, 0, n_rows, dtype
        )
        return found.view(n_head, n_tile * TILE, -1)[:, self.first : self.stop]


def per_head_product(x: Tensor, held: HeadMatrices, *, is_transposed: bool) -> Tensor:
    """Return `x Wᵀ` or `x W` for each head; see `engine.model.forward.ops.Weight.per_head`.

    For few rows x (T, n_head, n), F32, each row's result has the same bits in any batch.
    """
    kind = str(held.data.dtype) if held.type_number is None else held.type_number
    is_few = 0 < x.shape[0] <= most_few_rows() and held.data.is_contiguous()
    if not is_few or not allows(x.device, "per_head", kind, int(is_transposed)):
        return _gemm(x, held, is_transposed)
    if x.stride(-1) != 1:
        x = x.contiguous()
    width = held.extent.n_columns if is_transposed else held.n_part
    y = x.new_empty(x.shape[0], x.shape[1], width)
    if held.n_part == 0:
        return y.zero_()
    gemv = _plain_gemv if held.type_number is None else _planes_gemv
    gemv(x, held, y, is_transposed)
    return y


def _planes_gemv(x: Tensor, held: HeadMatrices, y: Tensor, is_transposed: bool) -> None:
    assert held.type_number is not None, "it is in planes"
    extent, low = held.extent, LAYOUTS[held.type_number].low
    if is_transposed:
        n_block, n_rows = WORDS_TRANSPOSED // low, min(64, NUMBERS_TRANSPOSED * low // 32)
        n_part = -(-extent.n_blocks // n_block)
    else:
        n_block, n_rows = WORDS // low, TILE
        n_part = -(-held.stop // TILE) - held.first // TILE
    n_tile, tile_bytes = held.data.shape[1:]
    launch(
        kernels.planes_transposed if is_transposed else kernels.planes_product,
        (x.shape[1], n_part, x.shape[0]),
        x, held.data, y, tile_bytes, n_tile, extent.n_blocks, extent.skip, extent.lead,
        extent.n_columns, held.first, held.n_part, x.stride(0), x.stride(1), BLOCKS=n_block,
        ROWS=n_rows, ASM=target_of(x.device).has_asm, **constants_of(held.type_number),
    )  # fmt: skip


def _plain_gemv(x: Tensor, held: HeadMatrices, y: Tensor, is_transposed: bool) -> None:
    n_rows, n_columns = held.data.shape[1:]
    aligned = 16 if n_columns % 16 == 0 else 1
    n_part = -(-n_columns // PLAIN_COLUMNS) if is_transposed else -(-held.n_part // ROWS)
    launch(
        kernels.plain_transposed if is_transposed else kernels.plain_product,
        (x.shape[1], n_part, x.shape[0]),
        x, held.data, y, n_rows, n_columns // aligned, held.first, held.n_part, x.stride(0),
        x.stride(1), ROWS=PLAIN_ROWS if is_transposed else ROWS,
        COLUMNS=PLAIN_COLUMNS if is_transposed else COLUMNS, ALIGNED=aligned,
    )  # fmt: skip


def _gemm(x: Tensor, held: HeadMatrices, is_transposed: bool) -> Tensor:
    dtype = dequant_gemm.half_dtype(x.device)
    if held.type_number is None and held.data.dtype != torch.bfloat16:
        dtype = held.data.dtype  # F32 and F16 have more digits than BF16
    numbers, scale = dequant_gemm.to_half(x.transpose(0, 1), dtype)
    n_head, n_columns = x.shape[1], held.extent.n_columns
    y = x.new_empty(n_head, x.shape[0], n_columns if is_transposed else held.n_part)
    per_head = n_columns * held.data.shape[1] * (1 if held.type_number is None else TILE)
    step = max(1, DEVICE_CHUNK // max(1, per_head))
    for start in range(0, n_head, step):
        values = held.values(dtype, start, start + step)
        y[start : start + step] = dequant_gemm.batched_multiply(
            numbers[start : start + step], values if is_transposed else values.mT
        )
    return (y if scale is None else y.mul_(scale)).transpose(0, 1)
