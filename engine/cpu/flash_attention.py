"""Attention of many tokens by torch's fused kernel, which never holds all scores.

It is FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.forward.state import KERNELS_STEP
from engine.ops.attention import hidden

if TYPE_CHECKING:
    from engine.forward.cache import LayerCache
    from engine.forward.operands import Scores


def serves(cache: LayerCache, scores: Scores, n_keys: int) -> bool:
    """Return whether torch's kernel can compute this attention.

    It has no soft cap, and needs keys as long as values, and few enough of them to hold in F32.
    """
    is_even = not cache.is_shared and cache.width == 2 * cache.head_dim_v * cache.n_row
    return is_even and not scores.softcap and n_keys * cache.width <= KERNELS_STEP.keys


def attend_fused(q: Tensor, cache: LayerCache, n_past: int, scores: Scores) -> Tensor:
    """Compute `Ops.attention`, without sinks and slopes."""
    first, stop = scores.first_visible(n_past), n_past + q.shape[0]
    k, v = cache.read(first, stop)
    is_hidden = None
    if first < n_past or scores.window or scores.chunk:
        is_hidden = hidden(scores, slice(n_past, stop), slice(first, stop), q.device)
    mask = None if is_hidden is None else ~is_hidden[:, 0]
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], mask,
        is_causal=mask is None and first == n_past, scale=scores.scale,
        enable_gqa=cache.n_row != q.shape[1],
    )  # fmt: skip
    return out[0].transpose(0, 1)
