"""Dequantises rows of all supported GGML types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.formats.gguf.tensors import TYPES
from engine.formats.quants import block_formats, iquants
from engine.formats.quants.block_formats import Codes, plain, weight_reader

# Elements to dequantise at a time. On a CPU, intermediate bytes then stay in its caches; elsewhere
# a step must be long enough to hide its launch, and memory limits it.
_CPU_CHUNK = 1 << 20
_DEVICE_CHUNK = 1 << 25


@dataclass(frozen=True, slots=True)
class Quant:
    """A GGML type that can be dequantised.

    Attributes:
        name: GGML's name.
        block_size: number of elements of a block.
        type_size: bytes of a block.
        dequantise_blocks: reader uint8 (n_blocks, type_size) -> float32 (n_blocks, block_size).
        codes_of: reader of the blocks as scales and whole numbers of at most 16 values, for types
            that kernels read only after this conversion; else None.
    """

    name: str
    block_size: int
    type_size: int
    dequantise_blocks: Callable[[Tensor], Tensor]
    codes_of: Callable[[Tensor], Codes] | None = None


_READERS: dict[int, Callable[[Tensor], Tensor]] = {
    Kind.F32: plain(torch.float32),
    Kind.F16: plain(torch.float16),
    Kind.BF16: plain(torch.bfloat16),
    Kind.F64: plain(torch.float64),
    Kind.I8: plain(torch.int8),
    Kind.I16: plain(torch.int16),
    Kind.I32: plain(torch.int32),
    Kind.I64: plain(torch.int64),
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
    Kind.IQ4_NL: iquants.iq4_nl,
    Kind.IQ4_XS: iquants.iq4_xs,
    Kind.MXFP4: block_formats.mxfp4,
}

_CODED: dict[int, Callable[[Tensor], Codes]] = {
    Kind.IQ2_XXS: iquants.iq2_xxs,
    Kind.IQ2_XS: iquants.iq2_xs,
    Kind.IQ2_S: iquants.iq2_s,
    Kind.IQ3_XXS: iquants.iq3_xxs,
    Kind.IQ3_S: iquants.iq3_s,
    Kind.IQ1_S: iquants.iq1_s,
    Kind.IQ1_M: iquants.iq1_m,
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
    """Return stored rows as numbers, on the device of `raw`.

    Args:
        raw: rows of whole blocks, uint8 (..., row bytes).
        type_number: GGML type, a key of `QUANTS`.
        out: contiguous tensor (..., elements) of any float type to fill and return. Reusing one
            saves the page faults of a new one, which cost more than the arithmetic.

    Returns:
        Numbers, float32 (..., elements), or `out`; they share no memory with `raw`.

    Raises:
        ValueError: the type is unknown, `raw` is not bytes, a block is cut, or `out` does not fit.
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
    """Dequantise blocks into `out` chunk by chunk, with bounded extra memory."""
    chunk = _chunk(quant, blocks.device)
    for part, result in zip(torch.split(blocks, chunk), torch.split(out, chunk), strict=True):
        result.copy_(quant.dequantise_blocks(part))
