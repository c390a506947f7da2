"""Reads IQ formats: codes index grids of four or eight magnitudes; signs are stored apart."""

import torch
from gguf.quants import IQ4_NL
from torch import Tensor

from engine.formats.quants import block_formats as lookup_tables
from engine.formats.quants.block_formats import (
    Q_SUPER,
    Codes,
    read_field,
    read_half,
    scaled,
    unpack_bytes,
    unpack_planes,
)

IQ4_VALUES: tuple[int, ...] = IQ4_NL.kvalues
"""Values of the non-linear 4-bit codes."""


def iq2_xxs(blocks: Tensor) -> Codes:
    pairs = torch.unflatten(read_field(blocks, 2, 66), 1, (8, 8))
    tail = pairs[..., 4:].flatten(1).view(torch.int32)
    scale = read_half(blocks, 0) * (0.5 + _top_nibble(tail)) * 0.25
    return scale, _signed("IQ2_XXS", pairs[..., :4].flatten(1), _sign_quads(tail))


def iq2_xs(blocks: Tensor) -> Codes:
    codes = read_field(blocks, 2, 66, torch.int16)
    signs = lookup_tables.look_up(lookup_tables.even_signs(blocks.device), codes >> 9 & 0x7F)
    scale = read_half(blocks, 0) * (0.5 + unpack_bytes(blocks[:, 66:], 4)) * 0.25
    return scale, _signed("IQ2_XS", codes & 0x1FF, signs)


def iq2_s(blocks: Tensor) -> Codes:
    codes = _extended(blocks[:, 2:34], unpack_bytes(blocks[:, 66:74], 2))
    signs = lookup_tables.look_up(lookup_tables.signs(blocks.device), blocks[:, 34:66])
    scale = read_half(blocks, 0) * (0.5 + unpack_bytes(blocks[:, 74:], 4)) * 0.25
    return scale, _signed("IQ2_S", codes, signs)


def iq3_xxs(blocks: Tensor) -> Codes:
    tail = read_field(blocks, 66, 98, torch.int32)
    scale = read_half(blocks, 0) * (0.5 + _top_nibble(tail)) * 0.5
    return scale, _signed("IQ3_XXS", blocks[:, 2:66], _sign_quads(tail))


def iq3_s(blocks: Tensor) -> Codes:
    ninth_bits = lookup_tables.look_up(lookup_tables.bits(blocks.device), blocks[:, 66:74])
    codes = _extended(blocks[:, 2:66], ninth_bits)
    signs = lookup_tables.look_up(lookup_tables.signs(blocks.device), blocks[:, 74:106])
    scale = read_half(blocks, 0) * (1 + 2 * unpack_bytes(blocks[:, 106:], 4))
    return scale, _signed("IQ3_S", codes, signs)


def iq1_s(blocks: Tensor) -> Codes:
    words = read_field(blocks, 34, 50, torch.int16)
    threes = torch.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], dim=-1)
    direction = words >> 15 & 1
    top = threes | direction.unsqueeze(-1) << 3
    scale = read_half(blocks, 0) * (2 * (words >> 12 & 7) + 1)
    return scale * 0.125, _eighths(_extended(blocks[:, 2:34], top.flatten(1)))


def iq1_m(blocks: Tensor) -> Codes:
    words = read_field(blocks, 48, 56, torch.int16)
    threes = torch.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], dim=-1).flatten(1)
    scale = _scattered_half(words) * (2 * threes + 1)
    codes = _extended(blocks[:, :32], unpack_bytes(blocks[:, 32:48], 4))
    return scale * 0.125, _eighths(codes)


def iq4_nl(blocks: Tensor) -> Tensor:
    return scaled(_nonlinear(unpack_planes(blocks[:, 2:], 4)), read_half(blocks, 0))


def iq4_xs(blocks: Tensor) -> Tensor:
    scale = read_half(blocks, 0) * iq4_xs_scales(blocks)
    return scaled(_nonlinear(iq4_xs_codes(blocks)), scale)


def iq4_xs_codes(blocks: Tensor) -> Tensor:
    """Return the stored codes, uint8 (n_blocks, 8, 2, 16)."""
    return unpack_planes(torch.unflatten(blocks[:, 8:], 1, (8, 16)), 4)


def iq4_xs_scales(blocks: Tensor) -> Tensor:
    """Return the scales of the block's eight parts: four low bits and two high ones, less 32."""
    low, top = unpack_bytes(blocks[:, 4:8], 4), unpack_bytes(blocks[:, 2:4], 2)
    return low.add_(top, alpha=16).view(torch.int8).sub_(32)


def _signed(name: str, codes: Tensor, signs: Tensor) -> Tensor:
    """Return the magnitudes of grid `name`, with `signs` applied, int8 (n_blocks, 256)."""
    magnitudes = lookup_tables.look_up(lookup_tables.grid(name, codes.device), codes)
    return magnitudes.mul_(signs)


def _eighths(codes: Tensor) -> Tensor:
    """Return the values of the shifted IQ1 grid, in eighths."""
    return lookup_tables.look_up(lookup_tables.shifted_ternary_grid(codes.device), codes)


def _nonlinear(codes: Tensor) -> Tensor:
    return lookup_tables.look_up_pairs(lookup_tables.code_pairs(IQ4_VALUES, codes.device), codes)


def _extended(low: Tensor, top: Tensor) -> Tensor:
    """Return codes of more than eight bits, int16, from their low bytes and top bits."""
    return low.to(torch.int16) | top.to(torch.int16) << 8


def _top_nibble(words: Tensor) -> Tensor:
    return words >> 28 & 0x0F


def _sign_quads(words: Tensor) -> Tensor:
    """Return the signs of the four 7-bit sign codes in each 32-bit word, int8 (n_blocks, 256)."""
    codes = torch.stack([words >> shift & 0x7F for shift in (0, 7, 14, 21)], dim=-1)
    table = lookup_tables.even_signs(words.device)
    return lookup_tables.look_up(table, codes.flatten(1)).view(-1, Q_SUPER)


def _scattered_half(words: Tensor) -> Tensor:
    """Return the float16 made of the top nibbles of four int16 words, as float32 (n_blocks, 1)."""
    first, second, third, fourth = words.unbind(1)
    number = (first >> 12 & 0xF) | (second >> 8 & 0xF0) | (third >> 4 & 0xF00) | fourth & -0x1000
    return number.view(torch.float16).to(torch.float32).unsqueeze(1)
