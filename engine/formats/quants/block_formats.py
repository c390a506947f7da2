"""Block formats of GGML types, and lookup tables for codes, cached per device.

A table entry packs several int8 values into one integer word, so that a single gather yields all of
them. Each table takes a few KiB.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from gguf import quants as reference
from numpy.typing import NDArray
from torch import Tensor

Codes = tuple[Tensor, Tensor]
"""Scales, float32 (n_blocks, g), and integers, int8 (n_blocks, elements).

Each scale applies to one of g equal parts of its block; a weight is scale × number, rounded once.
"""

Q_SUPER = 256
"""Elements per super-block of the K, IQ and TQ types."""


def read_field(blocks: Tensor, start: int, stop: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return bytes `start` to `stop` in every block, reinterpreted as little-endian `dtype`.

    The bytes are copied, because a reinterpreted tensor must be aligned.
    """
    part = blocks[:, start:stop].clone(memory_format=torch.contiguous_format)
    return part.view(dtype)


def read_half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at byte `start` in every block, as float32 (n_blocks, 1)."""
    return read_field(blocks, start, start + 2, torch.float16).to(torch.float32)


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes stored in bit planes over the whole row: (..., w) -> (..., 8 // bits, w).

    The lowest bits of the w bytes hold the first w codes, the next bits the next w, and so on.
    """
    return torch.stack(_parts(packed, bits), dim=-2)


def unpack_bytes(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes stored next to each other in each byte: (..., w) -> (..., w * 8 // bits)."""
    return torch.stack(_parts(packed, bits), dim=-1).flatten(-2)


def _parts(packed: Tensor, bits: int) -> list[Tensor]:
    mask = (1 << bits) - 1
    return [(packed >> shift) & mask for shift in range(0, 8, bits)]


def scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """Return `codes * scale` as float32 (n_blocks, elements), with scales (n_blocks, g)."""
    values = _grouped(codes, scale)
    return values.mul_(scale.unsqueeze(-1)).flatten(1)


def weight_reader(read: Callable[[Tensor], Codes]) -> Callable[[Tensor], Tensor]:
    """Return a function that reads weights, given one that reads scales and integers."""

    def dequantise_blocks(blocks: Tensor) -> Tensor:
        scale, values = read(blocks)
        return scaled(values, scale)

    return dequantise_blocks


def affine(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return `codes * scale + offset`, with scales and offsets (n_blocks, g).

    Product and sum are rounded separately, as in GGML's reference code.
    """
    values = _grouped(codes, scale)
    return values.mul_(scale.unsqueeze(-1)).add_(offset.unsqueeze(-1)).flatten(1)


def _grouped(codes: Tensor, scale: Tensor) -> Tensor:
    values = codes.to(torch.float32).flatten(1)
    return torch.unflatten(values, 1, (scale.shape[1], values.shape[1] // scale.shape[1]))


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return the int8 values for every code: (..., w) -> (..., w * values per entry)."""
    words = table.index_select(0, codes.reshape(-1).to(torch.int32))
    return words.view(torch.int8).view(*codes.shape[:-1], codes.shape[-1] * table.itemsize)


def look_up_pairs(table: Tensor, codes: Tensor) -> Tensor:
    """Look up 4-bit codes in a table from `code_pairs`; return int8 with the shape of `codes`."""
    return look_up(table, codes.view(torch.int16))


@cache
def code_pairs(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a table that decodes two adjacent bytes with a 4-bit code each, given 16 values."""
    codes = np.arange(0x0F0F + 1)
    decoded = np.array(values)
    return _packed(np.stack([decoded[codes & 0x0F], decoded[codes >> 8 & 0x0F]], axis=1), device)


@cache
def bits(device: torch.device) -> Tensor:
    """Return a table of the eight bits in each byte as 0 or 1, lowest first."""
    return _packed(_bits(np.arange(256)), device)


@cache
def signs(device: torch.device) -> Tensor:
    """Return a table of the eight bits in each byte as +1 (clear) or -1 (set), lowest first."""
    return _packed(1 - 2 * _bits(np.arange(256)), device)


@cache
def even_signs(device: torch.device) -> Tensor:
    """Return a table of eight signs per 7-bit code; the eighth makes the number of minuses even."""
    low = _bits(np.arange(128))[:, :7]
    eighth = low.sum(axis=1, keepdims=True) % 2
    return _packed(1 - 2 * np.concatenate([low, eighth], axis=1), device)


@cache
def two_bit_codes(offset: int, device: torch.device) -> Tensor:
    """Return a table of the four 2-bit codes in each byte, lowest first, plus `offset`."""
    codes = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3
    return _packed(codes + offset, device)


@cache
def grid(name: str, device: torch.device) -> Tensor:
    """Return the grid for an IQ2 or IQ3 type: four or eight magnitudes per entry."""
    return _packed(_reference_grid(name), device)


@cache
def shifted_ternary_grid(device: torch.device) -> Tensor:
    """Return the grid for the IQ1 types in eighths: plus one, then (from index 2048) minus one."""
    eighths = 8 * _reference_grid("IQ1_S")
    return _packed(np.concatenate([eighths + 1, eighths - 1]), device)


def _reference_grid(name: str) -> NDArray[Any]:
    kind = getattr(reference, name)
    kind.init_grid()
    values: NDArray[Any] = kind.grid.reshape(kind.grid_shape)
    return values


def _bits(numbers: NDArray[Any]) -> NDArray[Any]:
    return numbers[:, None] >> np.arange(8) & 1


def _packed(rows: NDArray[Any], device: torch.device) -> Tensor:
    # two, four or eight small integers per word
    values = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int8))
    return values.view(_WORDS[rows.shape[1]]).reshape(-1).to(device)


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
    """Return codes 0 to 31, as int8 (n_blocks, 32), from their top bits and low nibbles."""
    top = look_up(bits(high.device), high)
    return unpack_planes(low, 4).flatten(1).view(torch.int8).add_(top, alpha=16)


def q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    offset = read_half(blocks, 82) * (scales >> 4)
    return affine(q2_k_codes(blocks), read_half(blocks, 80) * (scales & 0x0F), offset.neg_())


def q2_k_codes(blocks: Tensor) -> Tensor:
    """Return the stored codes as uint8 (n_blocks, 256), without scales, like all `…_codes` here."""
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
    """Return the 16 scales of Q3_K: eight bytes with low nibbles, four with top bits, minus 32."""
    low = unpack_planes(blocks[:, 96:104], 4).flatten(1)
    top = unpack_planes(blocks[:, 104:108], 2).flatten(1)
    return low.add_(top, alpha=16).view(torch.int8).sub_(32)


def six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and offsets of Q4_K and Q5_K, each as uint8 (n_blocks, 8).

    Twelve bytes hold 6-bit numbers: four scales, four offsets, then the low nibbles of the other
    four scales and offsets, whose top two bits are stored above the first four of each.
    """
    scales, offsets, nibbles = torch.unflatten(blocks[:, 4:16], 1, (3, 4)).unbind(1)
    scale = torch.cat([scales & 0x3F, (nibbles & 0x0F) | (scales >> 6 << 4)], dim=1)
    offset = torch.cat([offsets & 0x3F, (nibbles >> 4) | (offsets >> 6 << 4)], dim=1)
    return scale, offset


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    # in F32, multiplied by the block's factors; offsets are to be added
    scale, offset = six_bits(blocks)
    return read_half(blocks, 0) * scale, (read_half(blocks, 2) * offset).neg_()


E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each code, to keep them integers; the scales are halved."""


def mxfp4(blocks: Tensor) -> Tensor:
    values = _e2m1(unpack_planes(blocks[:, 1:], 4))
    return scaled(values, _scales(_power_of_two_scales(blocks.device), blocks[:, :1]))


def nvfp4(blocks: Tensor) -> Codes:
    """Read NVFP4: four parts of 16 elements, each with a scale."""
    values = _e2m1(unpack_planes(torch.unflatten(blocks[:, 4:], 1, (4, 8)), 4))
    return _scales(_e4m3_scales(blocks.device), blocks[:, :4]), values.flatten(1)


def _e2m1(codes: Tensor) -> Tensor:
    return look_up_pairs(code_pairs(E2M1_DOUBLED, codes.device), codes)


def _scales(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@cache
def _power_of_two_scales(device: torch.device) -> Tensor:
    # half of 2 ** (code - 127), built from its bits: the two smallest are subnormal
    code = torch.arange(256, dtype=torch.int32)
    bits = torch.where(code < 2, 0x00200000 << code.clamp(max=1), (code - 1) << 23)
    return bits.view(torch.float32).to(device)


@cache
def _e4m3_scales(device: torch.device) -> Tensor:
    # half of each unsigned float with four exponent bits (bias 7) and three mantissa bits; the NaN
    # 0x7F counts as zero, and the top bit is ignored
    code = torch.arange(256, dtype=torch.int32)
    exponent, mantissa = code >> 3 & 0x0F, code & 0x07
    significand = torch.where(exponent == 0, mantissa, mantissa + 8).to(torch.float32)
    scale = torch.ldexp(significand, exponent.clamp(min=1) - 7 - 3 - 1)
    return torch.where(code == 0x7F, 0.0, scale).to(device)


def plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that reads blocks consisting of a single number of `dtype`."""

    def dequantise_blocks(blocks: Tensor) -> Tensor:
        numbers = blocks.clone(memory_format=torch.contiguous_format).view(dtype)
        return numbers.to(torch.float32)

    return dequantise_blocks


def tq1_0(blocks: Tensor) -> Codes:
    """Read TQ1_0: five base-3 digits per byte (four in the last bytes), as fractions of 256."""
    parts = (_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4))
    return read_half(blocks, 52), torch.cat(parts, dim=1)


def tq2_0(blocks: Tensor) -> Codes:
    codes = unpack_planes(torch.unflatten(blocks[:, :64], 1, (2, 32)), 2).view(torch.int8)
    return read_half(blocks, 64), codes.sub_(1).flatten(1)


def q1_0(blocks: Tensor) -> Codes:
    """Read Q1_0: a set bit is +scale, a clear one -scale."""
    values = look_up(signs(blocks.device), ~blocks[:, 2:])
    return read_half(blocks, 0), values


def q2_0(blocks: Tensor) -> Codes:
    """Read Q2_0: codes 0 to 3 are -1, 0, 1 and 2 times the scale."""
    values = look_up(two_bit_codes(-1, blocks.device), blocks[:, 2:])
    return read_half(blocks, 0), values


def _trits(packed: Tensor, n_digits: int) -> Tensor:
    # int8 (n_blocks, n_digits * w), place by place. Multiplying by a power of three moves a digit
    # to the front, as the bytes wrap; the leading digit is then the byte's third of 0..255.
    moved = torch.stack([packed * 3**place for place in range(n_digits)], dim=1).flatten(1)
    return (moved > 85).view(torch.int8) + (moved > 170).view(torch.int8) - 1
