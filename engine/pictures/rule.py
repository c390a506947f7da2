"""What prompts need to know of the pictures of a family of models."""

from __future__ import annotations

from dataclasses import dataclass

from engine.pictures.resizing import Resizing

Channels = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class PictureRule:
    """How a family of models takes pictures.

    Attributes:
        resizing: rule by which they are resized.
        cell: side of the square of a resized picture that one token stands for, in pixels.
        mean, std: numbers that are taken from each channel, whose values are 0 to 1, and by which
            it is divided then.
        before, behind: texts around the tokens of a picture in a prompt.
        has_places: whether the tokens of a picture have rows and columns in place of positions, so
            that a picture takes as many positions as it has of the more of either (M-RoPE).
        is_two_way: whether the tokens of a picture see all of it, and not only what is before them.
    """

    resizing: Resizing
    cell: int
    mean: Channels
    std: Channels
    before: str
    behind: str
    is_two_way: bool = False
    has_places: bool = False

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tokens of a resized picture."""
        return height // self.cell, width // self.cell

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a picture."""
        return self.resizing.most_pixels // (self.cell * self.cell)
