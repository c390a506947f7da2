"""The sizes to which pictures are brought before a tower sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Resample = Literal["bilinear", "bicubic", "lanczos"]

MOST_NARROW = 200
"""Largest ratio of a picture's sides where these are kept in proportion (Qwen's own limit)."""


class TooNarrow(ValueError):
    """Error of a picture whose sides differ too much."""


@dataclass(frozen=True, slots=True)
class Resizing:
    """Rule by which a family of models resizes pictures, with the antialiasing filter of Pillow.

    Attributes:
        resample: filter of the resize.
        side: side of the square to which all pictures are brought; 0 where they keep their
            proportions.
        factor: number whose multiples the sides must be, where they keep their proportions.
        least, most: bounds of the number of pixels then.
    """

    resample: Resample
    side: int = 0
    factor: int = 1
    least: int = 0
    most: int = 0

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which a picture is brought, in pixels.

        With proportions kept, this is what Qwen 2-VL calls smart resize (arXiv 2409.12191).

        Raises:
            TooNarrow: its sides differ too much.
        """
        if self.side:
            return self.side, self.side
        if max(width, height) > MOST_NARROW * min(width, height):
            raise TooNarrow
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

    @property
    def most_pixels(self) -> int:
        """Largest number of pixels of a resized picture."""
        return self.side * self.side or max(self.most, self.least + self.factor * self.factor)
