"""F16 and BF16 matrices in words (`engine.cpu.kernels.words`)."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from engine.cpu.kernels import compiled
from engine.cpu.kernels.fastcall import Kernel
from engine.cpu.weights import PlaneWeight
from engine.cpu.worker import PackedRows
from engine.ops.weights import gathered_rows
from engine.quants.extent import (
    WORD_BLOCK_BYTES,
    WORD_FACTOR_BYTES,
    WORD_PANEL_BYTES,
    word_tile_bytes,
)
from engine.quants.layout import BLOCK, SUPER, TILE


class WordWeight(PlaneWeight):
    """An F16 or BF16 matrix in tiles of words.

    Its columns are whole blocks, and `planes` has `word_tile_bytes` for each tile.
    """

    @property
    def rows(self) -> PackedRows:
        return self.worker.words

    @property
    def task(self) -> int:
        return compiled.multiply_words_piece()

    @property
    def _product(self) -> Kernel:
        return compiled.multiply_words()

    @property
    def _panel_block_bytes(self) -> int:
        return WORD_PANEL_BYTES

    def matmul(self, x: Tensor) -> Tensor:
        return self._own_product(x)

    def lookup(self, ids: Tensor) -> Tensor:
        return gathered_rows(ids, self.n_rows, self._rows_at)

    def _rows_at(self, ids: Tensor) -> Tensor:
        """Return rows that the matrix has, in F32."""
        numbers = self.planes.view(torch.int32).flatten()
        begin = (ids // TILE * self.planes.stride(0) // 4 + ids % TILE)[:, None]
        factors, words = self._places
        found = numbers[begin + words].view(torch.int16)
        return found * numbers[begin + factors].view(torch.float32).repeat_interleave(2, 1)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Places of each pair of columns of a tile's first row: of its factor and its words.

        They are counted in four bytes from the beginning of the tile.
        """
        pairs = torch.arange(self.extent.n_blocks * BLOCK // 2)
        group = pairs // (SUPER * BLOCK // 2)
        group_bytes = word_tile_bytes(SUPER)
        inside = pairs % (SUPER * BLOCK // 2) * (WORD_BLOCK_BYTES // (BLOCK // 2))
        begin = group * group_bytes
        return begin // 4, (begin + WORD_FACTOR_BYTES + inside) // 4
