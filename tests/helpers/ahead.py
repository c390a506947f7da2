"""A token source on the host that samples ahead: the interface in a few lines."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.decoding.sampling.sampler import Sampler
from engine.model.forward.batch import Batch, Piece


class AheadSource:
    """A `TokenSource` that has computed and sampled some tokens more than it was asked for.

    Args:
        runtime: computes the tokens; its cache then holds tokens that nobody asked for.
        ahead: number of tokens to sample ahead.
        is_able: returns, for each token, whether the source can sample it; if not, the host must.

    Attributes:
        n_delivered: number of sampled tokens that were handed out.
        is_beyond: no: the cache of its runtime can go back.
    """

    waited_s = 0.0
    is_beyond = False

    def __init__(self, runtime: Any, ahead: int, is_able: Any = lambda: True) -> None:
        self._runtime, self._ahead, self._is_able = runtime, ahead, is_able
        self._sampler: Sampler | None = None
        self._never: list[int] = []
        self._next: tuple[int, int] | None = None
        self._sampled: list[int | np.ndarray] = []
        self.n_delivered = 0

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        if sampler is not self._sampler:
            self.stop()
            self._sampler, self._never = sampler, list(never)
        return sampler.params.typical_p == 1

    def next(self, token: int, piece: Piece, n_left: int) -> int | np.ndarray:
        assert self._sampler is not None
        assert n_left > 0
        n_past = piece.n_past
        assert n_past + n_left <= self._runtime.n_ctx
        if self._next != (token, n_past):
            self.stop()
            self._at, self._fed = n_past, token
            self._piece = piece
            self._copy = copy.deepcopy(self._sampler)
        while len(self._sampled) < min(1 + self._ahead, n_left):
            self._sampled.append(self._sample())
        found = self._sampled.pop(0)
        if not isinstance(found, int):
            self.stop()
            return found
        if not self._sampler.is_greedy:
            self._sampler.uniforms.draw()
        self._next = (found, n_past + 1)
        self.n_delivered += 1
        return found

    def _sample(self) -> int | np.ndarray:
        logits: np.ndarray = self._runtime.forward(
            [self._fed], Batch((self._piece._replace(n_past=self._at),), 0)
        )[0]
        masked = logits.copy()
        masked[self._never] = -np.inf
        if not self._is_able() or not np.isfinite(masked.max()):
            return logits
        token = self._copy.sample(masked)
        self._copy.accept(token)
        self._at, self._fed = self._at + 1, token
        return token

    def hold(self, n: int) -> bool:
        self.stop()
        return True

    def stop(self) -> Sequence[int]:
        self._next = None
        self._sampled.clear()
        return ()
