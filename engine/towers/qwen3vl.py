"""Qwen 3-VL's and 3.5's tower: pictures of any size, 2-D RoPE, 2 x 2 patches in a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.forward.operands import RopeParams
from engine.layers.linear import Linear, Vector
from engine.layers.module import Module, Slot, TensorSource
from engine.layers.norm import LayerNorm
from engine.pictures.resizing import Resizing
from engine.pictures.rule import PictureRule
from engine.towers.base import WHOLE, PatchEmbedding, Tower, TowerBlock, TowerSizes, patches

if TYPE_CHECKING:
    from torch import Tensor

    from engine.layers.keys import Keys
    from engine.towers.operations import PictureOps

THETA = 10000.0
"""Base of the frequencies of the tower's RoPE."""

LEAST_TOKENS, MOST_TOKENS = 64, 4096
"""Bounds of the number of a picture's tokens unless a file has its own: the least is that of the
model's processor, with more than the most a picture takes minutes and gigabytes."""


class TwoFramePatches(PatchEmbedding):
    """Convolution over patches in two frames, which are both the picture."""

    second: Linear

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__(sizes)
        self.second = Linear(self.shape[1], self.shape[0], WHOLE)

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        weight = source.get(f"{name}.weight.1", self.shape, (self.shape[0], *self.kernel))
        other = Slot(self.second, "weight", weight, WHOLE, is_matrix=True)
        return [*super().bind(source, name), other]

    def __call__(self, x: Tensor) -> Tensor:
        """Map patches (T, 3 × patch²) to (T, n_embd)."""
        return super().__call__(x) + self.second(x)


class RotaryBlock(TowerBlock):
    """Block whose queries and keys are rotated by the rows and columns of their patches."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__(sizes)
        del self.attn_q, self.attn_k, self.attn_v
        self.attn_qkv = Linear(sizes.n_embd, 3 * sizes.n_embd, WHOLE)

    def rotated(self, x: Tensor, angles: tuple[Tensor, Tensor], ops: PictureOps) -> Tensor:
        """Map the residual stream x (T, n_embd) to the next block's."""
        heads = self.attn_qkv(self.ln1.apply(x, ops)).reshape(len(x), 3, self.n_head, -1)
        q, k = ops.ropes((heads[:, 0], heads[:, 1]), *angles, "neox")
        x = x + self.attn_out(ops.attend_all(q, k, heads[:, 2]).flatten(1))
        return self.fed(x, ops)


class Merger(Module):
    """Two-layer MLP that makes a token of neighbouring patches."""

    tensor_names: ClassVar = {"fc1": "0", "fc2": "2"}

    def __init__(self, n_in: int, n_out: int) -> None:
        self.fc1 = Linear(n_in, n_in, WHOLE)
        self.fc2 = Linear(n_in, n_out, WHOLE)

    def __call__(self, x: Tensor, ops: PictureOps) -> Tensor:
        """Map x (tokens, n_in) to (tokens, n_out)."""
        return self.fc2(ops.gelu_erf(self.fc1(x)))


class DeepMerger(Merger):
    """Merger of the residual stream behind one of the blocks, with a norm of its own."""

    tensor_names: ClassVar = {}

    def __init__(self, n_in: int, n_out: int, eps: float) -> None:
        super().__init__(n_in, n_out)
        self.norm = LayerNorm(n_in, eps, WHOLE)

    def __call__(self, x: Tensor, ops: PictureOps) -> Tensor:
        return super().__call__(self.norm.apply(x, ops), ops)


class Deepstack(Module):
    """Mergers by the number of the block behind which they read."""

    def __init__(self, mergers: dict[int, DeepMerger]) -> None:
        self.mergers = mergers

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        return [
            slot
            for layer, merger in self.mergers.items()
            for slot in merger.bind(source, f"{name}.{layer}")
        ]


class RotaryTransformer(Module):
    """The vision transformer of Qwen 3-VL."""

    def __init__(self, sizes: TowerSizes, deep: dict[int, DeepMerger]) -> None:
        self.patch_embd = TwoFramePatches(sizes)
        self.position_embd = Vector((sizes.n_side**2, sizes.n_embd), WHOLE)
        self.blk = [RotaryBlock(sizes) for _ in range(sizes.n_layer)]
        self.post_ln = LayerNorm(sizes.n_embd, sizes.eps, WHOLE)
        self.deepstack = Deepstack(deep)


class Qwen3VLTower(Tower):
    """Tower of Qwen 3-VL, and of Qwen 3.5, which has no mergers behind its blocks."""

    architectures: ClassVar = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")

    def __init__(self, keys: Keys, n_text: int) -> None:
        self.sizes = sizes = TowerSizes.read(keys, n_text)
        if sizes.n_embd // sizes.n_head % 4:
            raise keys.invalid("heads of its vision encoder cannot be rotated in two dimensions")
        self._merge = merge = keys.integer("vision.spatial_merge_size", 2)
        n_in = sizes.n_embd * merge**2
        is_deep = keys.flags("vision.is_deepstack_layers", sizes.n_layer, (False,) * sizes.n_layer)
        layers = [layer for layer, is_it in enumerate(is_deep) if is_it]
        deep = {layer: DeepMerger(n_in, n_text, sizes.eps) for layer in layers}
        self.v = RotaryTransformer(sizes, deep)
        self.mm = Merger(n_in, n_text)
        cell = merge * sizes.patch
        least = keys.integer("vision.image_min_pixels", LEAST_TOKENS * cell * cell)
        most = keys.integer("vision.image_max_pixels", MOST_TOKENS * cell * cell)
        if not cell * cell <= least <= most:
            raise keys.invalid("the bounds of the sizes of its pictures contradict each other")
        self.rule = PictureRule(
            Resizing("bicubic", factor=cell, least=least, most=most), cell, sizes.mean, sizes.std,
            "<|vision_start|>", "<|vision_end|>", has_places=True,
        )  # fmt: skip

    def encode(self, pixels: Tensor, ops: PictureOps) -> Tensor:
        cut = patches(pixels, self.sizes.patch)
        rows, columns, _ = cut.shape
        positions = self._interpolated(rows, columns, ops)
        x = self.v.patch_embd(self._in_blocks(cut)) + self._in_blocks(positions)
        angles = self._angles(rows, columns, x, ops)
        found: list[Tensor] = []
        for layer, block in enumerate(self.v.blk):
            x = block.rotated(x, angles, ops)
            if (merger := self.v.deepstack.mergers.get(layer)) is not None:
                found.append(merger(x.reshape(-1, merger.fc1.shape[1]), ops))
        merged = self.v.post_ln.apply(x, ops).reshape(-1, self.mm.fc1.shape[1])
        return ops.concat(self.mm(merged, ops), *found)

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Return x (rows, columns, n) with the patches of a token behind each other, (T, n)."""
        rows, columns, n = x.shape
        m = self._merge
        blocks = x.reshape(rows // m, m, columns // m, m, n).permute(0, 2, 1, 3, 4)
        return blocks.reshape(-1, n)

    def _interpolated(self, rows: int, columns: int, ops: PictureOps) -> Tensor:
        """Return the learned positions for so many patches, (rows, columns, n_embd)."""
        n = self.sizes.n_side
        grid = self.v.position_embd().reshape(n, n, -1)
        return ops.stretched(grid, rows, columns)

    def _angles(self, rows: int, columns: int, x: Tensor, ops: PictureOps) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all patches, (T, 1, head_dim / 2), the rows' first."""
        n = self.sizes.n_embd // self.sizes.n_head // 2
        params = RopeParams(n, "neox", THETA)
        places = x.new_ones(rows, columns, 1).nonzero()[:, :2].reshape(rows, columns, 2)
        ordered = self._in_blocks(places)
        both = [ops.rope_angles(params, None, ordered[:, axis]) for axis in (0, 1)]
        cos, sin = (ops.concat(*parts) for parts in zip(*both, strict=True))
        return cos, sin
