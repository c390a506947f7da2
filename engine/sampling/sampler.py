"""From logits to one token: a list of pure steps, then one draw.

The steps, their order and their meaning are llama.cpp's defaults: penalties, top-k, typical-p,
top-p, min-p, temperature. Every filter looks at the probabilities before temperature, and none
leaves less than one candidate. A step that would change nothing is not in the list.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.config import SamplingParams
from engine.errors import EngineError

__all__ = [
    "Candidates",
    "History",
    "MinP",
    "Penalties",
    "Sampler",
    "Step",
    "Temperature",
    "TopK",
    "TopP",
    "TypicalP",
    "Uniforms",
    "penalises",
]

FloatArray: TypeAlias = NDArray[np.float32]
IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens that may come next; never none.

    Args:
        ids: (n,), each once; ascending, unless `is_sorted`.
        logits: (n,), at least one of them finite; -inf for a token that must not come.
        is_sorted: by falling logit; equal ones by rising id.
    """

    ids: IntArray
    logits: FloatArray
    is_sorted: bool = False

    @staticmethod
    def from_logits(logits: FloatArray) -> Candidates:
        """All tokens of a vocabulary.

        Raises:
            EngineError: there is a NaN or +inf among the logits, or nothing but -inf.
        """
        # the maximum of anything with a NaN is NaN
        if not np.isfinite(logits.max(initial=-np.inf)):
            raise EngineError(
                "The model produced no usable probabilities for the next token (infinite or not "
                "a number).",
                "Load the model again; if it happens again the file may be damaged.",
            )
        return Candidates(np.arange(logits.size), logits)

    def __len__(self) -> int:
        return int(self.ids.size)

    def take(self, index: IntArray | NDArray[np.bool_] | slice, is_sorted: bool) -> Candidates:
        return Candidates(self.ids[index], self.logits[index], is_sorted)

    def sort(self) -> Candidates:
        if self.is_sorted:
            return self
        return self.take(np.argsort(-self.logits, kind="stable"), is_sorted=True)

    def top(self, k: int) -> Candidates:
        """The `k` likeliest, sorted, without sorting the rest."""
        if k >= len(self) or self.is_sorted:
            return self.sort().take(slice(k), is_sorted=True)
        threshold = _at_most_kth_largest(self.logits, k)
        few = self.take(np.flatnonzero(self.logits >= threshold), is_sorted=False)
        return few.sort().take(slice(k), is_sorted=True)

    def probabilities(self) -> NDArray[np.float64]:
        """(n,), in the order of `ids`; their sum is 1."""
        weights = self.weights()
        normalised: NDArray[np.float64] = weights / weights.sum()
        return normalised

    def weights(self) -> NDArray[np.float64]:
        """(n,), the probabilities as multiples of the largest."""
        below_best = self.logits.astype(np.float64) - float(self.logits.max())
        weights: NDArray[np.float64] = np.exp(below_best)
        return weights


def _at_most_kth_largest(values: FloatArray, k: int) -> np.float32:
    """A bound that at least `k` values reach, and with a large vocabulary few more do.

    The k-th largest of the maxima of many blocks is such a bound, as each maximum is a value of its
    own. Finding it reads the values once and sorts next to nothing.
    """
    block = max(1, values.size // (16 * k))
    whole = values.size // block * block
    maxima = values[:whole].reshape(-1, block).max(axis=1)
    bound: np.float32 = np.partition(maxima, maxima.size - k)[maxima.size - k]
    return bound


Step: TypeAlias = Callable[[Candidates], Candidates]


class History:
    """The last tokens and how often each occurs among them.

    Args:
        n_last: how many are remembered; -1 for all.
    """

    def __init__(self, n_last: int) -> None:
        self.n_last = n_last
        self._tokens: deque[int] = deque(maxlen=None if n_last < 0 else n_last)
        self._counts: Counter[int] = Counter()

    def append(self, token: int) -> None:
        if self._tokens.maxlen == 0:
            return
        if len(self._tokens) == self._tokens.maxlen:
            self._forget(self._tokens[0])
        self._tokens.append(token)
        self._counts[token] += 1

    def _forget(self, token: int) -> None:
        self._counts[token] -= 1
        if not self._counts[token]:
            del self._counts[token]

    @property
    def tokens(self) -> list[int]:
        """What is remembered, the oldest first."""
        return list(self._tokens)

    def counts(self) -> tuple[IntArray, IntArray]:
        """The tokens that occur, ascending, and how often each does: (n,), (n,)."""
        tokens = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.int64, len(self._counts))
        order = np.argsort(tokens)
        return tokens[order], counts[order]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Lower the logits of tokens that are in the history."""

    history: History
    repeat: float
    frequency: float
    presence: float

    def __call__(self, candidates: Candidates) -> Candidates:
        if candidates.is_sorted:
            candidates = candidates.take(np.argsort(candidates.ids), is_sorted=False)
        tokens, counts = self.history.counts()
        at, which = _find(candidates.ids, tokens)
        if not at.size:
            return candidates
        logits = candidates.logits.copy()
        seen = logits[at]
        seen = np.where(seen > 0, seen / self.repeat, seen * self.repeat)
        logits[at] = seen - (counts[which] * self.frequency + self.presence)
        return Candidates(candidates.ids, logits)


def _find(ids: IntArray, tokens: IntArray) -> tuple[IntArray, IntArray]:
    """Where in `ids` (ascending) which of `tokens` stand; those that are not there are left out."""
    at = np.searchsorted(ids, tokens)
    is_here = at < ids.size
    is_here[is_here] = ids[at[is_here]] == tokens[is_here]
    return at[is_here], np.flatnonzero(is_here)


@dataclass(frozen=True, slots=True)
class TopK:
    """Keep the `k` likeliest."""

    k: int

    def __call__(self, candidates: Candidates) -> Candidates:
        return candidates.top(self.k)


@dataclass(frozen=True, slots=True)
class TypicalP:
    """Keep the tokens whose surprise is nearest to the expected one, until they have more than `p`.

    Meister et al., "Locally Typical Sampling" (arXiv 2202.00666).
    """

    p: float

    def __call__(self, candidates: Candidates) -> Candidates:
        probabilities = candidates.probabilities()
        possible = probabilities > 0
        surprise = np.full(probabilities.shape, np.inf)
        surprise[possible] = -np.log(probabilities[possible])
        entropy = float(np.sum(probabilities[possible] * surprise[possible]))
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        reached = np.cumsum(probabilities[order])
        n = int(np.searchsorted(reached, self.p, side="right")) + 1
        return candidates.take(np.sort(order[:n]), candidates.is_sorted)


@dataclass(frozen=True, slots=True)
class TopP:
    """Keep the likeliest tokens, until they have at least `p`."""

    p: float
    N_FIRST = 1024

    def __call__(self, candidates: Candidates) -> Candidates:
        total = float(candidates.weights().sum())
        # the answer is nearly always among the first few, and sorting a vocabulary is slow
        for n_sorted in (min(self.N_FIRST, len(candidates)), len(candidates)):
            top = candidates.top(n_sorted)
            found = self.of_likeliest(top, total)
            if found is not None:
                return found
        return top

    def of_likeliest(self, top: Candidates, total: float) -> Candidates | None:
        """The same, of more tokens than the likeliest, `top`, sorted; None if these are too few.

        Args:
            total: of the weights of all tokens, as multiples of the largest.
        """
        reached = np.cumsum(np.exp(top.logits.astype(np.float64) - float(top.logits[0]))) / total
        n = int(np.searchsorted(reached, self.p, side="left")) + 1
        return top.take(slice(n), is_sorted=True) if n <= len(top) else None


@dataclass(frozen=True, slots=True)
class MinP:
    """Keep the tokens that are at least `p` times as likely as the likeliest."""

    p: float

    def __call__(self, candidates: Candidates) -> Candidates:
        threshold = candidates.logits.max() + np.float32(math.log(self.p))
        return candidates.take(candidates.logits >= threshold, candidates.is_sorted)


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divide the logits, here counted from the largest so that none can overflow to +inf."""

    temperature: float

    def __call__(self, candidates: Candidates) -> Candidates:
        below_best = candidates.logits.astype(np.float64) - float(candidates.logits.max())
        with np.errstate(over="ignore"):  # to -inf, which is a probability of 0 as it should
            logits = (below_best / self.temperature).astype(np.float32)
        return replace(candidates, logits=logits)


class Uniforms:
    """Random numbers in [0, 1) that can be seen before they are drawn, by who draws elsewhere."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._ahead: deque[float] = deque()

    def ahead(self, n: int) -> list[float]:
        """The next n numbers, still to be drawn."""
        self._ahead.extend(self._random.random(max(0, n - len(self._ahead))).tolist())
        return list(islice(self._ahead, n))

    def draw(self) -> float:
        """The next number."""
        return self._ahead.popleft() if self._ahead else float(self._random.random())


class Sampler:
    """Chooses tokens for one sequence.

    At a temperature of 0 that is the likeliest after penalties, of equal ones that with the lowest
    id; otherwise it is drawn. The same seed, logits and history give the same tokens.

    Attributes:
        seed: the one in use, also when `params` leaves it open.
        uniforms: of which each draw takes one, unless it is greedy.
        history: what the penalties look at.
        steps: applied in order before the draw.
    """

    def __init__(self, params: SamplingParams) -> None:
        # 32 bits are enough, and a person can note them down
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self.params = params
        self.is_greedy = params.temperature <= 0
        self.uniforms = Uniforms(self.seed)
        self.history = History(params.repeat_last_n)
        self.steps = _steps(params, self.history)

    def accept(self, token_id: int) -> None:
        """Add a token, of the prompt or of the answer, to what the penalties look at."""
        self.history.append(token_id)

    def sample(self, logits: FloatArray) -> int:
        """Choose the next token; it counts for the penalties only once it is accepted.

        Args:
            logits: (n_vocab,), left as they are.

        Raises:
            EngineError: the logits are not usable, see `Candidates.from_logits`.
        """
        return self.pick(self.candidates(logits))

    def pick(self, candidates: Candidates) -> int:
        """The draw alone, from what passed every step."""
        if self.is_greedy:
            return int(candidates.ids[np.argmax(candidates.logits)])
        cumulative = np.cumsum(candidates.weights())
        # below the total also after rounding, as random() is at most 1 - 2^-53
        point = self.uniforms.draw() * cumulative[-1]
        return int(candidates.ids[np.searchsorted(cumulative, point, side="right")])

    def candidates(self, logits: FloatArray) -> Candidates:
        """What `sample` draws from: the tokens that pass every step.

        Raises:
            EngineError: the logits are not usable.
        """
        candidates = Candidates.from_logits(np.asarray(logits, dtype=np.float32))
        for step in self.steps:
            candidates = step(candidates)
        return candidates


def penalises(p: SamplingParams) -> bool:
    """Whether tokens of the history are less likely."""
    is_neutral = p.repeat_penalty == 1 and p.frequency_penalty == 0 and p.presence_penalty == 0
    return p.repeat_last_n != 0 and not is_neutral


def _steps(params: SamplingParams, history: History) -> list[Step]:
    p = params
    penalties = Penalties(history, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
    is_random = p.temperature > 0
    wanted: list[tuple[bool, Step]] = [
        (penalises(p), penalties),
        (is_random and p.top_k > 0, TopK(p.top_k)),
        (is_random and p.typical_p < 1, TypicalP(p.typical_p)),
        (is_random and p.top_p < 1, TopP(p.top_p)),
        (is_random and p.min_p > 0, MinP(p.min_p)),
        (is_random and p.temperature != 1, Temperature(p.temperature)),
    ]
    return [step for is_wanted, step in wanted if is_wanted]
