"""Limits of sampling on the devices: which settings their kernels know, and which hosts must draw.

Here rather than beside the kernels, as the window says so before anything is loaded.
"""

from __future__ import annotations

from engine.decoding.sampling.sampler import Sampler, penalises
from engine.decoding.sampling.steps import (
    MinP,
    Penalties,
    SamplingTemperature,
    TopK,
    TopP,
    all_known,
)
from engine.sampling_params import SAMPLERS, SamplingParams

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
    return MOST_WANTED if n_rank == 1 else min(MOST_SENT, ROOM // _power_of_two(n_rank))


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


def why_sampled_on_host(params: SamplingParams, n_vocab: int, n_rank: int = 1) -> str:
    """Return why GPUs leave sampling to the host, as the end of a sentence; "" if they do not.

    Args:
        n_vocab: number of tokens of the vocabulary.
        n_rank: number of GPUs among which the vocabulary is split.
    """
    return why_on_host(Sampler(params), n_vocab, n_rank)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
