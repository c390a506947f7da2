"""Joint products: several matrices in planes times the same few tokens, in one kernel call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.cpu.kernels import compiled

if TYPE_CHECKING:
    from engine.cpu.worker import Worker
    from engine.quants.extent import Extent


class PlaneMatrix(Protocol):
    """A quantised matrix in planes as a joint product sees it; see `cpu.weights.PlaneWeight`."""

    planes: Tensor
    type_number: int
    n_rows: int
    extent: Extent
    worker: Worker
    n_tokens_per_pass: int

    @property
    def n_pieces(self) -> int:
        """Number of work items of a gemv over this matrix."""
        ...

    def arguments(self, panels: int, n_tokens: int, out: int, out_stride: int) -> tuple[int, ...]:
        """Return the arguments of the multiplying kernel."""
        ...


class JointProduct:
    """Products of several matrices with the same few tokens, as one kernel call.

    For many tokens the time between calls does not matter. The result for one token lies in the
    same memory each time: it is valid until the next call with one token, so that a layer may use
    it but nobody may keep it.

    Args:
        weights: matrices of one rank that have the same columns.

    Attributes:
        n_tokens: largest number of tokens.
    """

    def __init__(self, weights: Sequence[PlaneMatrix]) -> None:
        first = weights[0]
        self.n_tokens = min(weight.n_tokens_per_pass for weight in weights)
        self._worker, self._extent = first.worker, first.extent
        self._rows = [weight.n_rows for weight in weights]
        self._width = sum(self._rows)
        self._planes = [weight.planes for weight in weights]  # what the arguments point to
        self._arguments = [array("q", weight.arguments(0, 0, 0, 0)) for weight in weights]
        self._table = array("q")
        for weight, arguments in zip(weights, self._arguments, strict=True):
            task = compiled.multiply_piece(weight.type_number, self._worker.x_bytes)
            self._table.extend((task, arguments.buffer_info()[0], weight.n_pieces))
        self._multiply, self._multiply_gated = compiled.multiply_all(), compiled.multiply_gated()
        self._jobs = self._table.buffer_info()[0], len(weights)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Return the product with each matrix, for x (T, n_in), T ≤ `n_tokens`."""
        if x.shape[0] != 1:
            return self.joined(x).split_with_sizes(self._rows, 1)
        y, parts = self._of_one
        self._compute(x, y)
        return parts

    @cached_property
    def _of_one(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Memory for the products with one token, and its part for each matrix."""
        y = torch.empty(1, self._width)
        return y, y.split_with_sizes(self._rows, 1)

    def joined(self, x: Tensor) -> Tensor:
        """Return the products side by side, in memory of their own."""
        y = torch.empty(x.shape[0], self._width)
        self._compute(x, y)
        return y

    def _compute(self, x: Tensor, y: Tensor) -> None:
        worker = self._worker
        activations = worker.activations(x, self._extent)
        worker.team.wake()
        self._multiply(
            worker.team.address, *self._jobs, *activations, y.data_ptr(), 4 * self._width
        )

    def gated(self, x: Tensor, activation: int, limit: int) -> Tensor:
        """Return `act(first product) * second product` of two matrices with equally many rows.

        Args:
            activation: address of a kernel of `engine.cpu.kernels.activation`.
            limit: limit of the activation, as that kernel takes it.
        """
        worker, n_tokens = self._worker, x.shape[0]
        y = self._gated_of_one if n_tokens == 1 else torch.empty(n_tokens, self._rows[0])
        activations = worker.activations(x, self._extent)
        worker.team.wake()
        self._multiply_gated(
            worker.team.address, activation, limit, y.data_ptr(), *self._jobs, *activations,
            worker.inner(n_tokens * self._width), 4 * self._width,
        )  # fmt: skip
        return y

    @cached_property
    def _gated_of_one(self) -> Tensor:
        return torch.empty(1, self._rows[0])
