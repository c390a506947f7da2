"""Settings of samplers that the kernels know, in the form in which they read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.decoding.sampling.on_device import most_sent, why_on_host
from engine.decoding.sampling.sampler import Sampler, penalises


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
