"""How much room a part of a matrix takes as planes; known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from engine.quants.layout import BLOCK, SUPER, TILE, Layout

BF16_CHUNK = 1 << 21
"""Weights that are turned into BF16 at a time, for prompts."""

DEVICE_CHUNK = 1 << 24
"""The same on a GPU: few enough for the caches of large cards, enough to keep all of one busy."""


def token_bytes(x_bytes: int = 1) -> int:
    """Of 32 activations in a panel: their bytes, two scales, a sum and its halves.

    Args:
        x_bytes: for each activation, see `engine.cpu.kernels.panels`.
    """
    return BLOCK * x_bytes + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class Extent:
    """The blocks of 32 columns that cover an interval of columns.

    Attributes:
        first: the first block, counted in whole rows of the file.
        n_blocks: how many there are.
        lead: columns of the first block that do not belong to the interval.
        n_columns: of the interval.
    """

    first: int
    n_blocks: int
    lead: int
    n_columns: int

    @classmethod
    def of(cls, start: int, stop: int) -> Extent:
        """The extent of columns start to stop."""
        first = start // BLOCK
        return cls(first, -(-stop // BLOCK) - first, start - first * BLOCK, stop - start)

    @property
    def skip(self) -> int:
        """Blocks before the first that share its factor in K-quants."""
        return self.first % SUPER

    @property
    def is_exact(self) -> bool:
        """Whether the interval is whole blocks."""
        return self.lead == 0 and self.n_columns == self.n_blocks * BLOCK

    def tile_bytes(self, layout: Layout) -> int:
        """Bytes of 16 rows."""
        return layout.tile_bytes(self.n_blocks, self.skip)

    def n_bytes(self, layout: Layout, n_rows: int) -> int:
        """Bytes of a matrix of so many rows."""
        return n_tiles(n_rows) * self.tile_bytes(layout)


def n_tiles(n_rows: int) -> int:
    """Tiles that hold so many rows."""
    return -(-n_rows // TILE)
