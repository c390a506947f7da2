"""What a window needs to know of how a loaded model sees pictures."""

from __future__ import annotations

from dataclasses import dataclass

from engine.pictures.rule import PictureRule


@dataclass(frozen=True, slots=True)
class PictureSight:
    """How a loaded model sees pictures.

    Attributes:
        mmproj: path of the file that encodes them.
        rule: how it takes them.
    """

    mmproj: str
    rule: PictureRule

    def n_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of a picture, without the texts around it.

        Raises:
            TooNarrow: its sides differ too much.
        """
        views = self.rule.resizing.views(width, height)
        wide, high = views.sizes[-1]
        rows, columns = views.grid
        if rows * columns == 1:
            return self.rule.n_tokens(wide, high)
        return (rows * columns + 1) * self.rule.n_tokens(wide // columns, high // rows)
