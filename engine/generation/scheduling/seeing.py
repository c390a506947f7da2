"""Pictures among the tokens of a pass.

Where a picture's tokens see each other (`ImageProcessor.is_two_way`), prompts and cache hits are
never cut inside it. Where they have rows and columns in place of positions (M-RoPE), a token's
position is its number and `Piece.shift`, which follows from the pictures before it; caches and
masks go by numbers. Features wider than the residual stream are added behind the first blocks
(`Context.deepen`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine.model.forward.batch import PictureRows
from engine.vision.images.placed import FIRST_ID

if TYPE_CHECKING:
    from torch import Tensor

    from engine.generation.scheduling.requests import Request
    from engine.util.progress import IsCancelled
    from engine.vision.images.placed import PromptImage


class PictureFeatures(Protocol):
    """The features of pictures, of which the last ones are kept."""

    def has(self, picture: PromptImage) -> bool:
        """Return whether the result for a picture is kept."""
        ...

    def encode(self, picture: PromptImage, is_cancelled: IsCancelled) -> Tensor:
        """Return the features of a picture, (tokens, n_embd).

        Raises:
            Cancelled: `is_cancelled` has returned True.
        """
        ...


def n_with_one_new(request: Request, n: int, encoder: PictureFeatures | None) -> int:
    """Return how many of the next n tokens of a prompt to compute while other answers wait.

    Of the pictures and tiles among them, one at most is not encoded yet.
    """
    assert request.place is not None
    at = request.place.n
    new = [
        placed.start
        for placed in request.pictures.among(at, at + n)
        if encoder is not None and not encoder.has(placed.image)
    ]
    return n if len(new) < 2 else new[1] - at


def picture_rows(
    request: Request, n: int, encoder: PictureFeatures | None
) -> tuple[PictureRows, ...]:
    """Return the rows of pictures among the next n tokens of an answer's prompt.

    Raises:
        EngineError: a picture cannot be encoded.
        Cancelled: the answer was cancelled meanwhile.
    """
    assert request.place is not None
    at, found = request.place.n, list[PictureRows]()
    for start, picture in request.pictures.among(at, at + n):
        assert encoder is not None, "who has prompts with pictures can encode them"
        first, stop = max(at, start), min(at + n, start + picture.n)
        features = encoder.encode(picture, request.is_cancelled)[first - start : stop - start]
        rule = picture.rule
        whole = (start, stop) if rule.is_two_way else None
        found.append(PictureRows(first - at, features, whole, rule.only_in_windows))
    return tuple(found)


def with_text_alone(ids: Sequence[int]) -> list[int]:
    """Return ids in which some token of the vocabulary stands for those of pictures."""
    return [token if token < FIRST_ID else 0 for token in ids]
