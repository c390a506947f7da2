"""Encoder of Pixtral and Mistral Small 3.1: images of any size, with a break token after each
row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.operands import RopeParams
from engine.model.layers.linear import Linear, Vector
from engine.model.layers.module import Module
from engine.model.layers.norm import RMSNorm
from engine.vision.encoders.base import (
    MLP,
    WHOLE,
    GatedBlock,
    PatchEmbedding,
    TextModel,
    VisionEncoder,
    VisionHParams,
    grid_places,
    in_blocks,
    patches,
    rotation,
)
from engine.vision.images.resizing import ImageProcessor, Resizing

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.layers.keys import Keys
    from engine.vision.encoders.ops import VisionOps

THETA = 10000.0  # default base of the encoder's RoPE


class Break(Module):
    """Embedding of the token that ends a row of patches."""

    def __init__(self, n_text: int) -> None:
        self.img_break = Vector((n_text,), WHOLE, ("", ".weight"))


class PixtralTransformer(Module):
    """The vision transformer of Pixtral."""

    def __init__(self, sizes: VisionHParams) -> None:
        self.patch_embd = PatchEmbedding(sizes)
        self.pre_ln = RMSNorm(sizes.n_embd, sizes.eps, WHOLE)
        self.blk = [GatedBlock(sizes) for _ in range(sizes.n_layer)]
        self.token_embd = Break(sizes.n_text)


class PixtralProjector(MLP):
    """MLP, preceded in Mistral Small 3.1 by a merger of `merge` × `merge` patches."""

    tensor_names: ClassVar = {"fc1": "1", "fc2": "2"}

    def __init__(self, sizes: VisionHParams, merge: int) -> None:
        n = sizes.n_embd
        super().__init__(n, sizes.n_text, sizes.n_text)
        self._merge = merge
        if merge > 1:
            self.input_norm = RMSNorm(n, sizes.eps, WHOLE)
            self.patch_merger = Linear(n * merge**2, n, WHOLE)

    def merged(self, x: Tensor, ops: VisionOps) -> Tensor:
        """Map x (rows, columns, n_embd) to the features (tokens, n_text) of its squares.

        The merger reads each square channel by channel.
        """
        if self._merge > 1:
            squares = in_blocks(self.input_norm.apply(x, ops), self._merge)
            by_channel = squares.reshape(-1, self._merge**2, squares.shape[-1]).transpose(1, 2)
            x = self.patch_merger(by_channel.flatten(1))
        return self(x.reshape(-1, self.fc1.shape[1]), ops)


class PixtralEncoder(VisionEncoder):
    """Encoder of Pixtral 12B (arXiv 2410.07073), Mistral Small 3.1 and later, and Ministral 3."""

    architectures: ClassVar = ("llama", "mistral3", "mistral4", "deepseek2")

    def __init__(self, keys: Keys, text: TextModel) -> None:
        self.sizes = sizes = VisionHParams.read(keys, text.n_embd)
        sizes.check_rotation(keys)
        merge = keys.integer("vision.spatial_merge_size", 1)
        base = keys.number("rope.freq_base", THETA)
        rows = RopeParams(sizes.head_dim // 2, "norm", base)
        # frequencies alternate between the axes: rows get the even pairs, columns the odd ones
        self._axes = rows, replace(rows, scale=base ** (-2 / sizes.head_dim))
        self.v = PixtralTransformer(sizes)
        self.mm = PixtralProjector(sizes, merge)
        cell = merge * sizes.patch
        self.rule = ImageProcessor(
            Resizing("bicubic", factor=cell, longest=sizes.image), cell, sizes.mean, sizes.std,
            "", "[IMG_END]", has_breaks=True,
        )  # fmt: skip

    def encode(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        cut = patches(pixels, self.sizes.patch)
        rows, columns, _ = cut.shape
        x = self.v.pre_ln.apply(self.v.patch_embd(cut.flatten(0, 1)), ops)
        turn = rotation(self._axes, grid_places(rows, columns, x).flatten(0, 1), ops)
        for block in self.v.blk:
            x = block(x, ops, turn)
        features = self.mm.merged(x.reshape(rows, columns, -1), ops)
        n_rows = pixels.shape[1] // self.rule.cell
        lines = features.reshape(n_rows, -1)
        ends = self.v.token_embd.img_break().expand(n_rows, -1)
        return ops.concat(lines, ends).reshape(-1, self.sizes.n_text)[:-1]
