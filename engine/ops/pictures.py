"""Operations of encoders of pictures, in plain torch in F32 on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, interpolate, scaled_dot_product_attention

from engine.errors import Cancelled
from engine.ops.reference import ReferenceOps
from engine.progress import IsCancelled, never
from engine.towers.footprint import most_queries
from engine.towers.operations import PictureOps

if TYPE_CHECKING:
    from collections.abc import Sequence


class TorchPictureOps(ReferenceOps, PictureOps):
    """The reference operations, and attention without a cache.

    Its scores are computed for some queries at a time, so that they never all exist.

    Attributes:
        is_cancelled: asked before each of these times; returning True ends the work.

    Raises:
        Cancelled: (attention) the work was cancelled.
    """

    is_cancelled: IsCancelled = staticmethod(never)

    def attend_all(self, q: Tensor, k: Tensor, v: Tensor, windows: Sequence[int] = ()) -> Tensor:
        if windows:
            cut = zip(*(x.split_with_sizes(list(windows)) for x in (q, k, v)), strict=True)
            return torch.cat([self.attend_all(*window) for window in cut])
        n, n_head, _ = q.shape
        step = most_queries(n, n_head)
        keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        parts = list[Tensor]()
        for start in range(0, n, step):
            if self.is_cancelled():
                raise Cancelled
            queries = q[start : start + step].transpose(0, 1)[None]
            parts.append(scaled_dot_product_attention(queries, keys, values)[0].transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def stretched(self, grid: Tensor, rows: int, columns: int) -> Tensor:
        channels = grid.permute(2, 0, 1)[None]
        resized = interpolate(channels, (rows, columns), mode="bilinear", align_corners=True)
        return resized[0].permute(1, 2, 0)

    def joined(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts)

    def gelu_erf(self, x: Tensor) -> Tensor:
        return gelu(x)
