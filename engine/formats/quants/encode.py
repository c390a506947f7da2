"""Quantises numbers to GGML blocks, bit-equal to the gguf package, for the types of the KV cache.

A block of either type is an F16 scale d, then 32 whole numbers q. In Q8_0 they are signed bytes,
x = d q; in Q4_0 nibbles, x = d (q - 8), where byte j holds element j in its low half and element
j + 16 in its high half.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.formats.gguf.types import TYPES


def quantise(x: Tensor, type_number: int) -> Tensor:
    """Return numbers as stored rows; `dequantise` undoes it, up to rounding.

    Args:
        x: rows of whole blocks, float32 (..., elements).
        type_number: GGML type, a key of `WRITERS`.

    Returns:
        Bytes of the rows, uint8 (..., row bytes).

    Raises:
        ValueError: the type cannot be written, `x` is not F32, or a block is cut.
    """
    writer = WRITERS.get(type_number)
    if writer is None:
        raise ValueError(f"GGML type {type_number} cannot be written")
    info = TYPES[type_number]
    if x.dtype != torch.float32 or x.dim() == 0 or x.shape[-1] % info.block_size:
        raise ValueError(
            f"{info.name} is made of F32 rows in blocks of {info.block_size}, "
            f"not of {x.dtype} of shape {tuple(x.shape)}"
        )
    n_blocks = x.shape[-1] // info.block_size
    rows = writer(x.reshape(-1, info.block_size))
    return rows.view(*x.shape[:-1], n_blocks * info.type_size)


def _q8_0(blocks: Tensor) -> Tensor:
    """Return float32 (n_blocks, 32) as uint8 (n_blocks, 34)."""
    largest = blocks.abs().amax(1, keepdim=True)
    # a tensor of 127s, as CUDA turns a division by a number into a product with 1 / 127
    scale = largest / torch.full_like(largest, 127)
    scaled = blocks * _inverse(scale)
    size = scaled.abs()
    whole = size.floor()
    whole += ((size - whole) * 2).floor_()  # halves away from zero
    codes = whole.copysign_(scaled).to(torch.int8)
    return torch.cat((_f16_bytes(scale), codes.view(torch.uint8)), dim=1)


def _q4_0(blocks: Tensor) -> Tensor:
    """Return float32 (n_blocks, 32) as uint8 (n_blocks, 18)."""
    at = blocks.abs().argmax(1, keepdim=True)
    scale = blocks.gather(1, at) / -8
    codes = (blocks * _inverse(scale) + 8.5).to(torch.uint8).clamp_(max=15)
    low, high = codes.chunk(2, dim=1)
    return torch.cat((_f16_bytes(scale), low | high << 4), dim=1)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, scale.reciprocal())


def _f16_bytes(scale: Tensor) -> Tensor:
    """Return float32 (n_blocks, 1) as uint8 (n_blocks, 2)."""
    return scale.to(torch.float16).view(torch.uint8)


WRITERS: Mapping[int, Callable[[Tensor], Tensor]] = MappingProxyType(
    {Kind.Q8_0: _q8_0, Kind.Q4_0: _q4_0}
)
"""Writers float32 (n_blocks, block_size) -> uint8 (n_blocks, type_size), by GGML type number."""
