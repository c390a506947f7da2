"""Samples the next token from logits: a list of pure filter steps, then one random draw.

The steps and their order are llama.cpp's defaults: penalties, top-k, typical-p, top-p, min-p,
temperature. Every filter looks at the probabilities before temperature. A step that would change
nothing is not in the list.
"""

from __future__ import annotations

import secrets
from collections import deque
from itertools import islice

import numpy as np

from engine.config import SamplingParams
from engine.sampling.steps import (
    Candidates,
    FloatArray,
    MinP,
    Penalties,
    SamplingTemperature,
    Step,
    TokenHistory,
    TopK,
    TopP,
    TypicalP,
)

__all__ = ["Sampler", "Uniforms", "penalises"]


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
    """

    def __init__(self, params: SamplingParams) -> None:
        # 32 bits are enough, and a person can note them down
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self.params = params
        self.is_greedy = params.temperature <= 0
        self.uniforms = Uniforms(self.seed)
        self.history = TokenHistory(params.repeat_last_n)
        self.steps = _steps(params, self.history)

    def accept(self, token_id: int) -> None:
        """Add a token of the prompt or the answer to the history."""
        self.history.append(token_id)

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
        return int(candidates.ids[np.searchsorted(cumulative, point, side="right")])

    def candidates(self, logits: FloatArray) -> Candidates:
        """Return the candidates that `sample` chooses from: the tokens that pass every step.

        Raises:
            EngineError: the logits are unusable, see `Candidates.from_logits`.
        """
        candidates = Candidates.from_logits(np.asarray(logits, dtype=np.float32))
        for step in self.steps:
            candidates = step(candidates)
        return candidates


def penalises(p: SamplingParams) -> bool:
    """Return whether any penalty makes tokens of the history less likely."""
    is_neutral = p.repeat_penalty == 1 and p.frequency_penalty == 0 and p.presence_penalty == 0
    return p.repeat_last_n != 0 and not is_neutral


def _steps(params: SamplingParams, history: TokenHistory) -> list[Step]:
    p = params
    penalties = Penalties(history, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
    is_random = p.temperature > 0
    wanted: list[tuple[bool, Step]] = [
        (penalises(p), penalties),
        (is_random and p.top_k > 0, TopK(p.top_k)),
        (is_random and p.typical_p < 1, TypicalP(p.typical_p)),
        (is_random and p.top_p < 1, TopP(p.top_p)),
        (is_random and p.min_p > 0, MinP(p.min_p)),
        (is_random and p.temperature != 1, SamplingTemperature(p.temperature)),
    ]
    return [step for is_wanted, step in wanted if is_wanted]
