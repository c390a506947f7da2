"""Blocks of some GGML types that hold small whole numbers times a scale, exactly."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from tests.bench.random_blocks import PLAIN, Bytes, encoded

LEAST, MOST = -8, 7
"""Range of the numbers: what the 4 bits of Q4_K hold."""

Numbers = NDArray[np.int8]


def blocks_of(kind: int, numbers: Numbers, scale: float) -> Bytes:
    """Return the rows of `numbers` times `scale` as bytes (n_rows, n_bytes).

    Raises:
        ValueError: no such blocks are known of this type.
    """
    if kind in PLAIN:
        return encoded(kind, numbers.astype(np.float32) * scale).reshape(len(numbers), -1)
    if kind not in (Kind.Q4_K, Kind.Q6_K):
        raise ValueError(f"whole numbers are not written as {Kind(kind).name}")
    blocks = numbers.reshape(-1, 256).view(np.uint8)
    written = _q4_k(blocks, scale) if kind == Kind.Q4_K else _q6_k(blocks, scale)
    return written.reshape(len(numbers), -1)


def _f16(n: int, *scales: float) -> Bytes:
    """Return n rows of the same F16 numbers."""
    return np.broadcast_to(np.array(scales, np.float16).view(np.uint8), (n, 2 * len(scales)))


def _q4_k(numbers: Bytes, scale: float) -> Bytes:
    """Return blocks whose eight scales are 1 and whose minima are 8, see llama.cpp's block_q4_K."""
    n = len(numbers)
    factors = np.array([1] * 4 + [8] * 4 + [0x81] * 4, np.uint8)  # six bits each
    codes = (numbers + np.uint8(8)).reshape(n, 4, 2, 32)
    packed = codes[:, :, 0] | codes[:, :, 1] << 4
    return np.hstack(
        (_f16(n, scale, scale), np.broadcast_to(factors, (n, 12)), packed.reshape(n, 128))
    )


def _q6_k(numbers: Bytes, scale: float) -> Bytes:
    """Return blocks whose sixteen scales are 1, see llama.cpp's block_q6_K."""
    n = len(numbers)
    codes = (numbers + np.uint8(32)).reshape(n, 2, 4, 32)
    low = codes & 15
    low = np.stack((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), 2)
    high = codes >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    ones = np.ones((n, 16), np.uint8)
    return np.hstack((low.reshape(n, 128), high.reshape(n, 64), ones, _f16(n, scale)))
