"""InternVL's encoder: InternViT on tiles and on the whole image, with 2 x 2 patches per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.model.layers.linear import Vector
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.layers.norm import LayerNorm, RMSNorm
from engine.vision.encoders.base import (
    MLP,
    WHOLE,
    PatchEmbedding,
    Rotation,
    TextModel,
    VisionBlock,
    VisionEncoder,
    VisionHParams,
    in_blocks,
    patches,
)
from engine.vision.images.resizing import ImageProcessor, Resizing, TileTexts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.model.forward.ops import Ops
    from engine.model.layers.keys import Keys
    from engine.vision.encoders.ops import VisionOps

MAX_TILES = 12  # default maximum number of tiles per image
EPS = 1e-5  # epsilon of the projector's norm


class ViTNorm(LayerNorm):
    """Layer norm, or RMS norm in files without a bias (InternViT 6B)."""

    is_centred = True

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        self.is_centred = f"{name}.bias" in source
        return super().bind(source, name)

    def apply(self, x: Tensor, ops: Ops) -> Tensor:
        if self.is_centred:
            return super().apply(x, ops)
        return ops.rms_norm(x, self.weight, None, self.eps)


class ViTBlock(VisionBlock):
    """Block with layer scale, and optional query and key norms."""

    norm_type = ViTNorm

    def __init__(self, sizes: VisionHParams) -> None:
        super().__init__(sizes)
        n = sizes.n_embd
        self.attn_q_norm, self.attn_k_norm = (
            RMSNorm(n, sizes.eps, WHOLE, optional=True) for _ in range(2)
        )
        self.ls1, self.ls2 = (Vector((n,), WHOLE) for _ in range(2))

    def attended(
        self, x: Tensor, ops: VisionOps, turn: Rotation | None, windows: Sequence[int]
    ) -> Tensor:
        return super().attended(x, ops, turn, windows) * self.ls1()

    def projected(self, x: Tensor, ops: VisionOps) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x, ops)
        if self.attn_q_norm.is_absent:
            return q, k, v
        return self.attn_q_norm.apply(q, ops), self.attn_k_norm.apply(k, ops), v

    def fed(self, x: Tensor, ops: VisionOps) -> Tensor:
        return self.ffn_down(ops.gelu_erf(self.ffn_up(x))) * self.ls2()


class InternViT(Module):
    """The vision transformer of InternVL, with a class token before the patches."""

    def __init__(self, sizes: VisionHParams) -> None:
        self.patch_embd = PatchEmbedding(sizes)
        self.class_embd = Vector((sizes.n_embd,), WHOLE, ("", ".weight"))
        self.position_embd = Vector((sizes.n_side**2 + 1, sizes.n_embd), WHOLE)
        self.blk = [ViTBlock(sizes) for _ in range(sizes.n_layer)]
        self._patch = sizes.patch

    def __call__(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        """Map normalised pixels (3, side, side) to (patches, n_embd)."""
        embedded = self.patch_embd(patches(pixels, self._patch).flatten(0, 1))
        x = ops.joined(self.class_embd()[None], embedded) + self.position_embd()
        for block in self.blk:
            x = block(x, ops)
        return x[1:]


class InternVLProjector(MLP):
    """MLP after a norm over adjacent patches."""

    tensor_names: ClassVar = {
        "norm": "model.mlp.0", "fc1": "model.mlp.1", "fc2": "model.mlp.3",
    }  # fmt: skip

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, n_out)
        self.norm = LayerNorm(n_in, EPS, WHOLE)

    def __call__(self, x: Tensor, ops: VisionOps) -> Tensor:
        return super().__call__(self.norm.apply(x, ops), ops)


class InternVLEncoder(VisionEncoder):
    """Encoder of InternVL 1.5 to 3.5 (arXiv 2404.16821 and 2504.10479)."""

    architectures: ClassVar = ("qwen2", "qwen3", "qwen3moe", "llama", "internlm2", "gpt-oss")

    def __init__(self, keys: Keys, text: TextModel) -> None:
        self.sizes = sizes = VisionHParams.read(keys, text.n_embd)
        self._merge = merge = keys.integer("vision.projector.scale_factor", 2)
        if sizes.n_side % merge or sizes.image % sizes.patch:
            raise keys.invalid(
                "rows of {n} patches cannot be merged in groups of {other}",
                n=sizes.n_side,
                other=merge,
            )
        least = keys.integer("vision.preproc_min_tiles", 1)
        most = keys.integer("vision.preproc_max_tiles", MAX_TILES)
        if not least <= most:
            raise keys.invalid("its minimum and maximum numbers of tiles contradict each other")
        self.v = InternViT(sizes)
        self.mm = InternVLProjector(sizes.n_embd * merge**2, text.n_embd)
        self.rule = ImageProcessor(
            Resizing("bicubic", side=sizes.image, least_tiles=least, most_tiles=most),
            merge * sizes.patch, sizes.mean, sizes.std,
            "<img>", "</img>", tiles=TileTexts("<img>"),
        )  # fmt: skip

    def encode(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        n = self.sizes.n_side
        squares = in_blocks(self.v(pixels, ops).reshape(n, n, -1), self._merge)
        return self.mm(squares.reshape(-1, self.mm.fc1.shape[1]), ops)
