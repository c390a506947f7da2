"""Reads the first GGML formats: 32 elements share one scale, and in some an offset."""

import torch
from torch import Tensor

from engine.formats.quants import lookup_tables
from engine.formats.quants.bits import affine, read_field, read_half, scaled, unpack_planes


def q4_0(blocks: Tensor) -> Tensor:
    codes = unpack_planes(blocks[:, 2:], 4).view(torch.int8)
    return scaled(codes.sub_(8), read_half(blocks, 0))


def q4_1(blocks: Tensor) -> Tensor:
    return affine(unpack_planes(blocks[:, 4:], 4), read_half(blocks, 0), read_half(blocks, 2))


def q5_0(blocks: Tensor) -> Tensor:
    codes = five_bits(blocks[:, 2:6], blocks[:, 6:])
    return scaled(codes.sub_(16), read_half(blocks, 0))


def q5_1(blocks: Tensor) -> Tensor:
    codes = five_bits(blocks[:, 4:8], blocks[:, 8:])
    return affine(codes, read_half(blocks, 0), read_half(blocks, 2))


def q8_0(blocks: Tensor) -> Tensor:
    return scaled(read_field(blocks, 2, 34, torch.int8), read_half(blocks, 0))


def five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Return codes 0 to 31, int8 (n_blocks, 32), from their top bits and low nibbles."""
    top = lookup_tables.look_up(lookup_tables.bits(high.device), high)
    return unpack_planes(low, 4).flatten(1).view(torch.int8).add_(top, alpha=16)
