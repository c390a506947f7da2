"""Pictures among the tokens of a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.forward.batch import PictureRows
from engine.pictures.placed import FIRST_ID

if TYPE_CHECKING:
    from torch import Tensor

    from engine.generation.scheduling.requests import Request
    from engine.pictures.placed import Picture

Encode = Callable[["Picture"], "Tensor"]
"""Function that returns the features of a picture, (tokens, n_embd)."""


def picture_rows(request: Request, n: int, encode: Encode | None) -> tuple[PictureRows, ...]:
    """Return the rows of pictures among the next n tokens of an answer's prompt.

    Raises:
        EngineError: a picture cannot be encoded.
    """
    assert request.place is not None
    at, found = request.place.n, list[PictureRows]()
    for start, picture in request.pictures.among(at, at + n):
        assert encode is not None, "who has prompts with pictures can encode them"
        first, stop = max(at, start), min(at + n, start + picture.n)
        features = encode(picture)[first - start : stop - start]
        whole = (start, stop) if picture.rule.is_two_way else None
        found.append(PictureRows(first - at, features, whole))
    return tuple(found)


def with_text_alone(ids: Sequence[int]) -> list[int]:
    """Return ids in which some token of the vocabulary stands for those of pictures."""
    return [token if token < FIRST_ID else 0 for token in ids]
