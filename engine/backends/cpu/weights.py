"""Matrices in the CPU kernels' planes or as int16, and matrices in several parts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cached_property, reduce

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.products.gemm import MAX_TILES, MIN_PANELS
from engine.backends.cpu.kernels.products.int16_panels import BALANCE
from engine.backends.cpu.kernels.products.panels import quantised_bytes
from engine.backends.cpu.kernels.running import compiled
from engine.backends.cpu.kernels.running.fastcall import Kernel
from engine.backends.cpu.kernels.running.result_memory import result
from engine.backends.cpu.plain_weights import PIECE_BYTES, float_product
from engine.backends.cpu.worker import PackedRows, Worker
from engine.backends.reference.weights import gathered_rows
from engine.formats.quants.layout import (
    BF16_CHUNK,
    BLOCK,
    INT16_BLOCK_BYTES,
    INT16_FACTOR_BYTES,
    INT16_PANEL_BYTES,
    SUPER,
    TILE,
    Extent,
    n_tiles,
    panel_block_bytes,
    word_tile_bytes,
)
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import ALL, Weight

PASS_BYTES = 4 << 20
"""Bytes of quantised activations per pass over the weights, which fit in the last-level cache."""

PIECE_TILES = 2 * MAX_TILES
"""Tiles per piece for many tokens."""


class PlaneWeight:
    """A quantised matrix, or one per expert or head, in planes (`engine.formats.quants.layout`).

    Args:
        planes: weights, uint8 (n_tile, tile_bytes) or (n, n_tile, tile_bytes).
        type_number: id of the GGML type.
        n_rows: number of rows in each matrix.
        extent: columns of each matrix.

    Attributes:
        n_tiles_per_piece: tiles per piece for few tokens.
        n_tiles_for_many: tiles per piece for many tokens.
        many_tokens: smallest number of tokens that counts as many.
        n_tokens_per_pass: maximum number of tokens per pass over the weights.
    """

    def __init__(
        self, planes: Tensor, type_number: int, n_rows: int, extent: Extent, worker: Worker
    ) -> None:
        self.planes = planes
        self.type_number = type_number
        self.n_rows = n_rows
        self.extent = extent
        self.worker = worker
        self._multiply = self._product
        tile_bytes = planes.shape[-1]
        self._planes = planes.data_ptr(), tile_bytes, extent.n_blocks, extent.skip
        per_thread = n_tiles(n_rows) // (2 * worker.n_threads)
        self.n_tiles_per_piece = max(1, min(PIECE_BYTES // tile_bytes, per_thread))
        self.n_tiles_for_many = max(1, min(PIECE_TILES, per_thread))
        group = chosen().tile_tokens
        self.many_tokens = MIN_PANELS * group
        per_token = extent.n_blocks * self._panel_block_bytes
        self.n_tokens_per_pass = max(group, PASS_BYTES // max(1, per_token) // group * group)

    @property
    def x_bytes(self) -> int:
        """Bytes per quantised activation."""
        return self.worker.x_bytes

    @property
    def rows(self) -> PackedRows:
        """Memory for activations in this matrix's format."""
        return self.worker.rows

    @property
    def task(self) -> int:
        """Address of the product's piece function, for use in `multiply_all`."""
        return compiled.multiply_piece(self.type_number, self.x_bytes)

    @property
    def _product(self) -> Kernel:
        return compiled.multiply(self.type_number, self.x_bytes)

    @property
    def _panel_block_bytes(self) -> int:
        return panel_block_bytes(self.x_bytes)

    @property
    def n_bytes(self) -> int:
        return self.planes.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        if x.shape[0] >= self.worker.bf16_from:
            return self._bf16_product(x)
        return self._own_product(x)

    def _own_product(self, x: Tensor) -> Tensor:
        n_tokens, worker = x.shape[0], self.worker
        if n_tokens < self.many_tokens:
            return self._gemv.joined(x)
        y = result(n_tokens, self.n_rows)
        panels = self.rows.panels(x, self.extent)
        worker.pool.wake()
        self._multiply(
            worker.pool.address, *self.arguments(panels, n_tokens, y.data_ptr(), 4 * self.n_rows)
        )
        return y

    @cached_property
    def _gemv(self) -> JointProduct:
        return JointProduct([self])

    @property
    def n_pieces(self) -> int:
        """Number of pieces in a GEMV."""
        return -(-n_tiles(self.n_rows) // self.n_tiles_per_piece)

    def arguments(self, panels: int, n_tokens: int, out: int, out_stride: int) -> tuple[int, ...]:
        """Return the arguments for the GEMM kernel (`cpu.kernels.products.gemm`).

        Args:
            panels: address of the quantised activations.
            out: address of the result.
            out_stride: bytes between the results of adjacent tokens.
        """
        return (
            *self._planes, panels, n_tokens, out, out_stride, self.n_rows, n_tiles(self.n_rows),
            self._piece(n_tokens), self.n_tokens_per_pass,
        )  # fmt: skip

    def _piece(self, n_tokens: int) -> int:
        is_many = n_tokens >= self.many_tokens
        return self.n_tiles_for_many if is_many else self.n_tiles_per_piece

    def _bf16_product(self, x: Tensor) -> Tensor:
        extent, worker = self.extent, self.worker
        x_bf16, y = worker.bf16(x, extent), torch.empty(x.shape[0], self.n_rows)
        n_columns = extent.n_blocks * BLOCK
        step = max(1, BF16_CHUNK // (n_columns * TILE))
        scratch = worker.bf16_scratch(step * TILE * n_columns)
        for first in range(0, n_tiles(self.n_rows), step):
            n = min(step, n_tiles(self.n_rows) - first)
            worker.pool.wake()
            compiled.bf16_rows(self.type_number)(
                worker.pool.address, *self._planes, first, n, scratch.data_ptr(),
            )  # fmt: skip
            n_rows = min(n * TILE, self.n_rows - first * TILE)
            rows = scratch[: n_rows * n_columns].view(n_rows, n_columns)
            worker.pool.rest()
            y[:, first * TILE : first * TILE + n_rows] = linear(x_bf16, rows)
        return y

    def lookup(self, ids: Tensor) -> Tensor:
        extent, worker = self.extent, self.worker
        ids = ids.to(torch.int64).contiguous()
        rows = torch.empty(ids.shape[0], extent.n_blocks * BLOCK)
        worker.pool.wake()
        compiled.lookup(self.type_number)(
            worker.pool.address, *self._planes, self.n_rows, ids.data_ptr(), ids.shape[0],
            rows.data_ptr(), 4 * rows.stride(0),
        )  # fmt: skip
        return rows[:, extent.lead : extent.lead + extent.n_columns]

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        extent, worker = self.extent, self.worker
        y = result(groups.n_row, self.n_rows)
        is_shared = x.stride(0) == 0  # all rows are views of one token
        if is_shared:
            panels, row_bytes = worker.rows.shared_panels(x, extent), 0
        else:
            panels = worker.rows.group_panels(x, extent, groups)
            row_bytes = quantised_bytes(1, extent.n_blocks, worker.x_bytes)
        n_group, (planes, sizes) = groups.table.shape[0], self._group_arguments
        worker.pool.wake()
        self._multiply_groups(
            worker.pool.address, *planes, panels, row_bytes, y.data_ptr(), *sizes,
            self._piece(groups.n_row // n_group), self.n_tokens_per_pass,
            groups.table.data_ptr(), n_group,
        )  # fmt: skip
        return y

    @property
    def expert_product(self) -> tuple[int, ...]:
        """This matrix's `PRODUCT` entry for `kernels.products.experts`."""
        address, *others = self._planes
        sizes = self.n_rows, n_tiles(self.n_rows)
        return self.task, address, self.planes.stride(0), *others, *sizes

    @cached_property
    def _multiply_groups(self) -> Kernel:
        return compiled.multiply_groups(self.type_number, self.worker.x_bytes)

    @cached_property
    def _group_arguments(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        address, *others = self._planes
        sizes = 4 * self.n_rows, self.n_rows, n_tiles(self.n_rows)
        return (address, self.planes.stride(0), *others), sizes

    def _matrix(self, index: int) -> PlaneWeight:
        return PlaneWeight(
            self.planes[index], self.type_number, self.n_rows, self.extent, self.worker
        )

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        ids = torch.arange(self.n_rows)[rows]
        n_out = self.extent.n_columns if transposed else len(ids)
        y = torch.empty(x.shape[0], x.shape[1], n_out)
        for head in range(self.planes.shape[0]):
            matrix, one = self._matrix(head).lookup(ids)[None], slice(head, head + 1)
            float_product(self.worker.pool, matrix, x[:, one], y[:, one], transposed=transposed)
        return y


class FineWeight(PlaneWeight):
    """A quantised matrix in planes with two-byte activations; see `cpu.packing.FINE`."""

    @property
    def x_bytes(self) -> int:
        return 2

    @property
    def rows(self) -> PackedRows:
        return self.worker.fine


class JointProduct:
    """Products of several matrices and one small batch, computed by one kernel call.

    A single token's result is always in the same memory, valid until the next such call.

    Args:
        weights: matrices on one rank; see `can_join`.

    Attributes:
        n_tokens: maximum number of tokens per call.
    """

    def __init__(self, weights: Sequence[PlaneWeight]) -> None:
        first = weights[0]
        self.n_tokens = first.many_tokens - 1
        self._worker, self._extent = first.worker, first.extent
        self._forms = list(dict.fromkeys(weight.rows for weight in weights))
        self._rows = [weight.n_rows for weight in weights]
        self._width = sum(self._rows)
        self._planes = [weight.planes for weight in weights]  # kept alive for the arguments
        self._arguments = [array("q", weight.arguments(0, 0, 0, 0)) for weight in weights]
        self._table = array("q")
        for weight, arguments in zip(weights, self._arguments, strict=True):
            form, address = self._forms.index(weight.rows), arguments.buffer_info()[0]
            self._table.extend((weight.task, address, weight.n_pieces, form))
        self._multiply, self._multiply_gated = compiled.multiply_all(), compiled.multiply_gated()
        self._jobs = self._table.buffer_info()[0], len(weights)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Return the product of each matrix with x (T, n_in), T ≤ `n_tokens`."""
        if x.shape[0] != 1:
            return self.joined(x).split_with_sizes(self._rows, 1)
        y, parts = self._one_token_products
        self._compute(x, y)
        return parts

    @cached_property
    def _one_token_products(self) -> tuple[Tensor, Sequence[Tensor]]:
        y = torch.empty(1, self._width)
        return y, y.split_with_sizes(self._rows, 1)

    def joined(self, x: Tensor) -> Tensor:
        """Return the products side by side in new memory, (T, rows of all matrices)."""
        y = torch.empty(x.shape[0], self._width)
        self._compute(x, y)
        return y

    def _compute(self, x: Tensor, y: Tensor) -> None:
        worker, activations = self._worker, self._activations(x)
        worker.pool.wake()
        self._multiply(
            worker.pool.address, *self._jobs, *activations, y.data_ptr(), 4 * self._width
        )

    def _activations(self, x: Tensor) -> tuple[int, ...]:
        """Return the arguments of `multiply_all` from `quantise` to `second_panels`."""
        first = self._forms[0].activations(x, self._extent)
        if len(self._forms) == 1:
            return *first, 0, 0
        quantise, *rows, panels = self._forms[1].activations(x, self._extent)
        if not first[0]:  # already packed, so only the other form reads x
            first = 0, *rows, first[-1]
        return *first, quantise, panels

    def gated(self, x: Tensor, activation: int, limit: int) -> Tensor:
        """Return `act(first product) * second product`; both matrices have the same number of rows.

        Args:
            activation: address of a kernel in `engine.backends.cpu.kernels.small.activation`.
            limit: the activation's limit, as F32 bits.
        """
        worker, n_tokens = self._worker, x.shape[0]
        y = self._one_token_gated if n_tokens == 1 else torch.empty(n_tokens, self._rows[0])
        activations = self._activations(x)
        worker.pool.wake()
        self._multiply_gated(
            worker.pool.address, activation, limit, y.data_ptr(), *self._jobs, *activations,
            worker.f32_scratch(n_tokens * self._width), 4 * self._width,
        )  # fmt: skip
        return y

    @cached_property
    def _one_token_gated(self) -> Tensor:
        return torch.empty(1, self._rows[0])


def can_join(weights: Sequence[PlaneWeight]) -> bool:
    """Return whether matrices have the same columns and need at most two activation formats."""
    extents = {weight.extent for weight in weights}
    return len(extents) == 1 and len({weight.rows for weight in weights}) <= 2


class JoinedColumns:
    """A matrix made up of several column intervals from the file, each a separate weight.

    Args:
        widths: number of columns in each part.
    """

    def __init__(self, parts: Sequence[Weight], widths: Sequence[int]) -> None:
        self.parts = parts
        self.widths = widths

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts)

    def matmul(self, x: Tensor) -> Tensor:
        return self._summed(x, lambda part, piece: part.matmul(piece))

    def lookup(self, ids: Tensor) -> Tensor:
        return torch.cat([part.lookup(ids) for part in self.parts], dim=-1)

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        return self._summed(x, lambda part, piece: part.grouped(piece, groups))

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        if transposed:
            return torch.cat([p.per_head(x, rows, transposed=True) for p in self.parts], dim=-1)
        return self._summed(x, lambda part, piece: part.per_head(piece, rows))

    def _summed(self, x: Tensor, product: Callable[[Weight, Tensor], Tensor]) -> Tensor:
        return reduce(
            torch.add, map(product, self.parts, torch.split(x, list(self.widths), dim=-1))
        )


class Int16Weight(PlaneWeight):
    """An F16 or BF16 matrix as int16, in whole blocks: `word_tile_bytes` per tile in `planes`."""

    @property
    def rows(self) -> PackedRows:
        return self.worker.int16

    @property
    def task(self) -> int:
        return compiled.multiply_int16_piece()

    @property
    def _product(self) -> Kernel:
        return compiled.multiply_int16()

    @property
    def _panel_block_bytes(self) -> int:
        return INT16_PANEL_BYTES

    def matmul(self, x: Tensor) -> Tensor:
        return self._own_product(x)

    def lookup(self, ids: Tensor) -> Tensor:
        return gathered_rows(ids, self.n_rows, self._rows_at)

    def _rows_at(self, ids: Tensor) -> Tensor:
        numbers = self.planes.view(torch.int32).flatten()
        begin = (ids // TILE * self.planes.stride(0) // 4 + ids % TILE)[:, None]
        factors, words = self._places
        found = numbers[begin + words].view(torch.int16)
        scales = numbers[begin + factors].view(torch.float32) * (1 / BALANCE)
        return found * scales.repeat_interleave(2, 1)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Offsets, in i32, of each column pair's factor and numbers in a tile's first row."""
        pairs = torch.arange(self.extent.n_blocks * BLOCK // 2)
        group = pairs // (SUPER * BLOCK // 2)
        group_bytes = word_tile_bytes(SUPER)
        inside = pairs % (SUPER * BLOCK // 2) * (INT16_BLOCK_BYTES // (BLOCK // 2))
        begin = group * group_bytes
        return begin // 4, (begin + INT16_FACTOR_BYTES + inside) // 4
