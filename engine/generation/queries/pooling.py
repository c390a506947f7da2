"""Pooling: one vector for a text, from the hidden states of its tokens.

A file says in `pooling_type` how its model was trained: the numbers are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.model.layers.keys import Keys

Pooling = Literal["mean", "first", "last"]
"""Mean of the states of all tokens, the first token's state, or the last token's."""

MEAN, CLS, RANK = 1, 2, 4
BY_NUMBER: dict[int, Pooling] = {-1: "last", 0: "last", MEAN: "mean", CLS: "first", 3: "last"}
"""Pooling by `pooling_type`; -1 and 0 do not say any, as most files, and get the last token's."""


def pooling_of(keys: Keys, name: str) -> Pooling:
    """Return how a model's states are pooled.

    Args:
        keys: metadata of the model's file.
        name: name of the model, for error messages.

    Raises:
        EngineError: the model makes no embeddings, or not from states that see only what is before.
    """
    number = keys.integer("pooling_type", -1)
    if number == RANK:
        raise EngineError(
            f"{name} rates how well texts fit together; it makes no embeddings.",
            "Load an embedding model.",
        )
    if number not in BY_NUMBER:
        raise EngineError(
            f"{name} makes embeddings in a way that is not known ({number}).",
            "Load another embedding model.",
        )
    if not keys.flag("attention.causal", True):
        raise EngineError(
            f"{name} reads texts in both directions, which Tandem does not do.",
            "Load an embedding model that reads from left to right, such as Qwen3-Embedding.",
        )
    return BY_NUMBER[number]


def pooled(states: Iterable[NDArray[np.float32]], pooling: Pooling, n: int) -> NDArray[np.float32]:
    """Return the vector of a text, of length 1, (n_embd,).

    Args:
        states: hidden states of its tokens (rows, n_embd), in several parts; the last token's are
            enough if that is what counts, the first token's likewise.
        n: number of its tokens.

    Raises:
        EngineError: the states are no numbers.
    """
    parts = [part.astype(np.float64) for part in states]
    if pooling == "mean":
        vector = np.sum([part.sum(0) for part in parts], 0) / n
    else:
        vector = parts[0][0] if pooling == "first" else parts[-1][-1]
    size = float(np.linalg.norm(vector))
    if not np.isfinite(size):
        raise EngineError("The model gives a text no usable embedding.", "The file may be damaged.")
    found: NDArray[np.float32] = (vector / size if size else vector).astype(np.float32)
    return found
