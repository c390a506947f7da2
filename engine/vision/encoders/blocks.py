"""Layers of vision transformers: patches, blocks, rotations by rows and columns, projectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from engine.model.forward.operands import RopeParams, RopeStyle
from engine.model.layers.linear import Linear
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.layers.norm import LayerNorm, Norm, RMSNorm
from engine.vision.encoders.base import WHOLE, TowerSizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.vision.encoders.operations import PictureOps

N_CHANNELS = 3


class PatchEmbedding(Linear):
    """Convolution over patches that do not overlap, as a product with their pixels."""

    def __init__(self, sizes: TowerSizes) -> None:
        self.kernel = (N_CHANNELS, sizes.patch, sizes.patch)
        super().__init__(N_CHANNELS * sizes.patch**2, sizes.n_embd, WHOLE)

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        source.get(f"{name}.weight", (self.shape[0], *self.kernel))
        weight = source.get(f"{name}.weight", self.shape, (self.shape[0], *self.kernel))
        slots = [Slot(self, "weight", weight, WHOLE, is_matrix=True)]
        if f"{name}.bias" in source:
            bias = source.get(f"{name}.bias", self.shape[:1])
            slots.append(Slot(self, "bias", bias, WHOLE, is_matrix=False))
        return slots


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


def patches(pixels: Tensor, patch: int) -> Tensor:
    """Return the patches of pixels (3, height, width), row by row: (rows, columns, 3 × patch²)."""
    n, height, width = pixels.shape
    cut = pixels.reshape(n, height // patch, patch, width // patch, patch)
    return cut.permute(1, 3, 0, 2, 4).reshape(height // patch, width // patch, -1)


def in_blocks(x: Tensor, n: int) -> Tensor:
    """Return x (rows, columns, ...) with each square of n × n behind each other, (T, ...).

    The squares follow each other row by row, and so do the elements of each.
    """
    rows, columns, *rest = x.shape
    blocks = x.reshape(rows // n, n, columns // n, n, -1).permute(0, 2, 1, 3, 4)
    return blocks.reshape(-1, *rest)


class Rotation(NamedTuple):
    """Angles by which queries and keys are rotated: cosines and sines (T, 1, head_dim / 2)."""

    cos: Tensor
    sin: Tensor
    style: RopeStyle


def grid_places(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return the row and column of each patch, (rows, columns, 2), on the device of `like`."""
    return like.new_ones(rows, columns).nonzero().reshape(rows, columns, 2)


def rotation(axes: Sequence[RopeParams], places: Tensor, ops: PictureOps) -> Rotation:
    """Return the rotation of patches at places (T, 2), half of whose pairs turn by each axis.

    Args:
        axes: parameters of the pairs that turn by the row, and of those that turn by the column.
    """
    both = [ops.rope_angles(axis, None, places[:, i]) for i, axis in enumerate(axes)]
    cos, sin = (ops.concat(*parts) for parts in zip(*both, strict=True))
    return Rotation(cos, sin, axes[0].style)


class TowerBlock(Module):
    """Block of a vision transformer: `x + attention(ln1(x))`, then `x + ffn(ln2(x))`.

    Attributes:
        linear_type: class of its matrices.
        norm_type: class of its norms.
        is_gated: whether its FFN has a gate.
    """

    linear_type: ClassVar[type[Linear]] = Linear
    norm_type: ClassVar[type[Norm]] = LayerNorm
    is_gated: ClassVar[bool] = False

    def __init__(self, sizes: TowerSizes) -> None:
        n, self.n_head, self.act = sizes.n_embd, sizes.n_head, sizes.act
        linear = self.linear_type
        self.ln1 = self.norm_type(n, sizes.eps, WHOLE)
        self.attn_q, self.attn_k, self.attn_v = (linear(n, n, WHOLE) for _ in range(3))
        self.attn_out = linear(n, n, WHOLE)
        self.ln2 = self.norm_type(n, sizes.eps, WHOLE)
        if self.is_gated:
            self.ffn_gate = linear(n, sizes.n_ff, WHOLE)
        self.ffn_up = linear(n, sizes.n_ff, WHOLE)
        self.ffn_down = linear(sizes.n_ff, n, WHOLE)

    def __call__(
        self, x: Tensor, ops: PictureOps, turn: Rotation | None = None, windows: Sequence[int] = ()
    ) -> Tensor:
        """Map the residual stream x (T, n_embd) to the next block's.

        Args:
            turn: rotation of queries and keys; None for none.
            windows: numbers of patches that see each other, one after the other; all see all
                without any.
        """
        x = x + self.attended(self.ln1.apply(x, ops), ops, turn, windows)
        return x + self.fed(self.ln2.apply(x, ops), ops)

    def attended(
        self, x: Tensor, ops: PictureOps, turn: Rotation | None, windows: Sequence[int]
    ) -> Tensor:
        """Return the attention's result for the normed stream x."""
        q, k, v = (part.reshape(len(x), self.n_head, -1) for part in self.projected(x, ops))
        if turn is not None:
            q, k = ops.ropes((q, k), *turn)
        return self.attn_out(ops.attend_all(q, k, v, windows).flatten(1))

    def projected(self, x: Tensor, ops: PictureOps) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the normed stream x, each (T, n_embd)."""
        return self.attn_q(x), self.attn_k(x), self.attn_v(x)

    def fed(self, x: Tensor, ops: PictureOps) -> Tensor:
        """Return the FFN's result for the normed stream x."""
        up = self.ffn_up(x)
        if self.is_gated:
            return self.ffn_down(ops.gated(self.act, self.ffn_gate(x), up))
        return self.ffn_down(ops.activate(self.act, up))


class GatedBlock(TowerBlock):
    """Block with RMS norms and a gated FFN."""

    norm_type = RMSNorm
    is_gated = True


class MLP(Module):
    """Two linear maps with GELU between them; subclasses say what files call them."""

    def __init__(self, n_in: int, n_between: int, n_out: int) -> None:
        self.fc1 = Linear(n_in, n_between, WHOLE)
        self.fc2 = Linear(n_between, n_out, WHOLE)

    def __call__(self, x: Tensor, ops: PictureOps) -> Tensor:
        """Map x (tokens, n_in) to (tokens, n_out)."""
        return self.fc2(ops.gelu_erf(self.fc1(x)))
