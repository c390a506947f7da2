"""Settings of samplers that the kernels know, in the form in which they read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.config import SAMPLERS
from engine.gpu.elementwise import power_of_two
from engine.sampling.sampler import Sampler, penalises
from engine.sampling.steps import MinP, Penalties, SamplingTemperature, TopK, TopP, all_known

KNOWN_STEPS = (Penalties, TopK, TopP, MinP, SamplingTemperature)
"""Step types that the kernels compute, in this order; with any other type the host samples."""

ROOM = 1024
"""Most candidates that one program can sort: ties at the edge of top-k may exceed k."""

MOST_WANTED = 768
"""Largest top-k of one rank, and number of candidates for top-p without top-k."""

MOST_SENT = 256
"""Most candidates that a rank sends to the others: 2 KB."""

N_HISTORY = 8192
"""Longest window of the penalties, in tokens."""


def most_sent(n_rank: int) -> int:
    """Return the largest top-k for n_rank ranks: the candidates that a rank sends at most."""
    return MOST_WANTED if n_rank == 1 else min(MOST_SENT, ROOM // power_of_two(n_rank))


def settings_of(sampler: Sampler, n_vocab: int, n_rank: int = 1) -> Sequence[float] | None:
    """Return a sampler's settings as the kernels read them; None where the host must sample."""
    if why_on_host(sampler, n_vocab, n_rank):
        return None
    most = most_sent(n_rank)
    p = sampler.params
    n_last = p.repeat_last_n if penalises(p) else 0
    penalties = [p.repeat_penalty, p.frequency_penalty, p.presence_penalty, float(n_last != 0)]
    if p.temperature <= 0:
        return [*penalties, n_last, 1, 1, 1, -math.inf, 1, 0]
    n_wanted = min(p.top_k or most, n_vocab)
    min_p = float(np.float32(math.log(p.min_p))) if p.min_p > 0 else -math.inf
    is_by_id = p.top_k == 0 and p.top_p >= 1
    return [*penalties, n_last, n_wanted, p.top_k > 0, p.top_p, min_p, p.temperature, is_by_id]


def why_on_host(sampler: Sampler, n_vocab: int, n_rank: int = 1) -> str:
    """Return why the host must sample, as the end of a sentence; "" if the device can."""
    p, most = sampler.params, most_sent(n_rank)
    if p.samplers != SAMPLERS or not all_known(sampler.steps, KNOWN_STEPS):
        return "this answer is sampled with a setting that its kernels do not know"
    if penalises(p) and p.repeat_last_n > N_HISTORY:
        return f"this answer's penalties look back at more than {N_HISTORY} tokens"
    if p.temperature <= 0:
        return ""
    if min(p.top_k, n_vocab) > most:
        return f"this answer's top-k is more than {most}"
    if p.top_k == 0 and p.top_p >= 1 and p.min_p <= 0:
        return "this answer may take any token, as top-k, top-p and min-p are off"
    return ""
