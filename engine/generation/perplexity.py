"""Perplexity of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.decoding.sampling.sampler import log_sums
from engine.errors import EngineError, PromptError

if TYPE_CHECKING:
    from engine.generation.queries import Queries

MAX_NLL = 700.0
"""Upper bound of a mean loss in nats, as the exponential of more is no F64 number."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of a text: the usual measure of a quantisation's loss.

    Attributes:
        nll: mean negative log-likelihood of a scored token, in nats.
        perplexity: exp(nll).
        error: standard error of `perplexity`, by the delta method.
        n_scored: number of scored tokens.
        n_chunks: number of chunks into which the text was cut.
    """

    nll: float
    perplexity: float
    error: float
    n_scored: int
    n_chunks: int


def perplexity(
    model: Queries,
    ids: Sequence[int],
    on_chunk: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Score `ids` in chunks of the model's context.

    As in llama.cpp's tool, in a chunk of n tokens the first n / 2 + 1 only give context and the
    others are scored, and each chunk starts with the beginning-of-text token if the model wants
    one. A text shorter than one chunk is scored from its second token on.

    Args:
        on_chunk: receiver of the number of chunks that are done and of all chunks.

    Raises:
        PromptError: the text or the context has fewer than two tokens.
        EngineError: the model's predictions are no numbers.
    """
    if min(len(ids), model.n_ctx) < 2:
        raise PromptError(
            "The text or the context is too short to be scored.", "Give at least two tokens."
        )
    size = min(model.n_ctx, len(ids))
    n_chunks = len(ids) // size
    first = min(size // 2, size - 2) if len(ids) >= model.n_ctx else 0
    bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
    losses = []
    for index in range(n_chunks):
        chunk = list(ids[index * size : (index + 1) * size])
        targets = np.array(chunk)
        if bos is not None:
            chunk[0] = bos
        losses.append(_losses(model.logits(chunk), targets)[first:])
        on_chunk(index + 1, n_chunks)
    scored = np.concatenate(losses)
    nll = float(scored.mean())
    if not nll < MAX_NLL:  # not `>=`, which is false for NaN
        raise EngineError(
            f"{model.info.name} gives this text no usable probabilities.",
            "The file may be damaged.",
        )
    spread = float(scored.std(ddof=1)) / sqrt(len(scored)) if len(scored) > 1 else 0.0
    return Perplexity(nll, exp(nll), exp(nll) * spread, len(scored), n_chunks)


def _losses(logits: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return -log p(ids[t + 1]) for each t but the last, from logits (T, n_vocab)."""
    rows = logits[:-1].astype(np.float64)
    losses: NDArray[np.float64] = log_sums(rows) - rows[np.arange(len(rows)), ids[1:]]
    return losses
