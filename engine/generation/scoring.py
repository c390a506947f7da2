"""How likely a model finds tokens, one by one and as the perplexity of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.decoding.sampling.sampler import likeliest, log_sums, logprobs_of
from engine.errors import EngineError, PromptError
from engine.generation.results import TokenLogprob

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits
    from engine.model.architectures.info import ModelInfo
    from engine.text.tokenizer import Tokenizer

MAX_NLL = 700.0
"""Upper bound of a mean loss in nats, as the exponential of more is no F64 number."""


MOST_LOGPROBS = 20
"""Largest number of likeliest tokens to name at each place, as OpenAI's API has it."""


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


class Scorable(Protocol):
    """The part of `engine.api.Model` that `perplexity` needs."""

    n_ctx: int
    info: ModelInfo

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model's file."""
        ...

    def logits(self, ids: Sequence[int]) -> Logits:
        """Return the logits (len(ids), n_vocab) of a fresh sequence."""
        ...


def perplexity(
    model: Scorable,
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


def check_n_logprobs(n: int) -> None:
    """Check a number of likeliest tokens to name at each place.

    Raises:
        EngineError: it is none of 0 to `MOST_LOGPROBS`.
    """
    if not 0 <= n <= MOST_LOGPROBS:
        raise EngineError(
            f"Probabilities of {n} tokens cannot be told at each place.",
            f"Ask for 0 to {MOST_LOGPROBS}.",
        )


def token_logprob(logits: Logits, token: int, n: int) -> TokenLogprob:
    """Return how likely a token was, and the n likeliest ones.

    Args:
        logits: logits of the vocabulary as the model computed them, (n_vocab,).
    """
    found = logprobs_of(logits)
    return TokenLogprob(token, float(found[token]), tuple(likeliest(found, n)))


def _losses(logits: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return -log p(ids[t + 1]) for each t but the last, from logits (T, n_vocab)."""
    rows = logits[:-1].astype(np.float64)
    losses: NDArray[np.float64] = log_sums(rows) - rows[np.arange(len(rows)), ids[1:]]
    return losses
