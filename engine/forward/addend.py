"""What a part of a block adds to the residual stream, as the ranks have it before they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from engine.layers.norm import Norm


class Addend(NamedTuple):
    """`norm(sum of the ranks' summands + bias) * scale`; `Context.add` adds it to the stream.

    Attributes:
        summand: this rank's, (T, n_embd); None if it has none.
        bias: what is added once to the sum, (n_embd,).
        norm: what the biased sum passes, if anything.
        is_whole: the summand is the sum, and the same on all ranks.
        sum_scale: what the stream is multiplied by afterwards, (1,).
    """

    summand: Tensor | None
    bias: Tensor | None = None
    norm: Norm | None = None
    scale: float = 1.0
    is_whole: bool = False
    sum_scale: Tensor | None = None

    def summed(self, total: Tensor) -> Addend:
        """The same with the sum of all ranks."""
        return self._replace(summand=total, is_whole=True)
