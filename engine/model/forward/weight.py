"""Interface to a matrix in a rank's memory: dequantised, packed, or in planes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.expert_rows import Groups

ALL = slice(None)
"""Slice of all rows."""


class Weight(Protocol):
    """A matrix (n_out, n_in), or one per expert."""

    @property
    def n_bytes(self) -> int:
        """Bytes that the matrix takes."""
        ...

    def matmul(self, x: Tensor) -> Tensor:
        """Return `x Wᵀ`, (T, n_out), for x (T, n_in) in F32."""
        ...

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` (T,) as (T, n_in); zeros for ids that this rank has no row of."""
        ...

    def grouped(self, x: Tensor, groups: Groups) -> Tensor:
        """Multiply each row of x (n_row, n_in) by its expert's matrix (grouped GEMM).

        On CPUs, x may have a row for each token instead, (T, n_in), where these are fewer.
        """
        ...

    def per_head(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        """Return `x Wᵀ` with one matrix per head, (T, n_head, n_out), for x (T, n_head, n_in).

        Args:
            rows: rows of each W to multiply by.
            transposed: whether to return `x W` instead: (T, n_head, n_out) to (T, n_head, n_in).
        """
        ...
