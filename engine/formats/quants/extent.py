"""Computes the size of a part of a matrix as planes, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from engine.formats.quants.layout import BLOCK, SUPER, TILE, Layout

BF16_CHUNK = 1 << 21
"""Number of weights that the CPU dequantises to BF16 at a time, for prompts."""

DEVICE_CHUNK = 1 << 24
"""Number of weights of per-head matrices that a GPU dequantises to BF16 at a time, for prompts."""


WORD_BLOCK_BYTES = 2 * TILE * BLOCK
"""Bytes of 32 columns of a tile of words, see `engine.backends.cpu.kernels.words.words`."""

WORD_FACTOR_BYTES = 4 * TILE
"""Bytes of a tile's factors of a group of columns."""

WORD_PANEL_BYTES = 2 * BLOCK + 4
"""Bytes of 32 activations in a panel of words, with what belongs to them."""


def word_tile_bytes(n_blocks: int) -> int:
    """Return the bytes of a tile of words with so many blocks of 32 columns."""
    return -(-n_blocks // SUPER) * WORD_FACTOR_BYTES + n_blocks * WORD_BLOCK_BYTES


def panel_block_bytes(x_bytes: int = 1) -> int:
    """Return the bytes of 32 activations in a panel, with what belongs to them.

    Args:
        x_bytes: bytes of an activation, see `engine.backends.cpu.kernels.products.panels`.
    """
    return BLOCK * x_bytes + 32


@dataclass(frozen=True, slots=True)
class Extent:
    """The blocks of 32 columns that cover an interval of columns.

    Attributes:
        first: index of the first block in a row of the file.
        n_blocks: number of blocks.
        lead: number of columns of the first block before the interval.
        n_columns: number of columns of the interval.
    """

    first: int
    n_blocks: int
    lead: int
    n_columns: int

    @classmethod
    def of(cls, start: int, stop: int) -> Extent:
        """Return the extent of columns `start` to `stop`."""
        first = start // BLOCK
        return cls(first, -(-stop // BLOCK) - first, start - first * BLOCK, stop - start)

    @property
    def skip(self) -> int:
        """Number of blocks before the first that share its factor in K-quants."""
        return self.first % SUPER

    @property
    def is_exact(self) -> bool:
        """Whether the interval consists of whole blocks."""
        return self.lead == 0 and self.n_columns == self.n_blocks * BLOCK

    def tile_bytes(self, layout: Layout) -> int:
        """Return the bytes of a tile of 16 rows."""
        return layout.tile_bytes(self.n_blocks, self.skip)

    def n_bytes(self, layout: Layout, n_rows: int) -> int:
        """Return the bytes of a matrix of `n_rows` rows."""
        return n_tiles(n_rows) * self.tile_bytes(layout)


def n_tiles(n_rows: int) -> int:
    """Return the number of tiles that hold `n_rows` rows."""
    return -(-n_rows // TILE)


def file_blocks(block_size: int, extent: Extent) -> tuple[int, int]:
    """Return the first and the end of the file's blocks that cover an extent in a row."""
    start = extent.first * BLOCK + extent.lead
    return start // block_size, -(-(start + extent.n_columns) // block_size)
