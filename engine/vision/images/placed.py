"""Images among the tokens of a sequence.

An image's tokens have ids above any vocabulary, derived from its pixels and its encoder. The KV
cache, stored states and state files therefore distinguish images just as they do texts.
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

FIRST_ID = 1 << 62  # smallest id of an image token; smaller ids are text tokens
INDEX_BITS = 14  # low bits of an id: a token's index in its image; the 48 bits above are a hash
MAX_TOKENS = 1 << INDEX_BITS  # maximum number of tokens per image
MAX_SCORES = 1 << 25  # maximum number of attention scores in memory at a time


@dataclass(frozen=True, eq=False)
class PromptImage:
    """A resized image, or a tile of one, with its token ids.

    Attributes:
        pixels: RGB pixels, (height, width, 3).
        size: original width and height, in pixels.
        grid: rows and columns of its tokens, without breaks between rows.
        number: 48-bit hash of the pixels and the encoder.
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
        """Return the image for resized pixels; `encoder` is a hash of the encoder's file."""
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
        """Number of positions that it takes in a sequence."""
        return max(self.grid) if self.rule.has_places else self.n

    @property
    def ids(self) -> range:
        """Ids of its tokens."""
        first = FIRST_ID | self.number << INDEX_BITS
        return range(first, first + self.n)


def text_ids(ids: Iterable[int]) -> list[int]:
    """Return the text tokens of a sequence."""
    return [token for token in ids if token < FIRST_ID]


def n_before_image(ids: Iterable[int]) -> int:
    """Return the number of tokens before the first image token."""
    return sum(1 for _ in takewhile(lambda token: token < FIRST_ID, ids))


class PlacedImage(NamedTuple):
    """An image and the positions of its tokens in a sequence."""

    start: int
    image: PromptImage

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + self.image.n


class PlacedImages:
    """The images in a sequence of ids, in order; `known` maps numbers to images."""

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
            assert known is not None, "image tokens need their images"
            placed = PlacedImage(n, known[(token ^ FIRST_ID) >> INDEX_BITS])
            assert ids[n] == placed.image.ids[0], "prompts contain whole images only"
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
        """Return how many of the first n tokens can be cached on their own.

        This is n, unless that would split an image with bidirectional attention.
        """
        cut = self._cut_by(n)
        return n if cut is None else cut.start

    def piece(self, start: int, n: int) -> int:
        """Return the number of tokens after `start` to compute in one pass, if n are requested.

        It is smaller if the pass would split an image with bidirectional attention, and larger if
        it starts with such an image.
        """
        cut = self._cut_by(start + n)
        if cut is None:
            return n
        return (cut.start if cut.start > start else cut.stop) - start

    def shift(self, n: int) -> int:
        """Return the position of the text token after the first n tokens, minus n."""
        done = (placed.image for placed in self._all if placed.stop <= n)
        return sum(image.n_positions - image.n for image in done)

    def places(self, start: int, n: int) -> tuple[list[int], ...]:
        """Return time, row and column of n tokens from `start` on; () if no image needs them.

        An image's tokens all have the next text position as their time; rows and columns count from
        there.
        """
        images = self.among(start, start + n)
        if not any(placed.image.rule.has_places for placed in images):
            return ()
        times, rows, columns = ([] for _ in range(3))
        for token in range(start, start + n):
            inside = next((p for p in images if p.start <= token < p.stop), None)
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
        """Return the image with bidirectional attention that a cut after n tokens would split."""
        index = bisect_right(self._starts, n) - 1
        if index < 0:
            return None
        placed = self._all[index]
        is_cut = placed.start < n < placed.stop and placed.image.rule.is_two_way
        return placed if is_cut else None


NO_IMAGES = PlacedImages()


MAX_PIXELS: Final = 1 << 28
"""Maximum number of pixels, and maximum for all other numbers, in sizes from another program."""

MAX_TILES: Final = 64  # maximum number of tiles in such sizes


@dataclass(frozen=True, slots=True)
class VisionInfo:
    """Image input of a loaded model: its mmproj file, and the preprocessing of images."""

    mmproj: str
    rule: ImageProcessor

    def sizes(self) -> dict[str, int]:
        """Return the sizes that determine an image's number of tokens, for `of_sizes`."""
        sizes: dict[str, Any] = asdict(self.rule.resizing)
        del sizes["resample"]
        return sizes | {"cell": self.rule.cell, "has_breaks": self.rule.has_breaks}

    @classmethod
    def of_sizes(cls, sizes: object) -> Self | None:
        """Return a `VisionInfo` that only counts tokens, from another program's `sizes`; None if
        invalid."""
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
        """Return the number of tokens for an image, without the surrounding text.

        Raises:
            TooNarrow: its aspect ratio is too extreme.
        """
        views = self.rule.resizing.views(width, height)
        wide, high = views.sizes[-1]
        rows, columns = views.grid
        if rows * columns == 1:
            return self.rule.n_tokens(wide, high)
        return (rows * columns + 1) * self.rule.n_tokens(wide // columns, high // rows)


def max_queries(n: int, n_head: int) -> int:
    """Return the number of patches (at most n) for which attention computes scores at a time."""
    return max(1, min(n, MAX_SCORES // (n * n_head)))
