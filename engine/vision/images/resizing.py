"""The sizes to which pictures are brought before a tower sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.vision.images.tiling import Size, best_grid, in_tiles, with_longest

Resample = Literal["bilinear", "bicubic", "lanczos"]

MOST_NARROW = 200
"""Largest ratio of a picture's sides where these are kept in proportion (Qwen's own limit)."""


class TooNarrow(ValueError):
    """Error of a picture whose sides differ too much."""


class Views(NamedTuple):
    """What a tower sees of a picture: it alone, or its tiles and then the whole of it.

    Attributes:
        sizes: widths and heights to which it is resized, one after the other; the last is cut.
        grid: rows and columns of its tiles; (1, 1) without any.
        is_whole_last: whether the whole picture beside the tiles is made of the last of these, and
            not of the picture as it was.
    """

    sizes: tuple[Size, ...]
    grid: tuple[int, int] = (1, 1)
    is_whole_last: bool = False


@dataclass(frozen=True, slots=True)
class Resizing:
    """Rule by which a family of models resizes pictures, with the antialiasing filter of Pillow.

    Attributes:
        resample: filter of the resize.
        side: side of the square to which all pictures or their tiles are brought; 0 where they
            keep their proportions.
        factor: number whose multiples the sides must be, where they keep their proportions.
        least, most: bounds of the number of pixels then.
        fills: whether all pictures are brought as near to `most` as their proportions allow.
        longest: longest side then, which smaller pictures keep; with `side`, the longest side
            to which a picture is brought before it is cut into tiles.
        least_tiles, most_tiles: bounds of the number of tiles, where that follows from a picture's
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
        """Return what a tower sees of a picture.

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
        """Return the width and height to which a picture without tiles is brought, in pixels.

        Raises:
            TooNarrow: its sides differ too much.
        """
        if self.side:
            return self.side, self.side
        if self.fills:
            return self._filling(width, height)
        if max(width, height) > MOST_NARROW * min(width, height):
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
        """Return the smallest multiple of the factor that is not below n."""
        return -(-n // self.factor) * self.factor

    @property
    def most_pixels(self) -> int:
        """Largest number of pixels of a resized picture or tile."""
        if self.side:
            return self.side * self.side
        if self.longest:
            return self._above(self.longest) ** 2
        return self.most if self.fills else max(self.most, self.least + self.factor * self.factor)
