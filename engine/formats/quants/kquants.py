"""Reads K formats: super-blocks of 256 with quantised scales for parts of 16 or 32 elements."""

import torch
from torch import Tensor

from engine.formats.quants.bits import affine, read_field, read_half, scaled, unpack_planes


def q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    offset = read_half(blocks, 82) * (scales >> 4)
    return affine(q2_k_codes(blocks), read_half(blocks, 80) * (scales & 0x0F), offset.neg_())


def q2_k_codes(blocks: Tensor) -> Tensor:
    """Return the stored codes without scales, uint8 (n_blocks, 256), as all `…_codes` here do."""
    return unpack_planes(torch.unflatten(blocks[:, 16:80], 1, (2, 32)), 2).flatten(1)


def q3_k(blocks: Tensor) -> Tensor:
    codes = q3_k_codes(blocks).view(torch.int8).sub_(4)
    return scaled(codes, read_half(blocks, 108) * q3_k_scales(blocks))


def q3_k_codes(blocks: Tensor) -> Tensor:
    top = unpack_planes(blocks[:, :32], 1).flatten(1)
    low = unpack_planes(torch.unflatten(blocks[:, 32:96], 1, (2, 32)), 2).flatten(1)
    return low.add_(top, alpha=4)


def q4_k(blocks: Tensor) -> Tensor:
    return affine(q4_k_codes(blocks), *_scales_and_offsets(blocks))


def q4_k_codes(blocks: Tensor) -> Tensor:
    return unpack_planes(torch.unflatten(blocks[:, 16:], 1, (4, 32)), 4).flatten(1)


def q5_k(blocks: Tensor) -> Tensor:
    return affine(q5_k_codes(blocks), *_scales_and_offsets(blocks))


def q5_k_codes(blocks: Tensor) -> Tensor:
    top = unpack_planes(blocks[:, 16:48], 1).flatten(1)
    low = unpack_planes(torch.unflatten(blocks[:, 48:], 1, (4, 32)), 4).flatten(1)
    return low.add_(top, alpha=16)


def q6_k(blocks: Tensor) -> Tensor:
    codes = q6_k_codes(blocks).view(torch.int8).sub_(32)
    return scaled(codes, read_half(blocks, 208) * read_field(blocks, 192, 208, torch.int8))


def q6_k_codes(blocks: Tensor) -> Tensor:
    low = unpack_planes(torch.unflatten(blocks[:, :128], 1, (2, 64)), 4).flatten(1)
    top = unpack_planes(torch.unflatten(blocks[:, 128:192], 1, (2, 32)), 2).flatten(1)
    return low.add_(top, alpha=16)


def q3_k_scales(blocks: Tensor) -> Tensor:
    """Return the 16 scales of Q3_K: eight bytes of low nibbles, four of top bit pairs, less 32."""
    low = unpack_planes(blocks[:, 96:104], 4).flatten(1)
    top = unpack_planes(blocks[:, 104:108], 2).flatten(1)
    return low.add_(top, alpha=16).view(torch.int8).sub_(32)


def six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and offsets of Q4_K and Q5_K, each uint8 (n_blocks, 8).

    The twelve bytes hold 6-bit numbers: four scales, four offsets, then the low nibbles of the
    other four of both, whose top two bits sit above the first ones.
    """
    scales, offsets, nibbles = torch.unflatten(blocks[:, 4:16], 1, (3, 4)).unbind(1)
    scale = torch.cat([scales & 0x3F, (nibbles & 0x0F) | (scales >> 6 << 4)], dim=1)
    offset = torch.cat([offsets & 0x3F, (nibbles >> 4) | (offsets >> 6 << 4)], dim=1)
    return scale, offset


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets in F32, times the block's factors; offsets are to be added."""
    scale, offset = six_bits(blocks)
    return read_half(blocks, 0) * scale, (read_half(blocks, 2) * offset).neg_()
