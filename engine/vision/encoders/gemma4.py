"""Gemma 4's encoders: a transformer with 3 x 3 average pooling, and a single patch embedding
(12B)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.operands import RopeParams
from engine.model.layers.linear import Linear, Vector
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.layers.norm import LayerNorm, RMSNorm
from engine.vision.encoders.base import (
    N_CHANNELS,
    WHOLE,
    GatedBlock,
    PatchEmbedding,
    Rotation,
    TextModel,
    VisionEncoder,
    VisionHParams,
    grid_places,
    patches,
    rotation,
)
from engine.vision.images.resizing import ImageProcessor, Resizing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.model.layers.keys import Keys
    from engine.vision.encoders.ops import VisionOps

THETA = 100.0  # base of the encoder's RoPE
POOL = 3  # default number of patches along each side of a token's square
MAX_TOKENS = 280  # default maximum number of tokens per image
EPS = 1e-5  # epsilon of the patch norms; not in files

BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Names of the bounds on a matrix's inputs and outputs."""


class ClampedLinear(Linear):
    """Linear map with clamped inputs and outputs, if the file has bounds."""

    input_min: Tensor | None = None
    input_max: Tensor | None = None
    output_min: Tensor | None = None
    output_max: Tensor | None = None

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        slots = super().bind(source, name)
        if f"{name}.{BOUNDS[0]}" in source:
            for bound in BOUNDS:
                tensor = source.get(f"{name}.{bound}", (1,))
                slots.append(Slot(self, bound, tensor, WHOLE, is_matrix=False))
        return slots

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (T, n_in) to (T, n_out)."""
        if self.input_min is None:
            return super().__call__(x)
        y = super().__call__(x.clamp(self.input_min, self.input_max))
        return y.clamp(self.output_min, self.output_max)


class Gemma4VisionBlock(GatedBlock):
    """Block with pre- and post-norms, and norms of query, key and value heads."""

    linear_type = ClampedLinear

    def __init__(self, sizes: VisionHParams) -> None:
        super().__init__(sizes)
        self.attn_q_norm, self.attn_k_norm = (
            RMSNorm(sizes.head_dim, sizes.eps, WHOLE) for _ in range(2)
        )
        self._v_norm = RMSNorm(sizes.head_dim, sizes.eps, WHOLE, affine=False)
        self.attn_post_norm, self.ffn_post_norm = (
            RMSNorm(sizes.n_embd, sizes.eps, WHOLE) for _ in range(2)
        )

    def attended(
        self, x: Tensor, ops: VisionOps, turn: Rotation | None, windows: Sequence[int]
    ) -> Tensor:
        return self.attn_post_norm.apply(super().attended(x, ops, turn, windows), ops)

    def projected(self, x: Tensor, ops: VisionOps) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the normed stream x, each (T, n_embd).

        Scores are unscaled, so queries undo the scaling of attention. The first half of a head
        rotates by column and the other by row, each with its own pairs, so queries and keys are
        reordered to let a single rotation cover both.
        """
        q, k, v = (part.reshape(len(x), self.n_head, -1) for part in super().projected(x, ops))
        q = self.attn_q_norm.apply(q, ops) * q.shape[-1] ** 0.5
        q, k = (_with_pairs_apart(part) for part in (q, self.attn_k_norm.apply(k, ops)))
        return q.flatten(1), k.flatten(1), self._v_norm.apply(v, ops).flatten(1)

    def fed(self, x: Tensor, ops: VisionOps) -> Tensor:
        return self.ffn_post_norm.apply(super().fed(x, ops), ops)


def _with_pairs_apart(x: Tensor) -> Tensor:
    """Return x (T, n_head, head_dim) with the first elements of both halves' pairs first."""
    return x.reshape(*x.shape[:2], 2, 2, -1).transpose(-3, -2).flatten(-3)


class PlaceTables(Module):
    """Learned positions: tables by column and by row, (2, n, n_embd), for at least `most`
    patches."""

    value: Tensor | None = None

    def __init__(self, n_embd: int, most: int) -> None:
        self._n_embd, self._most = n_embd, most

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        tensor = source.tensors.get(f"{name}.weight")
        n = tensor.shape[-2] if tensor is not None and len(tensor.shape) == 3 else 0
        table = source.get(f"{name}.weight", (2, max(n, self._most), self._n_embd))
        return [Slot(self, "value", table, WHOLE, is_matrix=False)]

    def __call__(self, places: Tensor) -> Tensor:
        """Return the positions of patches at places (rows, columns, 2): (rows × columns, n)."""
        assert self.value is not None, "not loaded"
        rows, columns = places.flatten(0, 1).unbind(-1)
        return self.value[0, columns] + self.value[1, rows]


class Gemma4Transformer(Module):
    """The vision transformer of Gemma 4."""

    def __init__(self, sizes: VisionHParams, most: int) -> None:
        self.patch_embd = PatchEmbedding(sizes)
        self.position_embd = PlaceTables(sizes.n_embd, most)
        self.blk = [Gemma4VisionBlock(sizes) for _ in range(sizes.n_layer)]
        self.std_bias, self.std_scale = (
            Vector((sizes.n_embd,), WHOLE, ("", ".weight"), optional=True) for _ in range(2)
        )


class Gemma4Projector(Module):
    """A norm without weights, and a projection."""

    def __init__(self, sizes: VisionHParams) -> None:
        self._norm = RMSNorm(sizes.n_embd, sizes.eps, WHOLE, affine=False)
        self.input_projection = Linear(sizes.n_embd, sizes.n_text, WHOLE)

    def __call__(self, x: Tensor, ops: VisionOps) -> Tensor:
        """Map x (tokens, n_embd) to (tokens, n_text)."""
        return self.input_projection(self._norm.apply(x, ops))


def gemma4_rule(keys: Keys, sizes: VisionHParams, cell: int, text: TextModel) -> ImageProcessor:
    """Return the image processor of Gemma 4.

    In the models with per-layer inputs (E2B, E4B), image tokens use causal attention; in the others
    they attend to each other in sliding-window layers. Files do not state this.

    Raises:
        InvalidGGUF: the file's maximum image size is smaller than a token.
    """
    most = keys.integer("vision.image_max_pixels", MAX_TOKENS * cell * cell)
    if most < cell * cell:
        raise keys.invalid("its maximum image size is smaller than one token")
    is_two_way = not text.has_layer_inputs
    return ImageProcessor(
        Resizing("bicubic", factor=cell, most=most, fills=True), cell, sizes.mean, sizes.std,
        "\n\n<|image>", "<image|>\n\n", is_two_way=is_two_way, only_in_windows=is_two_way,
    )  # fmt: skip


class Gemma4Encoder(VisionEncoder):
    """Encoder of Gemma 4 E2B, E4B, 26B and 31B (Google 2026)."""

    architectures: ClassVar = ("gemma4",)

    def __init__(self, keys: Keys, text: TextModel) -> None:
        self.sizes = sizes = VisionHParams.read(keys, text.n_embd)
        sizes.check_rotation(keys)
        self._pool = pool = keys.integer("vision.projector.scale_factor", POOL)
        self.rule = rule = gemma4_rule(keys, sizes, pool * sizes.patch, text)
        self.v = Gemma4Transformer(sizes, rule.most_tokens * pool)
        self.mm = Gemma4Projector(sizes)

    def encode(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        cut = patches(2 * pixels - 1, self.sizes.patch)
        rows, columns, _ = cut.shape
        x = self.v.patch_embd(cut.flatten(0, 1))
        places = grid_places(rows, columns, x)
        x = x + self.v.position_embd(places)
        axis = RopeParams(self.sizes.head_dim // 2, "neox", THETA)
        turn = rotation((axis, axis), places.flip(-1).flatten(0, 1), ops)
        for block in self.v.blk:
            x = block(x, ops, turn)
        n = self._pool
        squares = x.reshape(rows // n, n, columns // n, n, -1)
        return self.mm(self._standard(squares.mean((1, 3)).flatten(0, 1)), ops)

    def _standard(self, x: Tensor) -> Tensor:
        x = x * x.shape[-1] ** 0.5
        if self.v.std_bias.value is None or self.v.std_scale.value is None:
            return x
        return (x - self.v.std_bias.value) * self.v.std_scale.value


class PatchNorms(Module):
    """Norms for patches: of their pixels, of their embeddings, and after adding positions."""

    tensor_names: ClassVar = {"pixels": "1", "embedded": "2", "placed": "3"}

    def __init__(self, n_pixels: int, n_embd: int) -> None:
        self.pixels = LayerNorm(n_pixels, EPS, WHOLE)
        self.embedded, self.placed = (LayerNorm(n_embd, EPS, WHOLE) for _ in range(2))


class LargePatches(Module):
    """Patch embedding without a transformer."""

    def __init__(self, sizes: VisionHParams, most: int) -> None:
        n_pixels = N_CHANNELS * sizes.patch**2
        self.patch_norm = PatchNorms(n_pixels, sizes.n_embd)
        self.patch_embd = Linear(n_pixels, sizes.n_embd, WHOLE)
        self.position_embd = PlaceTables(sizes.n_embd, most)

    def __call__(self, cut: Tensor, ops: VisionOps) -> Tensor:
        """Map patches (rows, columns, 3 × patch²) to (rows × columns, n_embd)."""
        norms = self.patch_norm
        x = self.patch_embd(norms.pixels.apply(cut.flatten(0, 1), ops))
        x = norms.embedded.apply(x, ops)
        rows, columns, _ = cut.shape
        x = x + self.position_embd(grid_places(rows, columns, x))
        return norms.placed.apply(x, ops)


class Gemma4UnifiedEncoder(VisionEncoder):
    """Gemma 4 12B's replacement for an encoder: each token is a large patch."""

    architectures: ClassVar = ("gemma4",)

    def __init__(self, keys: Keys, text: TextModel) -> None:
        small = VisionHParams.read(keys, text.n_embd, has_blocks=False)
        patch = small.patch * keys.integer("vision.projector.scale_factor", POOL)
        self.sizes = sizes = replace(small, patch=patch)
        self.rule = rule = gemma4_rule(keys, sizes, patch, text)
        self.v = LargePatches(sizes, rule.most_tokens)
        self.mm = Gemma4Projector(sizes)

    def encode(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        return self.mm(self.v(patches(pixels, self.sizes.patch), ops), ops)
