"""Random blocks of GGML types, with any bits at all, and a comparison of what they mean."""

import numpy as np
from numpy.typing import NDArray

from engine.formats.quants.dequantise import Quant


def random_rows(quant: Quant, *shape: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return random bytes (..., shape[-1] blocks of bytes)."""
    size = (*shape[:-1], shape[-1] * quant.type_size)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def assert_same_bits(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    """Check equality bit for bit, signed zeros included; any NaN equals any NaN."""
    assert got.dtype == wanted.dtype == np.float32
    assert got.shape == wanted.shape
    same = (got.view(np.int32) == wanted.view(np.int32)) | (np.isnan(got) & np.isnan(wanted))
    assert same.all(), (
        f"{(~same).sum()} of {same.size} differ, the first at {np.argwhere(~same)[0]}"
    )
