"""Reads formats with one or two bits per element and one scale per block."""

import torch
from torch import Tensor

from engine.formats.quants import lookup_tables
from engine.formats.quants.bits import Codes, read_half, unpack_planes


def tq1_0(blocks: Tensor) -> Codes:
    """Read TQ1_0: five base-3 digits per byte, four in the last bytes, as fractions of 256."""
    parts = (_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4))
    return read_half(blocks, 52), torch.cat(parts, dim=1)


def tq2_0(blocks: Tensor) -> Codes:
    codes = unpack_planes(torch.unflatten(blocks[:, :64], 1, (2, 32)), 2).view(torch.int8)
    return read_half(blocks, 64), codes.sub_(1).flatten(1)


def q1_0(blocks: Tensor) -> Codes:
    """Read Q1_0: a set bit is +scale, a clear one -scale."""
    values = lookup_tables.look_up(lookup_tables.signs(blocks.device), ~blocks[:, 2:])
    return read_half(blocks, 0), values


def q2_0(blocks: Tensor) -> Codes:
    """Read Q2_0: codes 0 to 3 are -1, 0, 1 and 2 times the scale."""
    values = lookup_tables.look_up(lookup_tables.two_bit_codes(-1, blocks.device), blocks[:, 2:])
    return read_half(blocks, 0), values


def _trits(packed: Tensor, n_digits: int) -> Tensor:
    """Return digits -1, 0, 1 as int8 (n_blocks, n_digits * w), all of one place together.

    Multiplying by a power of three moves a digit to the front, as the bytes wrap. The leading digit
    is then the third of 0..255 that the byte lies in.
    """
    moved = torch.stack([packed * 3**place for place in range(n_digits)], dim=1).flatten(1)
    return (moved > 85).view(torch.int8) + (moved > 170).view(torch.int8) - 1
