"""Interface of the operations that encoders of pictures need beside those of language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.model.forward.ops import Ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class PictureOps(Ops, Protocol):
    """Operations on all patches of one picture at once."""

    def attend_all(self, q: Tensor, k: Tensor, v: Tensor, windows: Sequence[int] = ()) -> Tensor:
        """Attend with q over k and v, all (T, n_head, head_dim), without a mask or a cache.

        Scores are divided by sqrt(head_dim).

        Args:
            windows: numbers of patches that see each other, one after the other; all see all
                without any.

        Returns:
            (T, n_head, head_dim)
        """
        ...

    def stretched(self, grid: Tensor, rows: int, columns: int) -> Tensor:
        """Resize a grid (n, n, channels) bilinearly, corners on corners.

        Returns:
            (rows, columns, channels)
        """
        ...

    def joined(self, *parts: Tensor) -> Tensor:
        """Join the parts along the first dimension."""
        ...

    def gelu_erf(self, x: Tensor) -> Tensor:
        """Apply GELU with the error function, not its approximation by tanh."""
        ...
