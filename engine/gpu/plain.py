"""Products of few rows with matrices in F16, BF16 or F32, and rows of such."""

from __future__ import annotations

from torch import Tensor

from engine.ops.weights import gathered_rows


def product(x: Tensor, data: Tensor) -> Tensor | None:
    """`x Wᵀ` for x (T, n_in) in F32; None where the kernel does not serve."""
    return None


def looked_up(data: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` (T,) as F32 (T, n_in); zeros where there is no such row."""
    return gathered_rows(ids, len(data), lambda rows: data.index_select(0, rows).float())
