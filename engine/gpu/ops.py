"""The operations on a GPU by kernels of our own, where they serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.gpu import steps
from engine.ops.reference import ReferenceOps

if TYPE_CHECKING:

    pass


class GpuOps(ReferenceOps):
    """For one rank. What no kernel serves takes the way of the reference, in torch.

    Nothing here reads a number of the device, so that a token can be captured in a graph; what
    differs from token to token stands in the device's memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._n_past = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, n_past: int, n_tokens: int, position: Tensor) -> None:
        self._n_past = position

    def rms_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = steps.rms_norm(x, weight, bias, eps)
        return super().rms_norm(x, weight, bias, eps) if y is None else y
