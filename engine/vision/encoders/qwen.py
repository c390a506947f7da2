"""Qwen's encoders for images of any size: 2.5-VL, with windowed attention in most blocks; 3-VL and
3.5, with 2D RoPE and 2 x 2 patches per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.operands import RopeParams
from engine.model.layers.linear import Vector
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.layers.norm import LayerNorm, RMSNorm
from engine.vision.encoders.base import (
    MLP,
    WHOLE,
    GatedBlock,
    Rotation,
    TextModel,
    TwoFramePatches,
    VisionBlock,
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

THETA = 10000.0  # base of the encoder's RoPE

MIN_TOKENS, MAX_TOKENS = 64, 4096
"""Default bounds on the number of tokens per image. The minimum comes from the model's processor;
more than the maximum would take minutes and gigabytes."""


def rotation_in_blocks(
    sizes: VisionHParams, rows: int, columns: int, merge: int, like: Tensor, ops: VisionOps
) -> Rotation:
    """Return the rotation of all patches, grouped by token."""
    axis = RopeParams(sizes.head_dim // 2, "neox", THETA)
    return rotation((axis, axis), in_blocks(grid_places(rows, columns, like), merge), ops)


def qwen_rule(keys: Keys, sizes: VisionHParams, merge: int, least_tokens: int) -> ImageProcessor:
    """Return the image processor for images of any size, with merge² patches per token.

    Raises:
        InvalidGGUF: the file's bounds on image sizes contradict each other.
    """
    cell = merge * sizes.patch
    least = keys.integer("vision.image_min_pixels", least_tokens * cell * cell)
    most = keys.integer("vision.image_max_pixels", MAX_TOKENS * cell * cell)
    if not cell * cell <= least <= most:
        raise keys.invalid("its minimum and maximum image sizes contradict each other")
    return ImageProcessor(
        Resizing("bicubic", factor=cell, least=least, most=most), cell, sizes.mean, sizes.std,
        "<|vision_start|>", "<|vision_end|>", has_places=True,
    )  # fmt: skip


class Merger(MLP):
    """MLP that merges adjacent patches into a token."""

    tensor_names: ClassVar = {"fc1": "0", "fc2": "2"}

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_in, n_out)


class DeepMerger(Merger):
    """Merger of the residual stream after one of the blocks, with its own norm."""

    tensor_names: ClassVar = {}

    def __init__(self, n_in: int, n_out: int, eps: float) -> None:
        super().__init__(n_in, n_out)
        self.norm = LayerNorm(n_in, eps, WHOLE)

    def __call__(self, x: Tensor, ops: VisionOps) -> Tensor:
        return super().__call__(self.norm.apply(x, ops), ops)


class Deepstack(Module):
    """Mergers by the index of the block after which they read."""

    def __init__(self, mergers: dict[int, DeepMerger]) -> None:
        self.mergers = mergers

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        return [
            slot
            for layer, merger in self.mergers.items()
            for slot in merger.bind(source, f"{name}.{layer}")
        ]


class GridTransformer(Module):
    """The vision transformer of Qwen 3-VL: learned positions on a grid, interpolated to the
    image."""

    def __init__(self, sizes: VisionHParams, deep: dict[int, DeepMerger]) -> None:
        self.patch_embd = TwoFramePatches(sizes)
        self.position_embd = Vector((sizes.n_side**2, sizes.n_embd), WHOLE)
        self.blk = [VisionBlock(sizes) for _ in range(sizes.n_layer)]
        self.post_ln = LayerNorm(sizes.n_embd, sizes.eps, WHOLE)
        self.deepstack = Deepstack(deep)


class Qwen3VLEncoder(VisionEncoder):
    """Encoder of Qwen 3-VL, and of Qwen 3.5, which has no mergers after its blocks."""

    architectures: ClassVar = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")

    def __init__(self, keys: Keys, text: TextModel) -> None:
        self.sizes = sizes = VisionHParams.read(keys, text.n_embd)
        sizes.check_rotation(keys)
        self._merge = merge = keys.integer("vision.spatial_merge_size", 2)
        n_in = sizes.n_embd * merge**2
        are_deep = keys.flags("vision.is_deepstack_layers", sizes.n_layer, (False,) * sizes.n_layer)
        deep = {
            layer: DeepMerger(n_in, text.n_embd, sizes.eps)
            for layer, is_deep in enumerate(are_deep)
            if is_deep
        }
        self.v = GridTransformer(sizes, deep)
        self.mm = Merger(n_in, text.n_embd)
        self.rule = qwen_rule(keys, sizes, merge, MIN_TOKENS)

    def encode(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        merge = self._merge
        cut = patches(pixels, self.sizes.patch)
        rows, columns, _ = cut.shape
        n = self.sizes.n_side
        positions = ops.stretched(self.v.position_embd().reshape(n, n, -1), rows, columns)
        x = self.v.patch_embd(in_blocks(cut, merge)) + in_blocks(positions, merge)
        turn = rotation_in_blocks(self.sizes, rows, columns, merge, x, ops)
        deep: list[Tensor] = []
        for layer, block in enumerate(self.v.blk):
            x = block(x, ops, turn)
            if (merger := self.v.deepstack.mergers.get(layer)) is not None:
                deep.append(merger(x.reshape(-1, merger.fc1.shape[1]), ops))
        merged = self.v.post_ln.apply(x, ops).reshape(-1, self.mm.fc1.shape[1])
        return ops.concat(self.mm(merged, ops), *deep)


WINDOW = 112  # default side length of a window, in pixels
MIN_TOKENS_25 = 4  # default minimum number of tokens per image


class WindowTransformer(Module):
    """The vision transformer of Qwen 2.5-VL."""

    def __init__(self, sizes: VisionHParams) -> None:
        self.patch_embd = TwoFramePatches(sizes)
        self.blk = [GatedBlock(sizes) for _ in range(sizes.n_layer)]
        self.post_ln = RMSNorm(sizes.n_embd, sizes.eps, WHOLE)


class Qwen25VLEncoder(VisionEncoder):
    """Encoder of Qwen 2.5-VL (arXiv 2502.13923)."""

    architectures: ClassVar = ("qwen2vl",)

    def __init__(self, keys: Keys, text: TextModel) -> None:
        self.sizes = sizes = VisionHParams.read(keys, text.n_embd)
        sizes.check_rotation(keys)
        self._merge = merge = keys.integer("vision.spatial_merge_size", 2)
        self._side = keys.integer("vision.window_size", WINDOW) // merge // sizes.patch
        if not self._side:
            raise keys.invalid("its windows are smaller than one token")
        self._pattern = keys.integer("vision.n_wa_pattern")
        self.v = WindowTransformer(sizes)
        self.mm = Merger(sizes.n_embd * merge**2, text.n_embd)
        self.rule = qwen_rule(keys, sizes, merge, MIN_TOKENS_25)

    def encode(self, pixels: Tensor, ops: VisionOps) -> Tensor:
        merge = self._merge
        cut = patches(pixels, self.sizes.patch)
        rows, columns, _ = cut.shape
        order, windows = windows_of(rows // merge, columns // merge, self._side)
        x = self.v.patch_embd(in_blocks(cut, merge))
        turn = rotation_in_blocks(self.sizes, rows, columns, merge, x, ops)
        x = self._ordered(x, order)
        turn = Rotation(self._ordered(turn.cos, order), self._ordered(turn.sin, order), turn.style)
        sizes = [n * merge**2 for n in windows]
        for layer, block in enumerate(self.v.blk, 1):
            x = block(x, ops, turn, () if layer % self._pattern == 0 else sizes)
        merged = self.v.post_ln.apply(x, ops).reshape(len(order), -1)
        place = {token: number for number, token in enumerate(order)}
        return self.mm(merged, ops)[[place[token] for token in range(len(order))]]

    def _ordered(self, x: Tensor, order: list[int]) -> Tensor:
        return x.reshape(len(order), -1, *x.shape[1:])[order].flatten(0, 1)


def windows_of(rows: int, columns: int, side: int) -> tuple[list[int], list[int]]:
    """Return a grid's tokens in the order of its windows, and the size of each window.

    Windows, and the tokens within each, are in row-major order; windows at the right and bottom
    edges may be smaller. `side` is the number of tokens along a window's side.
    """
    order, sizes = list[int](), list[int]()
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            window = [
                row * columns + column
                for row in range(top, min(top + side, rows))
                for column in range(left, min(left + side, columns))
            ]
            order += window
            sizes.append(len(window))
    return order, sizes
