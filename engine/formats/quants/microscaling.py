"""Reads 4-bit floats (sign, two exponent bits, one mantissa bit) with an 8-bit scale."""

from functools import cache

import torch
from torch import Tensor

from engine.formats.quants import lookup_tables
from engine.formats.quants.bits import Codes, scaled, unpack_planes

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each code, to stay in integers; the scales are halved in turn."""


def mxfp4(blocks: Tensor) -> Tensor:
    values = _e2m1(unpack_planes(blocks[:, 1:], 4))
    return scaled(values, _scales(_power_of_two_scales(blocks.device), blocks[:, :1]))


def nvfp4(blocks: Tensor) -> Codes:
    """Read NVFP4: four parts of 16 elements, with a scale each."""
    values = _e2m1(unpack_planes(torch.unflatten(blocks[:, 4:], 1, (4, 8)), 4))
    return _scales(_e4m3_scales(blocks.device), blocks[:, :4]), values.flatten(1)


def _e2m1(codes: Tensor) -> Tensor:
    return lookup_tables.look_up_pairs(lookup_tables.code_pairs(E2M1_DOUBLED, codes.device), codes)


def _scales(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@cache
def _power_of_two_scales(device: torch.device) -> Tensor:
    """Return half of 2 ** (code - 127), built from its bits: the two smallest are subnormal."""
    code = torch.arange(256, dtype=torch.int32)
    bits = torch.where(code < 2, 0x00200000 << code.clamp(max=1), (code - 1) << 23)
    return bits.view(torch.float32).to(device)


@cache
def _e4m3_scales(device: torch.device) -> Tensor:
    """Return half of each unsigned float with four exponent bits (bias 7) and three of mantissa.

    0x7F is not a number and counts as zero. The top bit is ignored.
    """
    code = torch.arange(256, dtype=torch.int32)
    exponent, mantissa = code >> 3 & 0x0F, code & 0x07
    significand = torch.where(exponent == 0, mantissa, mantissa + 8).to(torch.float32)
    scale = torch.ldexp(significand, exponent.clamp(min=1) - 7 - 3 - 1)
    return torch.where(code == 0x7F, 0.0, scale).to(device)
