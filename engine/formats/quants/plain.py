"""Reads types that store each element as a number of its own."""

from collections.abc import Callable

import torch
from torch import Tensor


def plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a reader of blocks that are a single number of `dtype`."""

    def dequantise_blocks(blocks: Tensor) -> Tensor:
        numbers = blocks.clone(memory_format=torch.contiguous_format).view(dtype)
        return numbers.to(torch.float32)

    return dequantise_blocks
