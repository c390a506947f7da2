"""The sizes to which images are brought before an encoder sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Size = tuple[int, int]


def best_grid(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of tiles whose proportions are most like an image's.

    Of grids of the same proportions a larger one counts while the image has more than half of
    its pixels (InternVL 1.5, arXiv 2404.16821).

    Args:
        side: side of a tile, in pixels.
        least, most: bounds of the number of tiles.
    """
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= least
    ]
    best, found = float("inf"), (1, 1)
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        off = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * side * side * rows * columns
        if off < best or (off == best and is_filled):
            best, found = off, (rows, columns)
    return found


def with_longest(width: int, height: int, longest: int) -> Size:
    """Return the size of an image whose longer side is brought to `longest` (Idefics 3).

    The other side keeps the proportions, rounded down and then up to an even number.
    """
    if width >= height:
        return longest, _even(int(longest / (width / height)))
    return _even(int(longest * (width / height))), longest


def in_tiles(width: int, height: int, side: int) -> Size:
    """Return the size of an image whose sides are brought up to multiples of `side` (Idefics 3).

    The shorter one follows from the longer one's new length.
    """
    if width >= height:
        wide = _above(width, side)
        return wide, _above(int(wide / (width / height)), side)
    high = _above(height, side)
    return _above(int(high * (width / height)), side), high


def _even(n: int) -> int:
    return max(1, n + n % 2)


def _above(n: int, side: int) -> int:
    """Return the smallest multiple of a tile's side that is not below n, and one at least."""
    return max(1, -(-n // side)) * side


Resample = Literal["bilinear", "bicubic", "lanczos"]

MAX_NARROW = 200
"""Largest ratio of an image's sides where these are kept in proportion (Qwen's own limit)."""


class TooNarrow(ValueError):
    """Error of an image whose sides differ too much."""


class Views(NamedTuple):
    """What an encoder sees of an image: it alone, or its tiles and then the whole of it.

    Attributes:
        sizes: widths and heights to which it is resized, one after the other; the last is cut.
        grid: rows and columns of its tiles; (1, 1) without any.
        is_whole_last: whether the whole image beside the tiles is made of the last of these, and
            not of the image as it was.
    """

    sizes: tuple[Size, ...]
    grid: tuple[int, int] = (1, 1)
    is_whole_last: bool = False


@dataclass(frozen=True, slots=True)
class Resizing:
    """Rule by which a family of models resizes images, with the antialiasing filter of Pillow.

    Attributes:
        resample: filter of the resize.
        side: side of the square to which all images or their tiles are brought; 0 where they
            keep their proportions.
        factor: number whose multiples the sides must be, where they keep their proportions.
        least, most: bounds of the number of pixels then.
        fills: whether all images are brought as near to `most` as their proportions allow.
        longest: longest side then, which smaller images keep; with `side`, the longest side
            to which an image is brought before it is cut into tiles.
        least_tiles, most_tiles: bounds of the number of tiles, where that follows from an image's
            proportions; 0 elsewhere.
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
        """Return what an encoder sees of an image.

        Raises:
            TooNarrow: its sides differ too much.
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
        """Return the width and height to which an image without tiles is brought, in pixels.

        Raises:
            TooNarrow: its sides differ too much.
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
        """Return what Qwen 2-VL calls smart resize (arXiv 2409.12191)."""
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
        """Return the largest size of these proportions, rounded down to multiples of the factor.

        One that would be of a single cell's height, and less, is as wide as it can be (Gemma 4).
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
        """Largest number of pixels of a resized image or tile."""
        if self.side:
            return self.side * self.side
        if self.longest:
            return self._above(self.longest) ** 2
        return self.most if self.fills else max(self.most, self.least + self.factor * self.factor)


Channels = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class TileTexts:
    """Texts around the tiles of an image, behind which the whole of it stands.

    Attributes:
        opening: text before the first one.
        tile: text before each, in which {row} and {column} are its place, from 1 on.
        row_end: text behind each row of tiles.
        whole: text before the whole image.
    """

    opening: str = ""
    tile: str = ""
    row_end: str = ""
    whole: str = ""


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """How a family of models takes images.

    Attributes:
        resizing: rule by which they are resized.
        cell: side of the square of a resized image that one token stands for, in pixels.
        mean, std: numbers that are taken from each channel, whose values are 0 to 1, and by which
            it is divided then.
        before, behind: texts around the tokens of an image in a prompt.
        has_places: whether the tokens of an image have rows and columns in place of positions, so
            that an image takes as many positions as it has of the more of either (M-RoPE).
        is_two_way: whether the tokens of an image see all of it, and not only what is before them.
        only_in_windows: whether they do so in layers with a sliding window alone.
        has_breaks: whether a token stands between two rows of tokens.
        tiles: texts around the tiles of an image, where large ones are cut into tiles.
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
        """Return the rows and columns of tokens of a resized image, without breaks."""
        return height // self.cell, width // self.cell

    def n_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of a resized image."""
        rows, columns = self.grid(width, height)
        return rows * columns + (rows - 1 if self.has_breaks else 0)

    @property
    def most_tokens(self) -> int:
        """Upper bound of the number of tokens of an image or tile."""
        most = self.resizing.most_pixels // (self.cell * self.cell)
        return 2 * most if self.has_breaks else most

    def texts(self, rows: int, columns: int) -> list[str]:
        """Return the texts before the tokens of each view of an image, and behind the last.

        Args:
            rows, columns: numbers of tiles; 1 and 1 for an image that is seen as a whole alone.
        """
        if self.tiles is None or rows * columns == 1:
            return [self.before, self.behind]
        tiles, found, held = self.tiles, list[str](), self.tiles.opening
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                found.append(held + tiles.tile.format(row=row, column=column))
                held = ""
            held = tiles.row_end
        return [*found, held + tiles.whole, self.behind]
