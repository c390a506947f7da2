"""Interface of what samples tokens where they are computed, without logits for the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engine.sampling.sampler import Sampler

Logits = NDArray[np.float32]


class TokenSource(Protocol):
    """Draws tokens where they are computed, and may be some tokens ahead of who reads them.

    A runtime that can has one, as its `stream`. Whoever uses the cache otherwise stops it first.

    Attributes:
        waited_s: seconds so far in which the host did nothing but wait for the device.
    """

    waited_s: float

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        """Draw as `sampler` would from now on; False if that has to draw by itself.

        It is asked before each token.

        Args:
            never: tokens that must not come.
        """
        ...

    def next(self, token: int, n_past: int, n_left: int) -> int | Logits | None:
        """Compute a token after `n_past` cached ones, and draw the one behind it.

        Its random number is taken from the sampler, which has accepted `token` before.

        Args:
            n_left: how many tokens may still be drawn, with this one; and no more are computed.

        Returns:
            The token that was drawn; or logits (n_vocab,), from which `sampler` has to draw; or
            None if those are lost as well, and states hold what cannot be told.
        """
        ...

    def stop(self) -> Sequence[int]:
        """Wait until nothing is computed any more.

        Returns:
            What was computed behind the token that `next` was called for last, if that cannot be
            undone: the cache holds these tokens now. None where it can rewind.
        """
        ...
