"""The earlier tokens that the layers of a group see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.model.forward.pages import PAGE


@dataclass(frozen=True, slots=True)
class Sight:
    """Attention window of a group of layers: how far back its tokens see.

    Attributes:
        n: number of tokens; None for all.
        is_chunked: whether the tokens are cut in chunks of `n`, each of which sees its own
            beginning (Llama 4); else each token sees the last `n`, itself included.
    """

    n: int | None = None
    is_chunked: bool = False

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at a position sees."""
        if self.n is None:
            return 0
        if self.is_chunked:
            return position // self.n * self.n
        return max(0, position - self.n + 1)

    def n_pages(self, n_ctx: int, n_batch: int) -> int:
        """Return how many pages a sequence of `n_ctx` tokens uses at once, at most.

        Args:
            n_batch: largest number of tokens that are computed at once.
        """
        whole = -(-n_ctx // PAGE)
        if self.n is None:
            return whole
        return min(whole, -(-(self.n + n_batch - 2) // PAGE) + 1)


EVERYTHING = Sight()
"""Sight of layers without a window."""


def in_order(sights: Iterable[Sight]) -> tuple[Sight, ...]:
    """Return each sight once: that of everything first, then the others, the farthest first."""
    return tuple(sorted(set(sights), key=lambda s: (s.n is not None, -(s.n or 0), s.is_chunked)))
