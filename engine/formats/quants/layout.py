"""The packed-plane format for quantised matrices: tiles of 16 rows, with block parts in planes.

A vector register holds four bytes from each of 16 rows, so that one instruction multiplies all of
them by the same four activations and no horizontal sum is ever needed. Columns come in blocks of
32. A tile has four planes, each with its blocks in order:

- `low`: low bits of the weights. A block has eight lines; line i has columns 4i … 4i+3 of each row,
  one byte each. If weights have 4 low bits, lines i and i + 4 share 64 bytes (low and high half of
  each byte); if they have 2, lines 4i … 4i+3 do (from the lowest bits up).
- `high`: one or two more bits above those in `low`. With one bit, all eight lines share 64 bytes
  (line i in bit i); with two, four lines do, in order from the lowest bits up.
- `scales`: scales per sub-block and row: all rows for the first sub-block, then for the next; then
  the minima in the same order.
- `supers`: for types that have them, F16 factors for every 256 columns in the file: 16 rows of
  factors for the scales, then 16 rows for the minima.

A cut between ranks may fall on any block, so the first factor may apply to fewer than eight blocks.
The size of a tile is a multiple of 64 bytes.

On a GPU, the planes of a tile follow each other (`Layout.offsets`). On a CPU, a tile consists of
groups of up to eight blocks that share a factor (or would), so that it is read from front to back,
as prefetchers expect (`Layout.places`): the group's part of `supers`, its part of `scales`, then
each block's parts of `low` and `high`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gguf.constants import GGMLQuantizationType as Kind

TILE = 16
"""Rows per tile."""

BLOCK = 32
"""Columns per block."""

SUPER = 8
"""Blocks per group; they share a factor in K-quants."""

LINE_BYTES = 64
"""Bytes per line: four columns from each of 16 rows."""

ScaleKind = Literal["f16", "f16_min", "e8m0", "f32", "super", "super_min", "super_nibbles"]
"""Content of the plane `scales`; see `Layout.scale`."""

SCALE_BYTES: dict[ScaleKind, int] = {
    "f16": 2, "f16_min": 4, "e8m0": 1, "f32": 4, "super": 1, "super_min": 2, "super_nibbles": 1,
}  # fmt: skip
"""Bytes per row and sub-block in the plane `scales`."""


class BlockPlaces(NamedTuple):
    """The address of each plane of a 16-row block on a CPU: an integer, or a kernel's value."""

    low: Any
    high: Any
    scales: Any
    supers: Any


@dataclass(frozen=True, slots=True)
class Layout:
    """The planes for one type; a weight is `scale × (table[q] or q - zero) - minimum`.

    Attributes:
        low: number of bits of q in the plane `low`: 2, 4 or 8.
        high: number of further bits in the plane `high`: 0, 1 or 2.
        zero: value of q that stands for 0.
        table: 16 signed bytes that q indexes; empty if q is the number itself.
        scale: content of the plane `scales`, per row and sub-block. "f16": F16; "f16_min": F16
            scales for the rows, then F16 minima to be added; "e8m0": powers of two; "f32": F32.
            With an F16 factor per 256 columns: "super": one byte, signed if `signed_scale`;
            "super_min": one byte per scale, then one per minimum; "super_nibbles": both in one
            byte, with the minimum in the high half.
        sub: columns per sub-block, 32 or 16.
        signed_scale: whether scales stored as bytes are signed.
    """

    low: int
    high: int = 0
    zero: int = 0
    table: tuple[int, ...] = ()
    scale: ScaleKind = "f16"
    sub: int = BLOCK
    signed_scale: bool = False

    @property
    def has_supers(self) -> bool:
        """Whether 256 columns share an F16 factor."""
        return self.scale.startswith("super")

    @property
    def has_minimum(self) -> bool:
        """Whether each sub-block has a minimum to add or subtract."""
        return self.scale in ("f16_min", "super_min", "super_nibbles")

    @property
    def low_bytes(self) -> int:
        """Bytes per 16-row block in the plane `low`."""
        return TILE * BLOCK * self.low // 8

    @property
    def high_bytes(self) -> int:
        """Bytes per 16-row block in the plane `high`."""
        return TILE * BLOCK * self.high // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes per 16-row block in the plane `scales`."""
        return TILE * (BLOCK // self.sub) * SCALE_BYTES[self.scale]

    @property
    def super_bytes(self) -> int:
        """Bytes per 16 rows and 256 columns in the plane `supers`."""
        if not self.has_supers:
            return 0
        return TILE * 2 * (2 if self.has_minimum else 1)

    def offsets(self, n_blocks: int, skip: int) -> tuple[int, int, int, int]:
        """Return the offsets of `high`, `scales` and `supers` in a GPU tile, and the tile's size.

        The size, in bytes, is the same on a CPU.

        Args:
            n_blocks: blocks per row.
            skip: number of blocks missing from the first 256 columns.
        """
        high = n_blocks * self.low_bytes
        scales = high + n_blocks * self.high_bytes
        supers = scales + n_blocks * self.scale_bytes
        n_super = -(-(n_blocks + skip) // SUPER)
        end = supers + n_super * self.super_bytes
        return high, scales, supers, -(-end // LINE_BYTES) * LINE_BYTES

    def places(self, tile: Any, group: Any, first: Any, last: Any, block: Any) -> BlockPlaces:
        """Return the addresses of a block's parts in a tile on a CPU.

        Arguments are integers or, inside a kernel, kernel values.

        Args:
            last: end of the group, exclusive.
        """
        codes_bytes = self.low_bytes + self.high_bytes
        supers = tile + group * self.super_bytes + first * (codes_bytes + self.scale_bytes)
        scales = supers + self.super_bytes
        low = scales + (last - first) * self.scale_bytes + (block - first) * codes_bytes
        here = scales + (block - first) * self.scale_bytes
        return BlockPlaces(low, low + self.low_bytes, here, supers)

    def tile_bytes(self, n_blocks: int, skip: int) -> int:
        """Return the bytes per tile of 16 rows; for the arguments, see `offsets`."""
        return self.offsets(n_blocks, skip)[3]


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of 4-bit floats (E2M1), as in GGML; the scales are halved."""


def _eight(*values: int) -> tuple[int, ...]:
    # for 3-bit codes: unused entries are 0
    return values + (0,) * (16 - len(values))


IQ1_VALUES = _eight(-9, -7, -1, 1, 7, 9)
IQ2_VALUES = _eight(-43, -25, -8, 8, 25, 43)
IQ3_XXS_VALUES = (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_VALUES = tuple(range(-15, 16, 2))
Q1_0, Q2_0 = 41, 42  # not in every version of gguf

CODED: Mapping[int, Layout] = {
    Kind.IQ1_S: Layout(2, high=1, table=IQ1_VALUES, scale="f32"),
    Kind.IQ1_M: Layout(2, high=1, table=IQ1_VALUES, scale="f32", sub=16),
    Kind.IQ2_XXS: Layout(2, high=1, table=IQ2_VALUES, scale="f32"),
    Kind.IQ2_XS: Layout(2, high=1, table=IQ2_VALUES, scale="f32", sub=16),
    Kind.IQ2_S: Layout(2, high=1, table=IQ2_VALUES, scale="f32", sub=16),
    Kind.IQ3_XXS: Layout(4, table=IQ3_XXS_VALUES, scale="f32"),
    Kind.IQ3_S: Layout(4, table=IQ3_S_VALUES, scale="f32"),
    Kind.TQ1_0: Layout(2, zero=1),
    Kind.TQ2_0: Layout(2, zero=1),
    Kind.NVFP4: Layout(4, table=FP4_VALUES, sub=16),
    Q1_0: Layout(2, zero=1),
    Q2_0: Layout(2, zero=1),
}
"""Layouts for types with few distinct values, stored in grids, digits or otherwise;
`engine.formats.quants.encode` finds the code for each value before packing."""

LAYOUTS: Mapping[int, Layout] = {
    Kind.Q4_0: Layout(4, zero=8),
    Kind.Q4_1: Layout(4, scale="f16_min"),
    Kind.Q5_0: Layout(4, high=1, zero=16),
    Kind.Q5_1: Layout(4, high=1, scale="f16_min"),
    Kind.Q8_0: Layout(8),
    Kind.Q2_K: Layout(2, scale="super_nibbles", sub=16),
    Kind.Q3_K: Layout(2, high=1, zero=4, scale="super", sub=16, signed_scale=True),
    Kind.Q4_K: Layout(4, scale="super_min"),
    Kind.Q5_K: Layout(4, high=1, scale="super_min"),
    Kind.Q6_K: Layout(4, high=2, zero=32, scale="super", sub=16, signed_scale=True),
    Kind.IQ4_NL: Layout(4, table=IQ4_VALUES),
    Kind.IQ4_XS: Layout(4, table=IQ4_VALUES, scale="super", signed_scale=True),
    Kind.MXFP4: Layout(4, table=FP4_VALUES, scale="e8m0"),
    **CODED,
}
"""Layouts for all packed types, by GGML type. A `low` of eight bits is signed."""


BF16_CHUNK = 1 << 21
"""Number of weights that the CPU dequantises to BF16 at a time, for prompts."""

DEVICE_CHUNK = 1 << 24
"""Number of weights in per-head matrices that a GPU dequantises to BF16 at a time, for prompts."""

INT16_BLOCK_BYTES = 2 * TILE * BLOCK
"""Bytes per 32 columns in an int16 tile; see `cpu.kernels.products.int16_panels`."""

INT16_FACTOR_BYTES = 4 * TILE
"""Bytes of a tile's factors per group of columns."""

INT16_PANEL_BYTES = 2 * BLOCK + 4
"""Bytes that 32 activations take in an int16 panel, including their factor."""


def word_tile_bytes(n_blocks: int) -> int:
    """Return the bytes per int16 tile with `n_blocks` blocks of 32 columns."""
    return -(-n_blocks // SUPER) * INT16_FACTOR_BYTES + n_blocks * INT16_BLOCK_BYTES


def panel_block_bytes(x_bytes: int = 1) -> int:
    """Return the bytes that 32 activations take in a panel, with their scale and sums.

    Args:
        x_bytes: bytes per activation; see `engine.backends.cpu.kernels.products.panels`.
    """
    return BLOCK * x_bytes + 32


@dataclass(frozen=True, slots=True)
class Extent:
    """The blocks of 32 columns that cover an interval of columns.

    Attributes:
        first: index of the first block within a row in the file.
        lead: number of columns in the first block before the interval starts.
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
        """Number of blocks before the first one that share its factor in K-quants."""
        return self.first % SUPER

    @property
    def is_exact(self) -> bool:
        """Whether the interval consists of whole blocks."""
        return self.lead == 0 and self.n_columns == self.n_blocks * BLOCK

    def tile_bytes(self, layout: Layout) -> int:
        """Return the bytes per tile of 16 rows."""
        return layout.tile_bytes(self.n_blocks, self.skip)

    def n_bytes(self, layout: Layout, n_rows: int) -> int:
        """Return the bytes of a matrix with `n_rows` rows."""
        return n_tiles(n_rows) * self.tile_bytes(layout)


def n_tiles(n_rows: int) -> int:
    """Return the number of tiles that hold `n_rows` rows."""
    return -(-n_rows // TILE)


def file_blocks(block_size: int, extent: Extent) -> tuple[int, int]:
    """Return the range of blocks in the file that covers an extent within a row."""
    start = extent.first * BLOCK + extent.lead
    return start // block_size, -(-(start + extent.n_columns) // block_size)
