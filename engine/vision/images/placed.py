"""Images among the tokens of a sequence.

An image's tokens have ids of their own, far above those of any vocabulary, which follow from its
pixels and from what encodes it. So pages of a cache, kept states and state files tell images
apart as they tell texts apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from engine.vision.images.resizing import ImageProcessor, Resizing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FIRST_ID = 1 << 62
"""Smallest id of a token of an image; all smaller ones are of texts."""

INDEX_BITS = 14
"""Bits of an id that count the tokens of an image; 48 bits above are a hash."""

MAX_TOKENS = 1 << INDEX_BITS
"""Largest number of tokens of an image."""

MAX_SCORES = 1 << 25
"""Largest number of attention scores that exist at once."""


@dataclass(frozen=True, eq=False)
class PromptImage:
    """A resized image, or a tile of one, with its place in the numbering of tokens.

    Attributes:
        pixels: its pixels in RGB, (height, width, 3).
        size: width and height of the image before it was resized, in pixels.
        grid: rows and columns of its tokens, without breaks between rows.
        number: hash of the pixels and of what encodes them, of 48 bits.
    """

    pixels: NDArray[np.uint8]
    size: tuple[int, int]
    grid: tuple[int, int]
    number: int
    rule: ImageProcessor

    @classmethod
    def of(
        cls, pixels: NDArray[np.uint8], size: tuple[int, int], rule: ImageProcessor, encoder: str
    ) -> PromptImage:
        """Return the image of resized pixels.

        Args:
            encoder: hash of the file of what encodes it.
        """
        height, width, _ = pixels.shape
        head = f"{encoder} {width} {height} ".encode()
        number = int.from_bytes(blake2b(head + pixels.tobytes(), digest_size=6).digest(), "big")
        return cls(pixels, size, rule.grid(width, height), number, rule)

    @property
    def n(self) -> int:
        """Number of its tokens."""
        height, width, _ = self.pixels.shape
        return self.rule.n_tokens(width, height)

    @property
    def n_positions(self) -> int:
        """Number of positions that it takes of a sequence."""
        return max(self.grid) if self.rule.has_places else self.n

    @property
    def ids(self) -> range:
        """Ids of its tokens."""
        first = FIRST_ID | self.number << INDEX_BITS
        return range(first, first + self.n)


def text_ids(ids: Iterable[int]) -> list[int]:
    """Return the ids of a sequence that are of texts."""
    return [token for token in ids if token < FIRST_ID]


def n_before_image(ids: Iterable[int]) -> int:
    """Return the number of tokens before the first one of an image."""
    return sum(1 for _ in takewhile(lambda token: token < FIRST_ID, ids))


class PlacedImage(NamedTuple):
    """An image and the positions of its tokens in a sequence."""

    start: int
    image: PromptImage

    @property
    def stop(self) -> int:
        """Position behind its last token."""
        return self.start + self.image.n


class PlacedImages:
    """The images of a sequence, in order.

    Args:
        ids: tokens of the sequence.
        known: images by their number; those of the sequence are among them.
    """

    def __init__(
        self, ids: Sequence[int] = (), known: Mapping[int, PromptImage] | None = None
    ) -> None:
        self._all: list[PlacedImage] = []
        n = 0 if known else len(ids)
        while n < len(ids):
            token = ids[n]
            if token < FIRST_ID:
                n += 1
                continue
            assert known is not None, "ids of pictures come with the pictures"
            placed = PlacedImage(n, known[(token ^ FIRST_ID) >> INDEX_BITS])
            assert ids[n] == placed.image.ids[0], "pictures are whole in a prompt"
            self._all.append(placed)
            n = placed.stop
        self._starts = [placed.start for placed in self._all]

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[PlacedImage]:
        return iter(self._all)

    def among(self, start: int, stop: int) -> list[PlacedImage]:
        """Return the images with tokens at positions from `start` to `stop`."""
        return [placed for placed in self._all if placed.start < stop and placed.stop > start]

    def whole(self, n: int) -> int:
        """Return the largest number of the first n tokens that can be cached without the others.

        That is n, unless the next token is in the middle of an image whose tokens see each other.
        """
        cut = self._cut_by(n)
        return n if cut is None else cut.start

    def piece(self, start: int, n: int) -> int:
        """Return how many tokens behind the first `start` are computed at once, if n are wanted.

        They are fewer where an image whose tokens see each other would be cut, and more where it
        is the first thing.
        """
        cut = self._cut_by(start + n)
        if cut is None:
            return n
        return (cut.start if cut.start > start else cut.stop) - start

    def shift(self, n: int) -> int:
        """Return the position of the token behind the first n, which is of no image, less n."""
        done = (placed.image for placed in self._all if placed.stop <= n)
        return sum(image.n_positions - image.n for image in done)

    def places(self, start: int, n: int) -> tuple[list[int], ...]:
        """Return time, row and column of n tokens from `start` on; nothing without any.

        The tokens of an image begin where the text before ends: they have its next position as
        their time, and rows and columns count from there.
        """
        seen = self.among(start, start + n)
        if not any(placed.image.rule.has_places for placed in seen):
            return ()
        times, rows, columns = ([] for _ in range(3))
        for token in range(start, start + n):
            inside = next((p for p in seen if p.start <= token < p.stop), None)
            if inside is None:
                time = row = column = token + self.shift(token)
            else:
                time = inside.start + self.shift(inside.start)
                row, column = divmod(token - inside.start, inside.image.grid[1])
                row, column = time + row, time + column
            times.append(time)
            rows.append(row)
            columns.append(column)
        return times, rows, columns

    def _cut_by(self, n: int) -> PlacedImage | None:
        """Return the image whose tokens see each other that n tokens would end within."""
        index = bisect_right(self._starts, n) - 1
        if index < 0:
            return None
        placed = self._all[index]
        is_cut = placed.start < n < placed.stop and placed.image.rule.is_two_way
        return placed if is_cut else None


NO_IMAGES = PlacedImages()
"""The images of a sequence without any."""


MAX_PIXELS: Final = 1 << 28
"""Largest number of pixels, and of anything else, in sizes that another program tells."""

MAX_TILES: Final = 64
"""Largest number of tiles in such sizes."""


@dataclass(frozen=True, slots=True)
class VisionInfo:
    """How a loaded model sees images.

    Attributes:
        mmproj: path of the file that encodes them.
        rule: how it takes them.
    """

    mmproj: str
    rule: ImageProcessor

    def sizes(self) -> dict[str, int]:
        """Return what decides how many tokens an image has, for `of_sizes`."""
        found: dict[str, Any] = asdict(self.rule.resizing)
        del found["resample"]
        return found | {"cell": self.rule.cell, "has_breaks": self.rule.has_breaks}

    @classmethod
    def of_sizes(cls, sizes: object) -> Self | None:
        """Return a `VisionInfo` that counts tokens by another program's `sizes`; None if bad.

        Nothing else can be done with it.
        """
        if not isinstance(sizes, Mapping):
            return None
        names = ("side", "factor", "least", "most", "longest", "least_tiles", "most_tiles")
        numbers = {name: sizes.get(name) for name in (*names, "cell")}
        flags = {name: sizes.get(name) for name in ("fills", "has_breaks")}
        if not all(type(n) is int and 0 <= n <= MAX_PIXELS for n in numbers.values()):
            return None
        if not all(type(flag) is bool for flag in flags.values()):
            return None
        known: dict[str, Any] = numbers
        is_sized = known["side"] or known["longest"] or known["most"]
        if not is_sized or not known["factor"] or not known["cell"]:
            return None
        if known["most_tiles"] > MAX_TILES or (known["most_tiles"] and not known["side"]):
            return None
        resizing = Resizing(
            "bicubic", **{name: known[name] for name in names}, fills=bool(flags["fills"])
        )
        half = 0.5, 0.5, 0.5
        rule = ImageProcessor(
            resizing, known["cell"], half, half, "", "", has_breaks=bool(flags["has_breaks"])
        )
        return cls("", rule)

    def n_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image, without the texts around it.

        Raises:
            TooNarrow: its sides differ too much.
        """
        views = self.rule.resizing.views(width, height)
        wide, high = views.sizes[-1]
        rows, columns = views.grid
        if rows * columns == 1:
            return self.rule.n_tokens(wide, high)
        return (rows * columns + 1) * self.rule.n_tokens(wide // columns, high // rows)


def max_queries(n: int, n_head: int) -> int:
    """Return for how many of n patches attention computes scores at once."""
    return max(1, min(n, MAX_SCORES // (n * n_head)))
