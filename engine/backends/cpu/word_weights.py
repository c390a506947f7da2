"""F16 and BF16 matrices in words (`engine.backends.cpu.kernels.words.words`)."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from engine.backends.cpu.kernels import compiled
from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.running.fastcall import Kernel
from engine.backends.cpu.kernels.running.result_memory import result
from engine.backends.cpu.kernels.words.combined_panels import PAIR
from engine.backends.cpu.kernels.words.quad_products import QUAD
from engine.backends.cpu.kernels.words.seven_products import MOST_PAIRS, MOST_QUADS, fits
from engine.backends.cpu.kernels.words.words import BALANCE
from engine.backends.cpu.weights import PlaneWeight
from engine.backends.cpu.worker import PackedRows
from engine.backends.reference.weights import gathered_rows
from engine.formats.quants.extent import (
    WORD_BLOCK_BYTES,
    WORD_FACTOR_BYTES,
    WORD_PANEL_BYTES,
    n_tiles,
    word_tile_bytes,
)
from engine.formats.quants.layout import BLOCK, SUPER, TILE

LEAST_TOKENS = 32
"""Smallest number of tokens for which seven products are faster."""


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
        if x.shape[0] < LEAST_TOKENS or self._n_quad == 0:
            return self._own_product(x)
        return self._by_seven_products(x)

    @cached_property
    def _n_quad(self) -> int:
        """Number of whole quads, see `seven_products`; 0 where these do not fit."""
        return self.n_rows // (QUAD * TILE) if fits(self.extent.n_blocks) else 0

    def _by_seven_products(self, x: Tensor) -> Tensor:
        """Multiply whole quads and pairs by `seven_products`, the rest as usual: the same bits."""
        n_tokens, team, extent, per_pair = len(x), self.worker.team, self.extent, _pair_tokens()
        n_quad, n_pair = self._n_quad, n_tokens // per_pair
        y, combined = result(n_tokens, self.n_rows), self.worker.pairs.panels(x, extent)
        out, stride = y.data_ptr(), 4 * self.n_rows
        planes, tile_bytes, n_blocks, skip = self._planes
        n_pass = -(-n_pair // MOST_PAIRS)
        team.wake()
        compiled.multiply_combined_words()(
            team.address, planes, tile_bytes, n_blocks, combined, n_pair, out, stride, n_quad,
            max(1, min(MOST_QUADS, n_quad // (2 * team.n_threads))), -(-n_pair // n_pass),
        )  # fmt: skip
        n_done, n_row = n_pair * per_pair, n_quad * QUAD * TILE
        if n_row < self.n_rows:
            left, behind = self.n_rows - n_row, planes + n_quad * QUAD * tile_bytes
            panels = self.rows.panels(x, extent)
            team.wake()
            self._multiply(
                team.address, behind, tile_bytes, n_blocks, skip, panels, n_done, out + 4 * n_row,
                stride, left, n_tiles(left), 1, self.n_tokens_per_pass,
            )  # fmt: skip
        if n_done < n_tokens:
            panels = self.rows.panels(x[n_done:], extent)
            team.wake()
            self._multiply(
                team.address,
                *self.arguments(panels, n_tokens - n_done, out + n_done * stride, stride),
            )
        return y

    def lookup(self, ids: Tensor) -> Tensor:
        return gathered_rows(ids, self.n_rows, self._rows_at)

    def _rows_at(self, ids: Tensor) -> Tensor:
        """Return rows that the matrix has, in F32."""
        numbers = self.planes.view(torch.int32).flatten()
        begin = (ids // TILE * self.planes.stride(0) // 4 + ids % TILE)[:, None]
        factors, words = self._places
        found = numbers[begin + words].view(torch.int16)
        scales = numbers[begin + factors].view(torch.float32) * (1 / BALANCE)
        return found * scales.repeat_interleave(2, 1)

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


def _pair_tokens() -> int:
    """Return the number of tokens of a pair of panels."""
    return PAIR * chosen().tile_tokens
