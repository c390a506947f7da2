"""Idefics 3's tower, and SmolVLM's: SigLIP on tiles and on the whole picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.model.layers.linear import Linear
from engine.model.layers.module import Module
from engine.vision.encoders.base import WHOLE, TextModel, Tower, TowerSizes
from engine.vision.encoders.blocks import in_blocks
from engine.vision.encoders.siglip import SigLIP
from engine.vision.images.resizing import Resizing
from engine.vision.images.rule import PictureRule, TileTexts

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.layers.keys import Keys
    from engine.vision.encoders.operations import PictureOps

AROUND, WHOLE_PICTURE = "<fake_token_around_image>", "<global-img>"

TEXTS = TileTexts(
    "", f"{AROUND}<row_{{row}}_col_{{column}}>", "\n", f"\n{AROUND}{WHOLE_PICTURE}",
)  # fmt: skip
"""Texts around the tiles of a picture."""

LARGEST = 4096
"""Longest side to which a picture is brought, in pixels."""


class Idefics3Projector(Module):
    """Linear map of neighbouring patches to a token."""

    tensor_names: ClassVar = {"fc": "model.fc"}

    def __init__(self, n_in: int, n_out: int) -> None:
        self.fc = Linear(n_in, n_out, WHOLE)


class Idefics3Tower(Tower):
    """Tower of Idefics 3 (arXiv 2408.12637), and of SmolVLM and SmolVLM 2 (arXiv 2504.05299)."""

    architectures: ClassVar = ("llama",)

    def __init__(self, keys: Keys, text: TextModel) -> None:
        self.sizes = sizes = TowerSizes.read(keys, text.n_embd)
        self._merge = merge = keys.integer("vision.projector.scale_factor", 2)
        if sizes.n_side % merge or sizes.image % sizes.patch:
            raise keys.invalid(f"{sizes.n_side} patches in a row cannot be merged by {merge}")
        self.v = SigLIP(sizes)
        self.mm = Idefics3Projector(sizes.n_embd * merge**2, text.n_embd)
        longest = keys.integer("vision.preproc_image_size", 4 * sizes.image)
        self.rule = PictureRule(
            Resizing("lanczos", side=sizes.image, longest=min(longest, LARGEST)),
            merge * sizes.patch, sizes.mean, sizes.std,
            AROUND + WHOLE_PICTURE, AROUND, tiles=TEXTS,
        )  # fmt: skip

    def encode(self, pixels: Tensor, ops: PictureOps) -> Tensor:
        n = self.sizes.n_side
        squares = in_blocks(self.v(pixels, ops).reshape(n, n, -1), self._merge)
        return self.mm.fc(squares.reshape(-1, self.mm.fc.shape[1]))
