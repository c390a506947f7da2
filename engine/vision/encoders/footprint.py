"""Bytes of a tower's weights and of its work on the largest picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.vision.encoders.base import Tower

MOST_SCORES = 1 << 25
"""Largest number of attention scores that exist at once."""

F32_BYTES = 4

STORAGE = "packed"
"""Form of a tower's matrices, see `engine.planning.plan.DevicePlan`: as in the file, dequantised on
each use, which takes little beside a product with the thousands of patches of a picture."""

UNPACK_BYTES = 2 * F32_BYTES * (1 << 22)
"""Bytes that dequantising a packed matrix in chunks takes."""


def most_queries(n: int, n_head: int) -> int:
    """Return for how many of n patches attention computes scores at once."""
    return max(1, min(n, MOST_SCORES // (n * n_head)))


def work_bytes(tower: Tower) -> int:
    """Estimate the working memory of the largest picture, in bytes.

    The residual stream, its norm and the largest part count: attention or the FFN.
    """
    sizes = tower.sizes
    n = tower.rule.resizing.most_pixels // (sizes.patch * sizes.patch)
    scores = most_queries(n, sizes.n_head) * n * sizes.n_head if sizes.n_head else 0
    attention = n * 5 * sizes.n_embd + 2 * scores
    parts = max(attention, n * 3 * sizes.n_ff)
    return F32_BYTES * (n * 3 * sizes.n_embd + parts) + UNPACK_BYTES
