"""Logarithms of the probabilities of tokens, in F64, as the model's logits have them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.decoding.sampling.token_source import Logits


def log_sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(sum(exp(row))) of each row of (T, n), as (T,)."""
    top = rows.max(-1, keepdims=True)
    sums: NDArray[np.float64] = np.log(np.exp(rows - top).sum(-1)) + top[:, 0]
    return sums


def logprobs_of(logits: Logits) -> NDArray[np.float64]:
    """Return the natural logarithms of the probabilities of all tokens, (n_vocab,).

    Args:
        logits: finite logits, or -inf for what cannot come; (n_vocab,).
    """
    row = logits.astype(np.float64)
    return row - float(log_sums(row[None])[0])


def likeliest(logprobs: NDArray[np.float64], n: int) -> list[tuple[int, float]]:
    """Return ids and logarithms of the n likeliest tokens, the likeliest first, ties by id.

    Those that cannot come are left out.
    """
    if n <= 0:
        return []
    least = np.partition(logprobs, -n)[-n] if n < len(logprobs) else -np.inf
    (ids,) = np.nonzero((logprobs >= least) & (logprobs > -np.inf))
    order = np.argsort(-logprobs[ids], kind="stable")[:n]
    return [(int(token), float(logprobs[token])) for token in ids[order]]
