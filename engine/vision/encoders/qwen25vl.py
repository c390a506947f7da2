"""Qwen 2.5-VL's encoder: patches see each other in windows, and all of them in some blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.model.layers.module import Module
from engine.model.layers.norm import RMSNorm
from engine.vision.encoders.base import (
    WHOLE,
    GatedBlock,
    Rotation,
    TextModel,
    TwoFramePatches,
    VisionEncoder,
    VisionHParams,
    in_blocks,
    patches,
)
from engine.vision.encoders.qwen3vl import Merger, qwen_rule, rotation_in_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.layers.keys import Keys
    from engine.vision.encoders.ops import VisionOps

WINDOW = 112
"""Side of a window unless a file has its own, in pixels."""

LEAST_TOKENS = 4
"""Smallest number of an image's tokens unless a file has its own."""


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
            raise keys.invalid("its windows are smaller than what one token stands for")
        self._pattern = keys.integer("vision.n_wa_pattern")
        self.v = WindowTransformer(sizes)
        self.mm = Merger(sizes.n_embd * merge**2, text.n_embd)
        self.rule = qwen_rule(keys, sizes, merge, LEAST_TOKENS)

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
        """Return x (T, ...) with the patches of each token where `order` has the token."""
        return x.reshape(len(order), -1, *x.shape[1:])[order].flatten(0, 1)


def windows_of(rows: int, columns: int, side: int) -> tuple[list[int], list[int]]:
    """Return the tokens of a grid window by window, and how many each window has.

    Windows follow each other row by row, as do the tokens of each; those at the right and at the
    bottom may be smaller.

    Args:
        side: number of tokens along a side of a window.
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
