"""Interface of sampling on the device, where tokens are computed, without logits for the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engine.sampling.sampler import Sampler

Logits = NDArray[np.float32]
"""Logits as an array of the host."""


class TokenSource(Protocol):
    """Sampler of tokens on the device, which may run some tokens ahead of their reader.

    A runtime that can sample there has one, as its `stream`. Whoever else uses the cache must stop
    it first.

    Attributes:
        waited_s: total time in which the host only waited for the device, in seconds.
    """

    waited_s: float

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        """Sample as `sampler` would from now on; return False where the host must sample.

        Called before each token.

        Args:
            sampler: settings, history and random numbers.
            never: ids of tokens that must not come.
        """
        ...

    def next(self, token: int, n_past: int, n_left: int) -> int | Logits | None:
        """Run a token after `n_past` cached ones, and sample the next one.

        The random number is taken from the sampler, which has already accepted `token`.

        Args:
            token: id of the token to run.
            n_past: number of cached tokens before it.
            n_left: number of tokens that may still be sampled, with this one; no more are computed.

        Returns:
            The sampled token; or logits (n_vocab,), from which `sampler` must sample; or None if
            these are lost too and the content of the states is unknown.
        """
        ...

    def stop(self) -> Sequence[int]:
        """Wait until the device has finished all tokens.

        Returns:
            Tokens that were run after the last one given to `next` and cannot be undone, so that
            the cache holds them; none where the cache can rewind.
        """
        ...
