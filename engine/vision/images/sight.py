"""What a window needs to know of how a loaded model sees pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from engine.vision.images.resizing import Resizing
from engine.vision.images.rule import PictureRule

MOST_PIXELS: Final = 1 << 28
"""Largest number of pixels, and of anything else, in sizes that another program tells."""

MOST_TILES: Final = 64
"""Largest number of tiles in such sizes."""


@dataclass(frozen=True, slots=True)
class PictureSight:
    """How a loaded model sees pictures.

    Attributes:
        mmproj: path of the file that encodes them.
        rule: how it takes them.
    """

    mmproj: str
    rule: PictureRule

    def sizes(self) -> dict[str, int]:
        """Return what decides how many tokens a picture has, for `of_sizes`."""
        found: dict[str, Any] = asdict(self.rule.resizing)
        del found["resample"]
        return found | {"cell": self.rule.cell, "has_breaks": self.rule.has_breaks}

    @classmethod
    def of_sizes(cls, sizes: object) -> Self | None:
        """Return a sight that counts tokens by the `sizes` of another program's; None if bad.

        Nothing else can be done with it.
        """
        if not isinstance(sizes, Mapping):
            return None
        names = ("side", "factor", "least", "most", "longest", "least_tiles", "most_tiles")
        numbers = {name: sizes.get(name) for name in (*names, "cell")}
        flags = {name: sizes.get(name) for name in ("fills", "has_breaks")}
        if not all(type(n) is int and 0 <= n <= MOST_PIXELS for n in numbers.values()):
            return None
        if not all(type(flag) is bool for flag in flags.values()):
            return None
        known: dict[str, Any] = numbers
        is_sized = known["side"] or known["longest"] or known["most"]
        if not is_sized or not known["factor"] or not known["cell"]:
            return None
        if known["most_tiles"] > MOST_TILES or (known["most_tiles"] and not known["side"]):
            return None
        resizing = Resizing(
            "bicubic", **{name: known[name] for name in names}, fills=bool(flags["fills"])
        )
        half = 0.5, 0.5, 0.5
        rule = PictureRule(
            resizing, known["cell"], half, half, "", "", has_breaks=bool(flags["has_breaks"])
        )
        return cls("", rule)

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
