"""Samples the next token from logits: a list of filter steps, then one random draw.

The steps and their default order are llama.cpp's; see `engine.sampling_params.SAMPLERS`. Every
filter sees the probabilities before temperature. Steps without an effect are left out.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.decoding.sampling.repetition import Dry, DryHistory, TokenBytes
from engine.decoding.sampling.steps import (
    Candidates,
    DynamicTemperature,
    FloatArray,
    LogitBias,
    MinP,
    Mirostat,
    Penalties,
    SamplingTemperature,
    Step,
    TokenHistory,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
    Xtc,
    all_known,
)
from engine.errors import Sentence
from engine.sampling_params import SAMPLERS, SamplingParams


class Uniforms:
    """Random numbers in [0, 1) with look-ahead, for a device that does the sampling."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._ahead: deque[float] = deque()

    def peek(self, n: int) -> list[float]:
        """Return the next n numbers without consuming them."""
        self._ahead.extend(self._random.random(max(0, n - len(self._ahead))).tolist())
        return list(islice(self._ahead, n))

    def draw(self) -> float:
        """Consume the next number."""
        return self._ahead.popleft() if self._ahead else float(self._random.random())


class Sampler:
    """Sampler for the tokens of one sequence.

    At a temperature of 0 it takes the most likely token after penalties, with ties broken by the
    lowest id; otherwise it samples at random. The same seed, logits and history yield the same
    tokens.

    Attributes:
        seed: seed in use, even if `params` has none.
        uniforms: random numbers; each token consumes one, unless the sampler is greedy.
        history: tokens that the penalties count.
        steps: steps to apply in order before the draw.
        revision: counter of accepted tokens and rollbacks.

    Args:
        token_bytes: returns the bytes that a token adds to a text; None for models without text.
    """

    def __init__(self, params: SamplingParams, token_bytes: TokenBytes | None = None) -> None:
        # 32 bits are enough, and can be written down
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self.params = params
        self.is_greedy = params.temperature <= 0
        self.uniforms = Uniforms(self.seed)
        self.history = TokenHistory(params.repeat_last_n)
        self.revision = 0
        p = params
        self._dry = DryHistory(
            p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_last_n, p.dry_breakers,
            token_bytes,
        )  # fmt: skip
        self._mirostat = Mirostat(p.mirostat_tau, p.mirostat_eta) if p.mirostat else None
        self.steps = self._steps()

    def accept(self, token_id: int) -> None:
        """Add a token of the prompt or the answer to the history."""
        self.revision += 1
        self.history.append(token_id)
        if self.params.dry_multiplier:
            self._dry.append(token_id)

    def accept_all(self, token_ids: Sequence[int]) -> None:
        """Add many tokens, for example a prompt."""
        self.revision += len(token_ids)
        self.history.extend(token_ids)
        if self.params.dry_multiplier:
            for token in token_ids:
                self._dry.append(token)

    def take_back(self, n: int) -> None:
        """Roll back the last n tokens; their random numbers stay consumed."""
        self.revision += 1
        self.history.take_back(n)
        if self.params.dry_multiplier:
            self._dry.take_back(n)
        if self._mirostat is not None:
            self._mirostat.take_back(n)

    def sample(self, logits: FloatArray) -> int:
        """Return the next token, without adding it to the history.

        Args:
            logits: logits of the vocabulary, (n_vocab,); not modified.

        Raises:
            EngineError: the logits are unusable; see `Candidates.from_logits`.
        """
        return self.pick(self.candidates(logits))

    def pick(self, candidates: Candidates) -> int:
        """Sample a token from candidates that passed every step."""
        if self.is_greedy:
            return int(candidates.ids[np.argmax(candidates.logits)])
        cumulative = np.cumsum(candidates.weights())
        # below the total even after rounding, because random() is at most 1 - 2^-53
        point = self.uniforms.draw() * cumulative[-1]
        at = int(np.searchsorted(cumulative, point, side="right"))
        if self._mirostat is not None:
            self._mirostat.observe(-math.log2(candidates.probabilities()[at]))
        return int(candidates.ids[at])

    def candidates(self, logits: FloatArray) -> Candidates:
        """Return the candidates that `sample` draws from: the tokens that pass every step.

        Raises:
            EngineError: the logits are unusable; see `Candidates.from_logits`.
        """
        candidates = Candidates.from_logits(np.asarray(logits, dtype=np.float32))
        for step in self.steps:
            candidates = step(candidates)
        return candidates

    def _steps(self) -> list[Step]:
        p, is_random = self.params, self.params.temperature > 0
        if is_random and self._mirostat is not None:
            return [*self._bias(), *self._temperature(0.0), self._mirostat]
        penalties = p.repeat_penalty, p.frequency_penalty, p.presence_penalty
        steps: dict[str, list[Step]] = {
            "penalties": [Penalties(self.history, *penalties)] if penalises(p) else [],
            "dry": [Dry(self._dry)] if p.dry_multiplier and p.dry_last_n else [],
        }
        if is_random:
            draw = self.uniforms.draw
            steps |= {
                "top_n_sigma": [TopNSigma(p.top_n_sigma)] if p.top_n_sigma else [],
                "top_k": [TopK(p.top_k)] if p.top_k else [],
                "typical_p": [TypicalP(p.typical_p)] if p.typical_p < 1 else [],
                "top_p": [TopP(p.top_p)] if p.top_p < 1 else [],
                "min_p": [MinP(p.min_p)] if p.min_p else [],
                "xtc": [Xtc(p.xtc_probability, p.xtc_threshold, draw)] if p.xtc_probability else [],
                "temperature": self._temperature(p.dynatemp_range),
            }
        return self._bias() + [step for name in p.samplers for step in steps.get(name, [])]

    def _bias(self) -> list[Step]:
        return [LogitBias(self.params.logit_bias)] if self.params.logit_bias else []

    def _temperature(self, spread: float) -> list[Step]:
        """Return the temperature step; it is dynamic within ±`spread`."""
        p = self.params
        if spread:
            lowest, highest = max(0.0, p.temperature - spread), p.temperature + spread
            return [DynamicTemperature(lowest, highest, p.dynatemp_exponent)]
        return [SamplingTemperature(p.temperature)] if p.temperature != 1 else []


def penalises(p: SamplingParams) -> bool:
    """Return whether any penalty makes tokens in the history less likely."""
    is_neutral = p.repeat_penalty == 1 and p.frequency_penalty == 0 and p.presence_penalty == 0
    return p.repeat_last_n != 0 and not is_neutral


Logits = NDArray[np.float32]  # logits on the host


class SamplingRequest(NamedTuple):
    """Parameters for sampling the token after a computed one, on a device.

    Attributes:
        sampler: settings, history and random numbers; it has accepted the computed token.
        never: banned token ids; always the same for a given sampler.
        allowed: returns the allowed tokens of this step, (at most n_vocab,); called after the
            devices have started. If it raises, the host samples. None to allow all.
    """

    sampler: Sampler
    never: Sequence[int]
    allowed: Callable[[], NDArray[np.bool_]] | None = None


def log_sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(sum(exp(row))) for each row of (T, n), as (T,)."""
    top = rows.max(-1, keepdims=True)
    sums: NDArray[np.float64] = np.log(np.exp(rows - top).sum(-1)) + top[:, 0]
    return sums


def logprobs_of(logits: Logits) -> NDArray[np.float64]:
    """Return the natural log probabilities of all tokens, (n_vocab,); -inf for banned tokens."""
    row = logits.astype(np.float64)
    return row - float(log_sums(row[None])[0])


def likeliest(logprobs: NDArray[np.float64], n: int) -> list[tuple[int, float]]:
    """Return ids and log probabilities of the n most likely tokens, in order, ties broken by id.

    Banned tokens are left out.
    """
    if n <= 0:
        return []
    least = np.partition(logprobs, -n)[-n] if n < len(logprobs) else -np.inf
    (ids,) = np.nonzero((logprobs >= least) & (logprobs > -np.inf))
    order = np.argsort(-logprobs[ids], kind="stable")[:n]
    return [(int(token), float(logprobs[token])) for token in ids[order]]


KNOWN_STEPS = (Penalties, TopK, TopP, MinP, SamplingTemperature)
"""Step types that kernels support, in this order; with any other type the host samples."""

ROOM = 1024
"""Maximum number of candidates that one program can sort; may exceed top-k because of ties at its
edge."""

MAX_WANTED = 768  # maximum top-k for one rank, and number of candidates for top-p without top-k
MAX_SENT = 256  # maximum number of candidates that a rank sends to the others: 2 KB
N_HISTORY = 8192  # maximum penalty window, in tokens


def most_sent(n_rank: int) -> int:
    """Return the maximum top-k for n_rank ranks, which is also the maximum number of candidates
    that a rank sends."""
    return MAX_WANTED if n_rank == 1 else min(MAX_SENT, ROOM // (1 << (n_rank - 1).bit_length()))


def why_on_host(sampler: Sampler, n_vocab: int, n_rank: int = 1) -> Sentence:
    """Return why the host must sample, as the end of a sentence; "" if the device can."""
    p, most = sampler.params, most_sent(n_rank)
    if p.samplers != SAMPLERS or not all_known(sampler.steps, KNOWN_STEPS):
        return Sentence("its kernels do not support a sampling setting of this answer")
    if penalises(p) and p.repeat_last_n > N_HISTORY:
        return Sentence("this answer's penalties cover more than {n} tokens", n=N_HISTORY)
    if p.temperature <= 0:
        return Sentence("")
    if min(p.top_k, n_vocab) > most:
        return Sentence("this answer's top-k is larger than {n}", n=most)
    if p.top_k == 0 and p.top_p >= 1 and p.min_p <= 0:
        return Sentence("top-k, top-p and min-p are off for this answer")
    return Sentence("")


def why_sampled_on_host(params: SamplingParams, n_vocab: int, n_rank: int = 1) -> Sentence:
    """Return why GPUs leave sampling to the host, as the end of a sentence; "" if they do not.

    `n_rank` is the number of GPUs over which the vocabulary is split.
    """
    return why_on_host(Sampler(params), n_vocab, n_rank)
