"""The small operations between products, by kernels where they serve."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.gpu.kernels import norm
from engine.gpu.launch import launch

LONGEST_ROW = 1 << 15
"""Elements that one program holds at once."""


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """See `ReferenceOps.rms_norm`; None where the kernel does not serve."""
    n = x.shape[-1]
    if not is_plain(x) or n > LONGEST_ROW or (weight is not None and weight.dim() != 1):
        return None
    y = torch.empty_like(x)
    launch(
        norm.rms_norm, (x.numel() // n,),
        x, x if weight is None else weight, x if bias is None else bias, y, n, eps,
        SIZE=power_of_two(n), HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
    )  # fmt: skip
    return y


def is_plain(x: Tensor) -> bool:
    """Whether kernels can read it: F32, without gaps, and not empty."""
    return x.dtype == torch.float32 and x.is_contiguous() and x.numel() > 0


def power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
