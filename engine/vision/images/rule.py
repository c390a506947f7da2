"""What prompts need to know of the pictures of a family of models."""

from __future__ import annotations

from dataclasses import dataclass

from engine.vision.images.resizing import Resizing

Channels = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class TileTexts:
    """Texts around the tiles of a picture, behind which the whole of it stands.

    Attributes:
        opening: text before the first one.
        tile: text before each, in which {row} and {column} are its place, from 1 on.
        row_end: text behind each row of tiles.
        whole: text before the whole picture.
    """

    opening: str = ""
    tile: str = ""
    row_end: str = ""
    whole: str = ""


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
        only_in_windows: whether they do so in layers with a sliding window alone.
        has_breaks: whether a token stands between two rows of tokens.
        tiles: texts around the tiles of a picture, where large ones are cut into tiles.
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
        """Return the rows and columns of tokens of a resized picture, without breaks."""
        return height // self.cell, width // self.cell

    def n_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of a resized picture."""
        rows, columns = self.grid(width, height)
        return rows * columns + (rows - 1 if self.has_breaks else 0)

    @property
    def most_tokens(self) -> int:
        """Upper bound of the number of tokens of a picture or tile."""
        most = self.resizing.most_pixels // (self.cell * self.cell)
        return 2 * most if self.has_breaks else most

    def texts(self, rows: int, columns: int) -> list[str]:
        """Return the texts before the tokens of each view of a picture, and behind the last.

        Args:
            rows, columns: numbers of tiles; 1 and 1 for a picture that is seen as a whole alone.
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
