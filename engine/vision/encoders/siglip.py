"""SigLIP's vision transformer (arXiv 2303.15343): square images with learned positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.model.layers.linear import HeadLinear, Linear, Vector
from engine.model.layers.module import Module
from engine.model.layers.norm import LayerNorm, RMSNorm
from engine.model.sharding.placement import Shard
from engine.model.sharding.shares import Ranges
from engine.vision.encoders.base import (
    WHOLE,
    PatchEmbedding,
    TextModel,
    VisionBlock,
    VisionEncoder,
    VisionHParams,
    in_blocks,
    patches,
)
from engine.vision.images.resizing import ImageProcessor, Resizing, TileTexts

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.layers.keys import Keys
    from engine.vision.encoders.ops import VisionOps


class SigLIP(Module):
    """The vision transformer of Gemma 3, Idefics 3 and SmolVLM."""

    def __init__(self, sizes: VisionHParams) -> None:
        self.patch_embd = PatchEmbedding(sizes)
        self.position_embd = Vector((sizes.n_side**2, sizes.n_embd), WHOLE)
        self.blk = [VisionBlock(sizes) for _ in range(sizes.n_layer)]
        self.post_ln = LayerNorm(sizes.n_embd, sizes.eps, WHOLE)
        self._patch = sizes.patch

    def __call__(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        """Map normalised pixels (3, side, side) to (patches, n_embd)."""
        x = self.patch_embd(patches(pixels, self._patch).flatten(0, 1)) + self.position_embd()
        for block in self.blk:
            x = block(x, ops)
        return self.post_ln.apply(x, ops)


POOL = 4  # number of patches along each side of a token's square


class Gemma3Projector(Module):
    """Norm and projection of averaged patches; files store the matrix as (n_in, n_out)."""

    def __init__(self, sizes: VisionHParams) -> None:
        self.soft_emb_norm = RMSNorm(sizes.n_embd, sizes.eps, WHOLE)
        whole = Shard(0, Ranges(((0, 1),), 1))
        self.input_projection = HeadLinear(1, sizes.n_text, sizes.n_embd, whole)

    def __call__(self, x: Tensor, ops: VisionOps) -> Tensor:
        """Map x (tokens, n_embd) to (tokens, n_text)."""
        normed = self.soft_emb_norm.apply(x, ops)
        return self.input_projection(normed[:, None], transposed=True)[:, 0]


class Gemma3Encoder(VisionEncoder):
    """Encoder of Gemma 3 4B, 12B and 27B (arXiv 2503.19786), and of MedGemma."""

    architectures: ClassVar = ("gemma3",)

    def __init__(self, keys: Keys, text: TextModel) -> None:
        self.sizes = sizes = VisionHParams.read(keys, text.n_embd)
        if sizes.n_side % POOL:
            raise keys.invalid(
                "rows of {n} patches cannot be averaged in groups of {other}",
                n=sizes.n_side,
                other=POOL,
            )
        self.v = SigLIP(sizes)
        self.mm = Gemma3Projector(sizes)
        self.rule = ImageProcessor(
            Resizing("bilinear", side=sizes.n_side * sizes.patch), POOL * sizes.patch,
            sizes.mean, sizes.std,
            "\n\n<start_of_image>", "<end_of_image>\n\n", is_two_way=True,
        )  # fmt: skip

    def encode(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        x, n = self.v(pixels, ops), self.sizes.n_side // POOL
        squares = x.reshape(n, POOL, n, POOL, -1)
        return self.mm(squares.mean((1, 3)).flatten(0, 1), ops)


AROUND, WHOLE_IMAGE = "<fake_token_around_image>", "<global-img>"

TEXTS = TileTexts("", f"{AROUND}<row_{{row}}_col_{{column}}>", "\n", f"\n{AROUND}{WHOLE_IMAGE}")

MAX_SIDE = 4096  # maximum side of a resized image, in pixels


class Idefics3Projector(Module):
    """Linear map from adjacent patches to a token."""

    tensor_names: ClassVar = {"fc": "model.fc"}

    def __init__(self, n_in: int, n_out: int) -> None:
        self.fc = Linear(n_in, n_out, WHOLE)


class Idefics3Encoder(VisionEncoder):
    """Encoder of Idefics 3 (arXiv 2408.12637), and of SmolVLM and SmolVLM 2 (arXiv 2504.05299)."""

    architectures: ClassVar = ("llama",)

    def __init__(self, keys: Keys, text: TextModel) -> None:
        self.sizes = sizes = VisionHParams.read(keys, text.n_embd)
        self._merge = merge = keys.integer("vision.projector.scale_factor", 2)
        if sizes.n_side % merge or sizes.image % sizes.patch:
            raise keys.invalid(
                "rows of {n} patches cannot be merged in groups of {other}",
                n=sizes.n_side,
                other=merge,
            )
        self.v = SigLIP(sizes)
        self.mm = Idefics3Projector(sizes.n_embd * merge**2, text.n_embd)
        longest = keys.integer("vision.preproc_image_size", 4 * sizes.image)
        self.rule = ImageProcessor(
            Resizing("lanczos", side=sizes.image, longest=min(longest, MAX_SIDE)),
            merge * sizes.patch, sizes.mean, sizes.std,
            AROUND + WHOLE_IMAGE, AROUND, tiles=TEXTS,
        )  # fmt: skip

    def encode(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        n = self.sizes.n_side
        squares = in_blocks(self.v(pixels, ops).reshape(n, n, -1), self._merge)
        return self.mm.fc(squares.reshape(-1, self.mm.fc.shape[1]))
