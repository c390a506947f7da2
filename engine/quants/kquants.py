"""K formats: super-blocks of 256 with quantised scales for parts of 16 or 32 elements."""

import torch
from torch import Tensor

from engine.quants.bits import affine, field, half, planes, scaled


def q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    codes = planes(torch.unflatten(blocks[:, 16:80], 1, (2, 32)), 2)
    offset = half(blocks, 82) * (scales >> 4)
    return affine(codes, half(blocks, 80) * (scales & 0x0F), offset.neg_())


def q3_k(blocks: Tensor) -> Tensor:
    top = planes(blocks[:, :32], 1).flatten(1)
    low = planes(torch.unflatten(blocks[:, 32:96], 1, (2, 32)), 2).flatten(1)
    codes = low.add_(top, alpha=4).view(torch.int8).sub_(4)
    return scaled(codes, half(blocks, 108) * _signed_scales(blocks[:, 96:108]))


def q4_k(blocks: Tensor) -> Tensor:
    codes = planes(torch.unflatten(blocks[:, 16:], 1, (4, 32)), 4)
    return affine(codes, *_scales_and_offsets(blocks))


def q5_k(blocks: Tensor) -> Tensor:
    top = planes(blocks[:, 16:48], 1).flatten(1)
    low = planes(torch.unflatten(blocks[:, 48:], 1, (4, 32)), 4).flatten(1)
    return affine(low.add_(top, alpha=16), *_scales_and_offsets(blocks))


def q6_k(blocks: Tensor) -> Tensor:
    low = planes(torch.unflatten(blocks[:, :128], 1, (2, 64)), 4).flatten(1)
    top = planes(torch.unflatten(blocks[:, 128:192], 1, (2, 32)), 2).flatten(1)
    codes = low.add_(top, alpha=16).view(torch.int8).sub_(32)
    return scaled(codes, half(blocks, 208) * field(blocks, 192, 208, torch.int8))


def _signed_scales(packed: Tensor) -> Tensor:
    """The 16 scales of Q3_K: eight bytes of low nibbles, four of top bit pairs, less 32."""
    low = planes(packed[:, :8], 4).flatten(1)
    top = planes(packed[:, 8:], 2).flatten(1)
    return low.add_(top, alpha=16).view(torch.int8).sub_(32)


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets, each (n_blocks, 8), of Q4_K and Q5_K.

    The twelve bytes hold 6-bit numbers: four scales, four offsets, then the low nibbles of the
    other four of both, whose top two bits sit above the first ones.
    """
    scales, offsets, nibbles = torch.unflatten(blocks[:, 4:16], 1, (3, 4)).unbind(1)
    scale = torch.cat([scales & 0x3F, (nibbles & 0x0F) | (scales >> 6 << 4)], dim=1)
    offset = torch.cat([offsets & 0x3F, (nibbles >> 4) | (offsets >> 6 << 4)], dim=1)
    return half(blocks, 0) * scale, (half(blocks, 2) * offset).neg_()
