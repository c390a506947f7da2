"""Samples the next token from logits: a list of filter steps, then one random draw.

The steps and their order are llama.cpp's defaults, see `engine.sampling_params.SAMPLERS`. Every
filter looks at the probabilities before temperature. A step that would change nothing is not in the
list.
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
from engine.sampling_params import SAMPLERS, SamplingParams


class Uniforms:
    """Random numbers in [0, 1) that can be read ahead, for a device that samples by itself."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._ahead: deque[float] = deque()

    def peek(self, n: int) -> list[float]:
        """Return the next n numbers without taking them."""
        self._ahead.extend(self._random.random(max(0, n - len(self._ahead))).tolist())
        return list(islice(self._ahead, n))

    def draw(self) -> float:
        """Take the next number."""
        return self._ahead.popleft() if self._ahead else float(self._random.random())


class Sampler:
    """Samples the tokens of one sequence.

    At a temperature of 0 it takes the most likely token after penalties, and the lowest id where
    several are equal; otherwise it samples at random. The same seed, logits and history give the
    same tokens.

    Attributes:
        seed: seed in use, also where `params` leaves it open.
        is_greedy: whether it takes the most likely token.
        uniforms: random numbers; each token takes one, unless the sampler is greedy.
        history: tokens that the penalties look at.
        steps: steps to apply in order before the draw.
        revision: number of times that tokens were accepted or taken back.

    Args:
        token_bytes: returns the bytes that a token adds to a text; None for models without text.
    """

    def __init__(self, params: SamplingParams, token_bytes: TokenBytes | None = None) -> None:
        # 32 bits are enough, and a person can note them down
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
        """Add many tokens at once, such as those of a prompt."""
        self.revision += len(token_ids)
        self.history.extend(token_ids)
        if self.params.dry_multiplier:
            for token in token_ids:
                self._dry.append(token)

    def take_back(self, n: int) -> None:
        """Forget the last n tokens of the answer; their random numbers do not come again."""
        self.revision += 1
        self.history.take_back(n)
        if self.params.dry_multiplier:
            self._dry.take_back(n)
        if self._mirostat is not None:
            self._mirostat.take_back(n)

    def sample(self, logits: FloatArray) -> int:
        """Return the next token; it counts for the penalties only once it is accepted.

        Args:
            logits: logits of the vocabulary, (n_vocab,); not modified.

        Raises:
            EngineError: the logits are unusable, see `Candidates.from_logits`.
        """
        return self.pick(self.candidates(logits))

    def pick(self, candidates: Candidates) -> int:
        """Sample a token from candidates that passed every step."""
        if self.is_greedy:
            return int(candidates.ids[np.argmax(candidates.logits)])
        cumulative = np.cumsum(candidates.weights())
        # below the total also after rounding, as random() is at most 1 - 2^-53
        point = self.uniforms.draw() * cumulative[-1]
        at = int(np.searchsorted(cumulative, point, side="right"))
        if self._mirostat is not None:
            self._mirostat.observe(-math.log2(candidates.probabilities()[at]))
        return int(candidates.ids[at])

    def candidates(self, logits: FloatArray) -> Candidates:
        """Return the candidates that `sample` chooses from: the tokens that pass every step.

        Raises:
            EngineError: the logits are unusable, see `Candidates.from_logits`.
        """
        candidates = Candidates.from_logits(np.asarray(logits, dtype=np.float32))
        for step in self.steps:
            candidates = step(candidates)
        return candidates

    def _steps(self) -> list[Step]:
        """Return the steps that change something, in the order of the settings."""
        p, is_random = self.params, self.params.temperature > 0
        if is_random and self._mirostat is not None:
            return [*self._bias(), *self._heat(0.0), self._mirostat]
        wanted: dict[str, list[Step]] = {
            "penalties": [self._penalties()] if penalises(p) else [],
            "dry": [Dry(self._dry)] if p.dry_multiplier and p.dry_last_n else [],
        }
        if is_random:
            wanted |= {
                "top_n_sigma": [TopNSigma(p.top_n_sigma)] if p.top_n_sigma else [],
                "top_k": [TopK(p.top_k)] if p.top_k else [],
                "typical_p": [TypicalP(p.typical_p)] if p.typical_p < 1 else [],
                "top_p": [TopP(p.top_p)] if p.top_p < 1 else [],
                "min_p": [MinP(p.min_p)] if p.min_p else [],
                "xtc": [self._xtc()] if p.xtc_probability else [],
                "temperature": self._heat(p.dynatemp_range),
            }
        return self._bias() + [step for name in p.samplers for step in wanted.get(name, [])]

    def _bias(self) -> list[Step]:
        return [LogitBias(self.params.logit_bias)] if self.params.logit_bias else []

    def _penalties(self) -> Step:
        p = self.params
        return Penalties(self.history, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)

    def _xtc(self) -> Step:
        return Xtc(self.params.xtc_probability, self.params.xtc_threshold, self.uniforms.draw)

    def _heat(self, spread: float) -> list[Step]:
        """Return the step of the temperature, which may move by `spread` either way."""
        p = self.params
        if spread:
            lowest, highest = max(0.0, p.temperature - spread), p.temperature + spread
            return [DynamicTemperature(lowest, highest, p.dynatemp_exponent)]
        return [SamplingTemperature(p.temperature)] if p.temperature != 1 else []


def penalises(p: SamplingParams) -> bool:
    """Return whether any penalty makes tokens of the history less likely."""
    is_neutral = p.repeat_penalty == 1 and p.frequency_penalty == 0 and p.presence_penalty == 0
    return p.repeat_last_n != 0 and not is_neutral


Logits = NDArray[np.float32]
"""Logits as an array of the host."""


class SamplingRequest(NamedTuple):
    """How a device may sample the token that follows a computed one.

    Attributes:
        sampler: settings, history and random numbers; it has accepted the computed token.
        never: ids of tokens that must not come; always the same for one sampler.
        allowed: returns which tokens may come this time, (at most n_vocab,); called once the
            devices compute. What it raises leaves sampling to the host. None for all.
    """

    sampler: Sampler
    never: Sequence[int]
    allowed: Callable[[], NDArray[np.bool_]] | None = None


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


KNOWN_STEPS = (Penalties, TopK, TopP, MinP, SamplingTemperature)
"""Step types that the kernels compute, in this order; with any other type the host samples."""

ROOM = 1024
"""Most candidates that one program can sort: ties at the edge of top-k may exceed k."""

MAX_WANTED = 768
"""Largest top-k of one rank, and number of candidates for top-p without top-k."""

MAX_SENT = 256
"""Most candidates that a rank sends to the others: 2 KB."""

N_HISTORY = 8192
"""Longest window of the penalties, in tokens."""


def most_sent(n_rank: int) -> int:
    """Return the largest top-k for n_rank ranks: the candidates that a rank sends at most."""
    return MAX_WANTED if n_rank == 1 else min(MAX_SENT, ROOM // _power_of_two(n_rank))


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
