"""SigLIP's vision transformer (arXiv 2303.15343): squares with learned positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.layers.linear import Vector
from engine.model.layers.module import Module
from engine.model.layers.norm import LayerNorm
from engine.vision.encoders.base import WHOLE, TowerSizes
from engine.vision.encoders.blocks import PatchEmbedding, TowerBlock, patches

if TYPE_CHECKING:
    from torch import Tensor

    from engine.vision.encoders.operations import PictureOps


class SigLIP(Module):
    """The vision transformer of Gemma 3, Idefics 3 and SmolVLM."""

    def __init__(self, sizes: TowerSizes) -> None:
        self.patch_embd = PatchEmbedding(sizes)
        self.position_embd = Vector((sizes.n_side**2, sizes.n_embd), WHOLE)
        self.blk = [TowerBlock(sizes) for _ in range(sizes.n_layer)]
        self.post_ln = LayerNorm(sizes.n_embd, sizes.eps, WHOLE)
        self._patch = sizes.patch

    def __call__(self, pixels: Tensor, ops: PictureOps) -> Tensor:
        """Map normalised pixels (3, side, side) to (patches, n_embd)."""
        x = self.patch_embd(patches(pixels, self._patch).flatten(0, 1)) + self.position_embd()
        for block in self.blk:
            x = block(x, ops)
        return self.post_ln.apply(x, ops)
