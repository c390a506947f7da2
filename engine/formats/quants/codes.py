"""Converts rows of types without planes of their own into codes and scales that can be packed.

A block of 32 columns becomes 32 bytes, each the code of a number (its index in the layout's table,
or the number plus `zero`), followed by the block's scales, one or two of F32 or F16. Nothing is
rounded.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine.formats.quants.dequantise import QUANTS, Quant
from engine.formats.quants.layout import BLOCK, CODED, SCALE_BYTES, Layout

CHUNK = 1 << 18
"""Number of weights to convert at a time, so that intermediate results stay in a core's cache."""


def coded_rows(raw: Tensor, type_number: int) -> Tensor:
    """Return rows of a file as codes and scales, in the form that `pack` reads.

    Args:
        raw: rows of whole blocks, uint8 (n_rows, row bytes), on the CPU.
        type_number: GGML type, a key of `CODED`.

    Returns:
        uint8 (n_rows, bytes of its blocks of 32 columns), 1.06 to 1.25 for each weight.
    """
    quant, layout = QUANTS[type_number], CODED[type_number]
    blocks = raw.reshape(-1, quant.type_size)
    n_scale = BLOCK // layout.sub * SCALE_BYTES[layout.scale]
    out = torch.empty(len(blocks), quant.block_size // BLOCK, BLOCK + n_scale, dtype=torch.uint8)
    n = CHUNK // quant.block_size
    for part, goal in zip(torch.split(blocks, n), torch.split(out, n), strict=True):
        codes, scales = codes_and_scales(part, quant, layout)
        goal[..., :BLOCK] = torch.unflatten(codes, 1, (-1, BLOCK))
        goal[..., BLOCK:] = torch.unflatten(scales, 1, (-1, n_scale))
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
    """Return the code of each number in the planes: int8 -> uint8."""
    if not layout.table:
        return (numbers + layout.zero).view(torch.uint8)
    pairs = numbers.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    found = _code_pairs(layout.table, numbers.device).index_select(0, pairs.reshape(-1))
    return found.view(torch.uint8).view(numbers.shape)


@cache
def _code_pairs(table: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a table of the codes of two adjacent numbers, by their 16 bits."""
    codes = torch.zeros(256, dtype=torch.int32)
    for code, number in reversed(list(enumerate(table))):
        codes[number & 0xFF] = code
    return (codes + (codes[:, None] << 8)).flatten().to(device, torch.int16)
