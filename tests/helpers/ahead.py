"""Drawing ahead on the host: what a runtime's stream promises, in a few lines."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.sampling.sampler import Sampler


class AheadStream:
    """A `TokenSource` that has computed and drawn some tokens more than it was asked for.

    Args:
        runtime: computes them; its cache then holds tokens that nobody asked for.
        is_able: for each draw, whether it can do that; if not the host has to.
    """

    def __init__(self, runtime: Any, ahead: int, is_able: Any = lambda: True) -> None:
        self._runtime, self._ahead, self._is_able = runtime, ahead, is_able
        self._sampler: Sampler | None = None
        self._never: list[int] = []
        self._next: tuple[int, int] | None = None
        self._drawn: list[int | np.ndarray] = []
        self.n_delivered = 0

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        if sampler is not self._sampler:
            self.stop()
            self._sampler, self._never = sampler, list(never)
        return sampler.params.typical_p == 1

    def next(self, token: int, n_past: int, n_left: int) -> int | np.ndarray:
        assert self._sampler is not None
        assert n_left > 0
        assert n_past + n_left <= self._runtime.n_ctx
        if self._next != (token, n_past):
            self.stop()
            self._at, self._fed = n_past, token
            self._copy = copy.deepcopy(self._sampler)
        while len(self._drawn) < min(1 + self._ahead, n_left):
            self._drawn.append(self._draw())
        found = self._drawn.pop(0)
        if not isinstance(found, int):
            self.stop()
            return found
        if not self._sampler.is_greedy:
            self._sampler.uniforms.draw()
        self._next = (found, n_past + 1)
        self.n_delivered += 1
        return found

    def _draw(self) -> int | np.ndarray:
        logits: np.ndarray = self._runtime.forward([self._fed], self._at, 0)[0]
        masked = logits.copy()
        masked[self._never] = -np.inf
        if not self._is_able() or not np.isfinite(masked.max()):
            return logits
        drawn = self._copy.sample(masked)
        self._copy.accept(drawn)
        self._at, self._fed = self._at + 1, drawn
        return drawn

    def stop(self) -> Sequence[int]:
        self._next = None
        self._drawn.clear()
        return ()
