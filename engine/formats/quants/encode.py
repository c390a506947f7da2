"""Quantises numbers to GGML blocks for the KV cache, bit-identical to the gguf package.

A block of either type has an F16 scale d, then 32 integers q. In Q8_0, these are signed bytes,
with x = d q; in Q4_0, they are nibbles, with x = d (q - 8), element j in the low half of byte j and
element j + 16 in the high half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.dequantise import QUANTS, Quant
from engine.formats.quants.layout import BLOCK, CODED, SCALE_BYTES, Layout


def quantise(x: Tensor, type_number: int) -> Tensor:
    """Return numbers as stored rows, uint8 (..., row bytes); the inverse of `dequantise`.

    Args:
        x: rows of whole blocks, float32 (..., elements).
        type_number: GGML type, a key of `WRITERS`.

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
    largest = blocks.abs().amax(1, keepdim=True)
    # divided by a tensor because CUDA turns division by a number into multiplication by 1 / 127
    scale = largest / torch.full_like(largest, 127)
    scaled = blocks * _inverse(scale)
    size = scaled.abs()
    whole = size.floor()
    whole += ((size - whole) * 2).floor_()  # halves away from zero
    codes = whole.copysign_(scaled).to(torch.int8)
    return torch.cat((_f16_bytes(scale), codes.view(torch.uint8)), dim=1)


def _q4_0(blocks: Tensor) -> Tensor:
    at = blocks.abs().argmax(1, keepdim=True)
    scale = blocks.gather(1, at) / -8
    codes = (blocks * _inverse(scale) + 8.5).to(torch.uint8).clamp_(max=15)
    low, high = codes.chunk(2, dim=1)
    return torch.cat((_f16_bytes(scale), low | high << 4), dim=1)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, scale.reciprocal())


def _f16_bytes(scale: Tensor) -> Tensor:
    return scale.to(torch.float16).view(torch.uint8)


WRITERS: Mapping[int, Callable[[Tensor], Tensor]] = MappingProxyType(
    {Kind.Q8_0: _q8_0, Kind.Q4_0: _q4_0}
)
"""Functions float32 (n_blocks, block_size) -> uint8 (n_blocks, type_size), by GGML type number."""


CHUNK = 1 << 18
"""Number of weights converted at a time, so that intermediate results stay in a core's cache."""


def coded_rows(raw: Tensor, type_number: int) -> Tensor:
    """Return rows from a file as codes and scales, the input for `pack`.

    Args:
        raw: rows of whole blocks, uint8 (n_rows, row bytes), on the CPU.
        type_number: GGML type, a key of `CODED`.

    Returns:
        uint8 (n_rows, bytes of the row's blocks of 32 columns), 1.06 to 1.25 bytes per weight.
    """
    quant, layout = QUANTS[type_number], CODED[type_number]
    blocks = raw.reshape(-1, quant.type_size)
    n_scale = BLOCK // layout.sub * SCALE_BYTES[layout.scale]
    out = torch.empty(len(blocks), quant.block_size // BLOCK, BLOCK + n_scale, dtype=torch.uint8)
    n = CHUNK // quant.block_size
    for part, target in zip(torch.split(blocks, n), torch.split(out, n), strict=True):
        codes, scales = codes_and_scales(part, quant, layout)
        target[..., :BLOCK] = torch.unflatten(codes, 1, (-1, BLOCK))
        target[..., BLOCK:] = torch.unflatten(scales, 1, (-1, n_scale))
    return out.view(len(raw), -1)


def codes_and_scales(blocks: Tensor, quant: Quant, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return codes and scales, each as bytes (n_blocks, …), on the device of the blocks."""
    assert quant.codes_of is not None, "types in CODED have codes"
    scales, numbers = quant.codes_of(blocks)
    kind = torch.float32 if layout.scale == "f32" else torch.float16
    n_sub = quant.block_size // layout.sub
    spread = scales.to(kind).repeat_interleave(n_sub // scales.shape[1], 1)
    return _codes(numbers, layout), spread.view(torch.uint8)


def _codes(numbers: Tensor, layout: Layout) -> Tensor:
    if not layout.table:
        return (numbers + layout.zero).view(torch.uint8)
    pairs = numbers.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    found = _code_pairs(layout.table, numbers.device).index_select(0, pairs.reshape(-1))
    return found.view(torch.uint8).view(numbers.shape)


@cache
def _code_pairs(table: tuple[int, ...], device: torch.device) -> Tensor:
    # the codes for two adjacent numbers, indexed by their 16 bits
    codes = torch.zeros(256, dtype=torch.int32)
    for code, number in reversed(list(enumerate(table))):
        codes[number & 0xFF] = code
    return (codes + (codes[:, None] << 8)).flatten().to(device, torch.int16)
