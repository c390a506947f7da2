"""Products of up to some hundred rows: weights go from planes to the tensor cores in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from engine.gpu.weights import GpuPlanes


def product(x: Tensor, weight: GpuPlanes) -> Tensor | None:
    """`x Wᵀ` for x (T, n_in) in F32; None where the kernel does not serve."""
    return None
