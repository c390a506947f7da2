"""Temperature of queries that grows with their position, for sharp attention in long contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams


@dataclass(frozen=True, slots=True)
class Temperature:
    """Factor 1 + scale × ln(1 + floor((p + offset) / n_ctx)) on the query at position p.

    This is Llama 4's formula (the idea is from arXiv 2501.19399); Mistral has another offset.

    Attributes:
        scale: growth of the factor.
        n_ctx: number of tokens between two steps of the factor.
        offset: number added to positions.
    """

    scale: float
    n_ctx: int
    offset: int = 0

    @classmethod
    def read(cls, hp: HParams) -> Temperature | None:
        """Read a file's keys; without a length of its own, the context before stretching counts.

        Returns:
            None if the file has no scale.

        Raises:
            InvalidGGUF: there is a scale, but no length.
        """
        scale = hp.keys.number("attention.temperature_scale", 0.0)
        n_ctx = hp.keys.integer("attention.temperature_length", 0) or hp.rope.n_ctx_orig
        if not scale:
            return None
        if not n_ctx:
            raise hp.keys.invalid("queries grow with their position, but from which is not said")
        return cls(scale, n_ctx)

    def apply(self, q: Tensor, ctx: Context) -> Tensor:
        """Scale queries (T, n_head, head_dim)."""
        periods = (ctx.positions + self.offset).div(self.n_ctx, rounding_mode="floor")
        # in F64: torch's F32 logarithm of a number depends on how many others there are
        factors = 1 + self.scale * periods.double().log1p()
        return q * factors.to(q.dtype)[:, None, None]
