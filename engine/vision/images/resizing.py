"""Image sizes that encoders accept, and the text around images in prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Size = tuple[int, int]


def best_grid(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of the tile grid with the closest aspect ratio.

    Among grids with the same ratio, a larger one wins if the image has more than half the pixels of
    that grid (InternVL 1.5, arXiv 2404.16821).

    Args:
        side: side length of a tile, in pixels.
        least, most: bounds on the number of tiles.
    """
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= least
    ]
    best, grid = float("inf"), (1, 1)
    for rows, columns in sorted(grids, key=math.prod):
        off = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * side * side * rows * columns
        if off < best or (off == best and is_filled):
            best, grid = off, (rows, columns)
    return grid


def with_longest(width: int, height: int, longest: int) -> Size:
    """Return an image's size with its longer side scaled to `longest` (Idefics 3).

    The other side is rounded down, then up to an even number.
    """
    if width >= height:
        return longest, _even(int(longest / (width / height)))
    return _even(int(longest * (width / height))), longest


def in_tiles(width: int, height: int, side: int) -> Size:
    """Return an image's size with its sides rounded up to multiples of `side` (Idefics 3).

    The shorter side is computed from the rounded longer one.
    """
    if width >= height:
        wide = _above(width, side)
        return wide, _above(int(wide / (width / height)), side)
    high = _above(height, side)
    return _above(int(high * (width / height)), side), high


def _even(n: int) -> int:
    return max(1, n + n % 2)


def _above(n: int, side: int) -> int:
    return max(1, -(-n // side)) * side


Resample = Literal["bilinear", "bicubic", "lanczos"]

MAX_NARROW = 200  # maximum aspect ratio of images that keep theirs (Qwen's own limit)


class TooNarrow(ValueError):
    """Error for an image with an extreme aspect ratio."""


class Views(NamedTuple):
    """Views of an image: the whole, or its tiles and then the whole.

    Attributes:
        sizes: widths and heights of consecutive resizes; the last result is cut into tiles.
        grid: rows and columns of tiles; (1, 1) if there are no tiles.
        is_whole_last: whether the whole view is made from the last resize, not from the original.
    """

    sizes: tuple[Size, ...]
    grid: tuple[int, int] = (1, 1)
    is_whole_last: bool = False


@dataclass(frozen=True, slots=True)
class Resizing:
    """Rule by which a family of models resizes images, with Pillow's antialiasing filters.

    Attributes:
        resample: filter.
        side: side length of square images or tiles; 0 to keep the aspect ratio.
        factor: granularity of the sides, if the aspect ratio is kept.
        least, most: bounds on the number of pixels in that case.
        fills: whether images are scaled as close to `most` as their aspect ratio allows.
        longest: maximum side in that case, without enlarging smaller images; with `side`, the
            longest side before tiling.
        least_tiles, most_tiles: bounds on the number of tiles, if it depends on the aspect ratio;
            else 0.
    """

    resample: Resample
    side: int = 0
    factor: int = 1
    least: int = 0
    most: int = 0
    longest: int = 0
    least_tiles: int = 0
    most_tiles: int = 0
    fills: bool = False

    def views(self, width: int, height: int) -> Views:
        """Return the views of an image.

        Raises:
            TooNarrow: its aspect ratio is too extreme.
        """
        if self.most_tiles:
            rows, columns = best_grid(width, height, self.side, self.least_tiles, self.most_tiles)
            return Views(((columns * self.side, rows * self.side),), (rows, columns))
        if self.side and self.longest:
            first = with_longest(width, height, self.longest)
            last = in_tiles(*first, self.side)
            grid = last[1] // self.side, last[0] // self.side
            return Views((first, last), grid, is_whole_last=True)
        return Views((self.target(width, height),))

    def target(self, width: int, height: int) -> Size:
        """Return the width and height of a resized image without tiles, in pixels.

        Raises:
            TooNarrow: its aspect ratio is too extreme.
        """
        if self.side:
            return self.side, self.side
        if self.fills:
            return self._filling(width, height)
        if max(width, height) > MAX_NARROW * min(width, height):
            raise TooNarrow
        if self.longest:
            shrink = max(1.0, width / self.longest, height / self.longest)
            wide, high = (max(1, math.floor(n / shrink)) for n in (width, height))
            return self._above(wide), self._above(high)
        return self._smart(width, height)

    def _smart(self, width: int, height: int) -> Size:
        """Apply Qwen 2-VL's smart resize (arXiv 2409.12191)."""
        factor = self.factor
        wide, high = (round(n / factor) * factor for n in (width, height))
        if wide * high > self.most:
            shrink = math.sqrt(width * height / self.most)
            wide, high = (
                max(factor, math.floor(n / shrink / factor) * factor) for n in (width, height)
            )
        elif wide * high < self.least:
            grow = math.sqrt(self.least / (width * height))
            wide, high = (math.ceil(n * grow / factor) * factor for n in (width, height))
        return wide, high

    def _filling(self, width: int, height: int) -> Size:
        """Return the largest size with this aspect ratio, rounded down to multiples of the factor.

        Images that would be less than one cell high get one row with the maximum width (Gemma 4).
        """
        factor, cells = self.factor, self.most // self.factor**2
        grow = math.sqrt(self.most / (width * height))
        wide, high = (math.floor(n * grow / factor) for n in (width, height))
        if not high:
            wide, high = min(width // height, cells), 1
        elif not wide:
            wide, high = 1, min(height // width, cells)
        return wide * factor, high * factor

    def _above(self, n: int) -> int:
        return -(-n // self.factor) * self.factor

    @property
    def most_pixels(self) -> int:
        """Maximum number of pixels in a resized image or tile."""
        if self.side:
            return self.side * self.side
        if self.longest:
            return self._above(self.longest) ** 2
        return self.most if self.fills else max(self.most, self.least + self.factor * self.factor)


Channels = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class TileTexts:
    """Texts around the tiles of an image, which precede the whole image.

    Attributes:
        opening: text before the first tile.
        tile: text before each tile, with its {row} and {column} counted from 1.
        row_end: text after each row of tiles.
        whole: text before the whole image.
    """

    opening: str = ""
    tile: str = ""
    row_end: str = ""
    whole: str = ""


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Preprocessing of images for a family of models, and their representation in prompts.

    Attributes:
        cell: side length, in pixels, of the square in a resized image that corresponds to one
            token.
        mean, std: normalisation of each channel, for values from 0 to 1.
        before, behind: texts around an image's tokens.
        has_places: whether image tokens have rows and columns instead of positions, so that an
            image takes as many positions as its longer side has tokens (M-RoPE).
        is_two_way: whether an image's tokens attend to each other.
        only_in_windows: whether the tokens do so in sliding-window layers only.
        has_breaks: whether there is a break token between rows of tokens.
        tiles: texts around tiles, if large images are tiled.
    """

    resizing: Resizing
    cell: int
    mean: Channels
    std: Channels
    before: str
    behind: str
    is_two_way: bool = False
    only_in_windows: bool = False
    has_places: bool = False
    has_breaks: bool = False
    tiles: TileTexts | None = None

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tokens for a resized image, excluding breaks."""
        return height // self.cell, width // self.cell

    def n_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens for a resized image."""
        rows, columns = self.grid(width, height)
        return rows * columns + (rows - 1 if self.has_breaks else 0)

    @property
    def most_tokens(self) -> int:
        """Upper bound on the number of tokens per image or tile."""
        most = self.resizing.most_pixels // (self.cell * self.cell)
        return 2 * most if self.has_breaks else most

    def texts(self, rows: int, columns: int) -> list[str]:
        """Return the texts before the tokens of an image's views, and the text after the last view.

        `rows` and `columns` are the numbers of tiles, both 1 for an image without tiles.
        """
        if self.tiles is None or rows * columns == 1:
            return [self.before, self.behind]
        tiles, texts, pending = self.tiles, list[str](), self.tiles.opening
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                texts.append(pending + tiles.tile.format(row=row, column=column))
                pending = ""
            pending = tiles.row_end
        return [*texts, pending + tiles.whole, self.behind]
