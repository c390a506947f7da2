"""Operations of vision encoders, in plain torch in F32 on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, interpolate, linear, scaled_dot_product_attention

from engine.errors import Cancelled
from engine.model.forward.ops import Ops
from engine.util.progress import IsCancelled, never
from engine.vision.images.placed import max_queries

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST_PATCHES = 256
"""Minimum number of patches for which attention is computed head by head with oneDNN."""

QUERIES = 512  # number of queries per head and step there; bounds the memory for the scores


def has_onednn(x: Tensor) -> bool:
    """Return whether oneDNN can multiply tensors like x."""
    has_it = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return x.device.type == "cpu" and has_it


def product(x: Tensor, w: Tensor) -> Tensor:
    """Return `x Wᵀ`, (T, n_out), for x (T, n_in) and W (n_out, n_in), both F32.

    On CPUs oneDNN computes it, because torch's `linear` uses MKL, which reaches less than half of
    oneDNN's speed in F32 on AMD processors.
    """
    if not has_onednn(x):
        return linear(x, w)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), w.contiguous(), None, "none", [], ""
    )
    return y


class VisionOps(Ops):
    """Operations on all patches of one image, including cacheless attention.

    Scores are computed for some queries at a time to save memory.

    Attributes:
        is_cancelled: checked before each such step; True cancels the work.

    Raises:
        Cancelled: (attention) the work was cancelled.
    """

    is_cancelled: IsCancelled = staticmethod(never)

    def attend_all(self, q: Tensor, k: Tensor, v: Tensor, windows: Sequence[int] = ()) -> Tensor:
        """Attend with q over k and v, all (T, n_head, head_dim), without a mask or a cache.

        Scores are divided by sqrt(head_dim). `windows` are the sizes of consecutive groups of
        patches that attend only to each other; () for full attention. Returns (T, n_head,
        head_dim).
        """
        if windows:
            cut = zip(*(x.split_with_sizes(list(windows)) for x in (q, k, v)), strict=True)
            return torch.cat([self.attend_all(*window) for window in cut])
        n, n_head, _ = q.shape
        if n >= FEWEST_PATCHES and has_onednn(q):
            return self._attend_by_heads(q, k, v)
        step = max_queries(n, n_head)
        keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        parts = list[Tensor]()
        for start in range(0, n, step):
            if self.is_cancelled():
                raise Cancelled
            queries = q[start : start + step].transpose(0, 1)[None]
            parts.append(scaled_dot_product_attention(queries, keys, values)[0].transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_by_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend head by head with oneDNN, which is faster than torch's attention."""
        n, n_head, head_dim = q.shape
        out = q.new_empty(n, n_head, v.shape[2])
        for head in range(n_head):
            keys, values = k[:, head] * head_dim**-0.5, v[:, head].T.contiguous()
            for start in range(0, n, QUERIES):
                if self.is_cancelled():
                    raise Cancelled
                part = slice(start, start + QUERIES)
                scores = product(q[part, head], keys)
                out[part, head] = product(torch.softmax(scores, -1, out=scores), values)
        return out

    def stretched(self, grid: Tensor, rows: int, columns: int) -> Tensor:
        """Resize a grid (n, n, channels) bilinearly, with aligned corners, to (rows, columns,
        channels)."""
        channels = grid.permute(2, 0, 1)[None]
        resized = interpolate(channels, (rows, columns), mode="bilinear", align_corners=True)
        return resized[0].permute(1, 2, 0)

    def joined(self, *parts: Tensor) -> Tensor:
        """Concatenate the parts along the first dimension."""
        return torch.cat(parts)

    def gelu_erf(self, x: Tensor) -> Tensor:
        """Apply exact GELU, with the error function."""
        return gelu(x)
