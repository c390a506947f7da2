"""Gemma 3's tower: SigLIP, whose patches are averaged 4 x 4 to 256 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.model.layers.linear import HeadLinear
from engine.model.layers.module import Module
from engine.model.layers.norm import RMSNorm
from engine.model.sharding.placement import Shard
from engine.model.sharding.ranges import Ranges
from engine.vision.encoders.base import WHOLE, TextModel, Tower, TowerSizes
from engine.vision.encoders.siglip import SigLIP
from engine.vision.images.resizing import Resizing
from engine.vision.images.rule import PictureRule

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.layers.keys import Keys
    from engine.vision.encoders.operations import PictureOps

POOL = 4
"""Number of patches along each side of the square that a token stands for."""


class Gemma3Projector(Module):
    """Norm and projection of averaged patches; files store the matrix as (n_in, n_out)."""

    def __init__(self, sizes: TowerSizes) -> None:
        self.soft_emb_norm = RMSNorm(sizes.n_embd, sizes.eps, WHOLE)
        whole = Shard(0, Ranges(((0, 1),), 1))
        self.input_projection = HeadLinear(1, sizes.n_text, sizes.n_embd, whole)

    def __call__(self, x: Tensor, ops: PictureOps) -> Tensor:
        """Map x (tokens, n_embd) to (tokens, n_text)."""
        normed = self.soft_emb_norm.apply(x, ops)
        return self.input_projection(normed[:, None], transposed=True)[:, 0]


class Gemma3Tower(Tower):
    """Tower of Gemma 3 4B, 12B and 27B (arXiv 2503.19786), and of MedGemma."""

    architectures: ClassVar = ("gemma3",)

    def __init__(self, keys: Keys, text: TextModel) -> None:
        self.sizes = sizes = TowerSizes.read(keys, text.n_embd)
        if sizes.n_side % POOL:
            raise keys.invalid(f"{sizes.n_side} patches in a row cannot be averaged by {POOL}")
        self.v = SigLIP(sizes)
        self.mm = Gemma3Projector(sizes)
        self.rule = PictureRule(
            Resizing("bilinear", side=sizes.n_side * sizes.patch), POOL * sizes.patch,
            sizes.mean, sizes.std,
            "\n\n<start_of_image>", "<end_of_image>\n\n", is_two_way=True,
        )  # fmt: skip

    def encode(self, pixels: Tensor, ops: PictureOps) -> Tensor:
        x, n = self.v(pixels, ops), self.sizes.n_side // POOL
        squares = x.reshape(n, POOL, n, POOL, -1)
        return self.mm(squares.mean((1, 3)).flatten(0, 1), ops)
