"""Matrices in planes times the same few tokens, as one call of a kernel."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels import calls

if TYPE_CHECKING:
    from engine.ops.planes import PlaneWeight


class Together:
    """Products of a few tokens; for many, the time between jobs does not count.

    Args:
        weights: of one rank, with the same columns.

    Attributes:
        n_tokens: at most.
    """

    def __init__(self, weights: Sequence[PlaneWeight]) -> None:
        first = weights[0]
        self.n_tokens = min(weight.n_tokens_per_pass for weight in weights)
        self._worker, self._extent = first.worker, first.extent
        self._rows = [weight.n_rows for weight in weights]
        self._width = sum(self._rows)
        self._planes = [weight.planes for weight in weights]  # what the arguments point to
        self._arguments = [array("q", weight.arguments(0, 0, 0, 0)) for weight in weights]
        self._table = array("q")
        for weight, arguments in zip(weights, self._arguments, strict=True):
            task = calls.multiply_task(weight.type_number, self._worker.x_bytes)
            self._table.extend((task, arguments.buffer_info()[0], weight.n_pieces))
        self._multiply, self._multiply_gated = calls.multiply_all(), calls.multiply_gated()
        self._jobs = self._table.buffer_info()[0], len(weights)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """The product with each matrix, for x (T, n_in), T ≤ `n_tokens`."""
        return self.joined(x).split_with_sizes(self._rows, 1)

    def joined(self, x: Tensor) -> Tensor:
        """The products side by side."""
        worker = self._worker
        y = torch.empty(x.shape[0], self._width)
        activations = worker.activations(x, self._extent)
        worker.team.wake()
        self._multiply(
            worker.team.address, *self._jobs, *activations, y.data_ptr(), 4 * self._width
        )
        return y

    def gated(self, x: Tensor, activation: int, limit: int) -> Tensor:
        """`act(first product) * second product`, of two matrices with equally many rows.

        Args:
            activation: the address of a kernel of `engine.kernels.activation`.
            limit: as that wants it.
        """
        worker, n_tokens = self._worker, x.shape[0]
        y = torch.empty(n_tokens, self._rows[0])
        activations = worker.activations(x, self._extent)
        worker.team.wake()
        self._multiply_gated(
            worker.team.address, activation, limit, y.data_ptr(), *self._jobs, *activations,
            worker.inner(n_tokens * self._width), 4 * self._width,
        )  # fmt: skip
        return y
