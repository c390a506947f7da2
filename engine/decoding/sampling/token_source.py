"""Logits as the host sees them, and how a token is to be sampled from them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Sampler

Logits = NDArray[np.float32]
"""Logits as an array of the host."""


class SamplingWish(NamedTuple):
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
