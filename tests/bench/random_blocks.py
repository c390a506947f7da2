"""Valid blocks of any GGML type, made fast from random bytes without quantising anything.

Any bits of a block's codes are valid; only its scales must not be random.
"""

from __future__ import annotations

from functools import cache
from math import floor, log2, prod

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from engine.formats.gguf.tensors import TYPES, row_bytes
from engine.formats.quants.dequantise import dequantise

Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]

PLAIN = {Kind.F32: np.uint32, Kind.F16: np.uint16, Kind.BF16: np.uint16}
"""Unsigned integer type of the same size, for each type that holds one number per element."""

N_PLAIN = 1 << 16
"""Number of distinct values in matrices of the types in `PLAIN`."""

AT_START = ((0, 1.0),)
Q1_0, Q2_0 = 41, 42  # not in every version of gguf

F16_SCALES: dict[int, tuple[tuple[int, float], ...]] = {
    Kind.Q4_0: AT_START,
    Kind.Q5_0: AT_START,
    Kind.Q8_0: AT_START,
    Kind.IQ1_S: AT_START,
    Kind.IQ2_XXS: AT_START,
    Kind.IQ2_XS: AT_START,
    Kind.IQ2_S: AT_START,
    Kind.IQ3_XXS: AT_START,
    Kind.IQ3_S: AT_START,
    Kind.IQ4_NL: AT_START,
    Kind.IQ4_XS: AT_START,
    Kind.Q3_K: ((108, 1.0),),
    Kind.Q6_K: ((208, 1.0),),
    Kind.TQ1_0: ((52, 1.0),),
    Kind.TQ2_0: ((64, 1.0),),
    Q1_0: AT_START,
    Q2_0: AT_START,
    # the second number is added or taken off; its factor brings the mean to zero
    Kind.Q4_1: ((0, 1.0), (2, -7.5)),
    Kind.Q5_1: ((0, 1.0), (2, -15.5)),
    Kind.Q2_K: ((80, 1.0), (82, 1.5)),
    Kind.Q4_K: ((0, 1.0), (2, 7.5)),
    Kind.Q5_K: ((0, 1.0), (2, 15.5)),
}
"""Offset of each F16 scale in a block, and its factor relative to the first one, by type."""

KINDS: tuple[int, ...] = (*PLAIN, *F16_SCALES, Kind.IQ1_M, Kind.MXFP4, Kind.NVFP4)
"""All types of which random tensors can be made."""


def n_bytes(kind: int, shape: Shape) -> int:
    """Return the number of bytes of a tensor.

    Raises:
        ValueError: rows do not fill the blocks of this type.
    """
    return prod(shape[:-1]) * row_bytes(TYPES[kind], shape[-1])


def random_tensor(kind: int, shape: Shape, std: float, rng: np.random.Generator) -> Bytes:
    """Return a tensor of independent numbers with mean 0 and a deviation of about `std`."""
    size = n_bytes(kind, shape)
    if kind in PLAIN:
        return _plain(kind, size, std, rng)
    data = _random_bytes(size, rng)
    _set_scale(kind, data.reshape(-1, TYPES[kind].type_size), std / _unit_std(kind))
    return data


def encoded(kind: int, values: NDArray[np.float32]) -> Bytes:
    """Return the bytes of numbers in a type that holds one per element."""
    return np.frombuffer(gguf.quants.quantize(values, kind).tobytes(), np.uint8)


def _random_bytes(size: int, rng: np.random.Generator) -> Bytes:
    return rng.integers(0, 1 << 64, -(-size // 8), dtype=np.uint64).view(np.uint8)[:size]


def _plain(kind: int, size: int, std: float, rng: np.random.Generator) -> Bytes:
    """Return random picks from a table of normal numbers, which is faster than computing all."""
    table = encoded(kind, std * rng.standard_normal(N_PLAIN, dtype=np.float32)).view(PLAIN[kind])
    places = _random_bytes(2 * size // table.itemsize, rng).view(np.uint16)
    return table[places].view(np.uint8)


@cache
def _unit_std(kind: int) -> float:
    """Return the standard deviation of a type's weights at a scale of 1."""
    data = _random_bytes(1024 * TYPES[kind].type_size, np.random.default_rng(0))
    blocks = data.reshape(-1, TYPES[kind].type_size)
    _set_scale(kind, blocks, 1.0)
    return float(dequantise(torch.from_numpy(blocks), kind).std())


def _set_scale(kind: int, blocks: Bytes, scale: float) -> None:
    """Make weights proportional to `scale`, as far as the type can express it."""
    if kind == Kind.MXFP4:  # a power of two, E8M0
        blocks[:, 0] = 127 + floor(log2(scale))
    elif kind == Kind.NVFP4:  # the nearest one of seven bits, E4M3
        codes = np.arange(127)
        numbers = np.where(codes < 8, codes / 512, (8 + codes % 8) * 2.0 ** (codes // 8 - 10))
        blocks[:, :4] = np.abs(numbers - scale).argmin()
    elif kind == Kind.IQ1_M:  # F16, four bits each at the top of four numbers
        bits, numbers = int(np.float16(scale).view(np.uint16)), blocks[:, 48:].view(np.uint16)
        for i in range(4):
            numbers[:, i] = (numbers[:, i] & 0x0FFF) | ((bits >> 4 * i & 0xF) << 12)
    else:
        for offset, factor in F16_SCALES[kind]:
            number = np.array([factor * scale], np.float16)
            blocks[:, offset : offset + 2] = number.view(np.uint8)
