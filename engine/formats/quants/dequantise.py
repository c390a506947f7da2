"""Dequantises rows of all supported GGML types, and reads the IQ formats.

Codes in IQ formats index grids of four or eight magnitudes; signs are stored separately.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import IQ4_NL
from torch import Tensor

from engine.formats.gguf.tensors import TYPES
from engine.formats.quants import block_formats
from engine.formats.quants.block_formats import (
    Q_SUPER,
    Codes,
    bits,
    code_pairs,
    even_signs,
    grid,
    look_up,
    look_up_pairs,
    read_field,
    read_half,
    scaled,
    shifted_ternary_grid,
    signs,
    unpack_bytes,
    unpack_planes,
    weight_reader,
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
    signs = look_up(even_signs(blocks.device), codes >> 9 & 0x7F)
    scale = read_half(blocks, 0) * (0.5 + unpack_bytes(blocks[:, 66:], 4)) * 0.25
    return scale, _signed("IQ2_XS", codes & 0x1FF, signs)


def iq2_s(blocks: Tensor) -> Codes:
    codes = _extended(blocks[:, 2:34], unpack_bytes(blocks[:, 66:74], 2))
    negative = look_up(signs(blocks.device), blocks[:, 34:66])
    scale = read_half(blocks, 0) * (0.5 + unpack_bytes(blocks[:, 74:], 4)) * 0.25
    return scale, _signed("IQ2_S", codes, negative)


def iq3_xxs(blocks: Tensor) -> Codes:
    tail = read_field(blocks, 66, 98, torch.int32)
    scale = read_half(blocks, 0) * (0.5 + _top_nibble(tail)) * 0.5
    return scale, _signed("IQ3_XXS", blocks[:, 2:66], _sign_quads(tail))


def iq3_s(blocks: Tensor) -> Codes:
    ninth_bits = look_up(bits(blocks.device), blocks[:, 66:74])
    codes = _extended(blocks[:, 2:66], ninth_bits)
    negative = look_up(signs(blocks.device), blocks[:, 74:106])
    scale = read_half(blocks, 0) * (1 + 2 * unpack_bytes(blocks[:, 106:], 4))
    return scale, _signed("IQ3_S", codes, negative)


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
    """Return the stored codes as uint8 (n_blocks, 8, 2, 16)."""
    return unpack_planes(torch.unflatten(blocks[:, 8:], 1, (8, 16)), 4)


def iq4_xs_scales(blocks: Tensor) -> Tensor:
    """Return the scales for a block's eight parts: four low bits and two high bits, minus 32."""
    low, top = unpack_bytes(blocks[:, 4:8], 4), unpack_bytes(blocks[:, 2:4], 2)
    return low.add_(top, alpha=16).view(torch.int8).sub_(32)


def _signed(name: str, codes: Tensor, signs: Tensor) -> Tensor:
    magnitudes = look_up(grid(name, codes.device), codes)
    return magnitudes.mul_(signs)


def _eighths(codes: Tensor) -> Tensor:
    return look_up(shifted_ternary_grid(codes.device), codes)


def _nonlinear(codes: Tensor) -> Tensor:
    return look_up_pairs(code_pairs(IQ4_VALUES, codes.device), codes)


def _extended(low: Tensor, top: Tensor) -> Tensor:
    return low.to(torch.int16) | top.to(torch.int16) << 8


def _top_nibble(words: Tensor) -> Tensor:
    return words >> 28 & 0x0F


def _sign_quads(words: Tensor) -> Tensor:
    # the signs for the four 7-bit codes in each word, as int8 (n_blocks, 256)
    codes = torch.stack([words >> shift & 0x7F for shift in (0, 7, 14, 21)], dim=-1)
    table = even_signs(words.device)
    return look_up(table, codes.flatten(1)).view(-1, Q_SUPER)


def _scattered_half(words: Tensor) -> Tensor:
    # the top nibbles of four int16 words
    first, second, third, fourth = words.unbind(1)
    number = (first >> 12 & 0xF) | (second >> 8 & 0xF0) | (third >> 4 & 0xF00) | fourth & -0x1000
    return number.view(torch.float16).to(torch.float32).unsqueeze(1)


# Number of elements to dequantise at a time. On a CPU, intermediate bytes then stay in its caches;
# elsewhere, a step must be long enough to hide its launch, but must fit in memory.
_CPU_CHUNK = 1 << 20
_DEVICE_CHUNK = 1 << 25


@dataclass(frozen=True, slots=True)
class Quant:
    """A GGML type that can be dequantised.

    Attributes:
        dequantise_blocks: function uint8 (n_blocks, type_size) -> float32 (n_blocks, block_size).
        codes_of: function that reads blocks as scales and integers with at most 16 values, for
            types that kernels can read only after this conversion; else None.
    """

    name: str
    block_size: int
    type_size: int
    dequantise_blocks: Callable[[Tensor], Tensor]
    codes_of: Callable[[Tensor], Codes] | None = None


_READERS: dict[int, Callable[[Tensor], Tensor]] = {
    Kind.F32: block_formats.plain(torch.float32),
    Kind.F16: block_formats.plain(torch.float16),
    Kind.BF16: block_formats.plain(torch.bfloat16),
    Kind.F64: block_formats.plain(torch.float64),
    Kind.I8: block_formats.plain(torch.int8),
    Kind.I16: block_formats.plain(torch.int16),
    Kind.I32: block_formats.plain(torch.int32),
    Kind.I64: block_formats.plain(torch.int64),
    Kind.Q4_0: block_formats.q4_0,
    Kind.Q4_1: block_formats.q4_1,
    Kind.Q5_0: block_formats.q5_0,
    Kind.Q5_1: block_formats.q5_1,
    Kind.Q8_0: block_formats.q8_0,
    Kind.Q2_K: block_formats.q2_k,
    Kind.Q3_K: block_formats.q3_k,
    Kind.Q4_K: block_formats.q4_k,
    Kind.Q5_K: block_formats.q5_k,
    Kind.Q6_K: block_formats.q6_k,
    Kind.IQ4_NL: iq4_nl,
    Kind.IQ4_XS: iq4_xs,
    Kind.MXFP4: block_formats.mxfp4,
}

_CODED: dict[int, Callable[[Tensor], Codes]] = {
    Kind.IQ2_XXS: iq2_xxs,
    Kind.IQ2_XS: iq2_xs,
    Kind.IQ2_S: iq2_s,
    Kind.IQ3_XXS: iq3_xxs,
    Kind.IQ3_S: iq3_s,
    Kind.IQ1_S: iq1_s,
    Kind.IQ1_M: iq1_m,
    Kind.TQ1_0: block_formats.tq1_0,
    Kind.TQ2_0: block_formats.tq2_0,
    Kind.NVFP4: block_formats.nvfp4,
    41: block_formats.q1_0,
    42: block_formats.q2_0,
}


def _quant(number: int) -> Quant:
    info, codes_of = TYPES[number], _CODED.get(number)
    reader = _READERS[number] if codes_of is None else weight_reader(codes_of)
    return Quant(info.name, info.block_size, info.type_size, reader, codes_of)


QUANTS: Mapping[int, Quant] = MappingProxyType(
    {int(number): _quant(int(number)) for number in sorted({*_READERS, *_CODED})}
)
"""Types that can be dequantised, by GGML type number."""


def dequantise(raw: Tensor, type_number: int, out: Tensor | None = None) -> Tensor:
    """Return stored rows as float32 (..., elements), or fill `out`, on the device of `raw`.

    Args:
        raw: rows of whole blocks, uint8 (..., row bytes).
        type_number: GGML type, a key of `QUANTS`.
        out: contiguous tensor (..., elements) of any float type to fill and return. Reusing one
            avoids the page faults of a new tensor, which take longer than the arithmetic.

    Raises:
        ValueError: the type is unknown, `raw` is not uint8, a block is cut, or `out` does not fit.
    """
    quant = QUANTS.get(type_number)
    if quant is None:
        raise ValueError(f"GGML type {type_number} cannot be dequantised")
    shape = _result_shape(quant, raw)
    if out is not None and (out.shape != shape or not out.is_contiguous()):
        raise ValueError(f"{quant.name} needs a contiguous out of {shape}, not {tuple(out.shape)}")
    blocks = raw.reshape(raw.numel() // quant.type_size, quant.type_size)
    if out is None and len(blocks) <= _chunk(quant, raw.device):
        return quant.dequantise_blocks(blocks).view(shape)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=raw.device)
    _fill(out.view(len(blocks), quant.block_size), quant, blocks)
    return out


def _result_shape(quant: Quant, raw: Tensor) -> tuple[int, ...]:
    if raw.dtype != torch.uint8 or raw.dim() == 0 or raw.shape[-1] % quant.type_size:
        raise ValueError(
            f"{quant.name} rows are bytes in blocks of {quant.type_size}, "
            f"not {raw.dtype} of shape {tuple(raw.shape)}"
        )
    return (*raw.shape[:-1], raw.shape[-1] // quant.type_size * quant.block_size)


def _chunk(quant: Quant, device: torch.device) -> int:
    return (_CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK) // quant.block_size


def _fill(out: Tensor, quant: Quant, blocks: Tensor) -> None:
    # chunk by chunk, so that extra memory is bounded
    chunk = _chunk(quant, blocks.device)
    for part, result in zip(torch.split(blocks, chunk), torch.split(out, chunk), strict=True):
        result.copy_(quant.dequantise_blocks(part))
