"""Bit operations that unpack the blocks of all formats.

Numbers stay in bytes as long as possible: a tensor of 8-bit codes costs a quarter of the memory
traffic of the float result.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Codes = tuple[Tensor, Tensor]
"""Scales, float32 (n_blocks, g), and whole numbers, int8 (n_blocks, elements).

Each scale applies to one of g equal parts of its block; a weight is scale × number, rounded once.
"""

Q_SUPER = 256
"""Number of elements of a super-block of the K, IQ and TQ types."""


def read_field(blocks: Tensor, start: int, stop: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return bytes `start` to `stop` of every block, reinterpreted as little-endian `dtype`.

    It copies, because the bytes may start at any address and a reinterpreted tensor may not.
    """
    part = blocks[:, start:stop].clone(memory_format=torch.contiguous_format)
    return part.view(dtype)


def read_half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at byte `start` of every block, as float32 (n_blocks, 1)."""
    return read_field(blocks, start, start + 2, torch.float16).to(torch.float32)


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes stored in bit planes over the whole row: (..., w) -> (..., 8 // bits, w).

    The lowest bits of the w bytes hold the first w codes, the bits above the next w, and so on.
    """
    return torch.stack(_parts(packed, bits), dim=-2)


def unpack_bytes(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes that follow each other within a byte: (..., w) -> (..., w * 8 // bits)."""
    return torch.stack(_parts(packed, bits), dim=-1).flatten(-2)


def _parts(packed: Tensor, bits: int) -> list[Tensor]:
    mask = (1 << bits) - 1
    return [(packed >> shift) & mask for shift in range(0, 8, bits)]


def scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """Return `codes * scale` as float32 (n_blocks, elements), with scales (n_blocks, g)."""
    values = _grouped(codes, scale)
    return values.mul_(scale.unsqueeze(-1)).flatten(1)


def weight_reader(read: Callable[[Tensor], Codes]) -> Callable[[Tensor], Tensor]:
    """Return a reader of weights, given one of scales and whole numbers."""

    def dequantise_blocks(blocks: Tensor) -> Tensor:
        scale, values = read(blocks)
        return scaled(values, scale)

    return dequantise_blocks


def affine(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return `codes * scale + offset`, with scales and offsets (n_blocks, g).

    Product and sum are rounded one after the other, as in GGML's reference.
    """
    values = _grouped(codes, scale)
    return values.mul_(scale.unsqueeze(-1)).add_(offset.unsqueeze(-1)).flatten(1)


def _grouped(codes: Tensor, scale: Tensor) -> Tensor:
    values = codes.to(torch.float32).flatten(1)
    return torch.unflatten(values, 1, (scale.shape[1], values.shape[1] // scale.shape[1]))
