"""Base classes of towers: a vision transformer, and what brings its result to the text model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from engine.forward.operands import GELU, SILU
from engine.layers.linear import Linear
from engine.layers.module import Module, Slot, TensorSource
from engine.layers.norm import LayerNorm
from engine.sharding.placement import Replicate

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.operands import Activation
    from engine.layers.keys import Keys
    from engine.pictures.rule import Channels, PictureRule
    from engine.towers.operations import PictureOps

WHOLE = Replicate((0,))
"""Placement of all tensors of a tower: whole on the one rank that encodes."""

N_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Sizes of a tower, as its file states them.

    Attributes:
        image: side of the picture that it was trained with, in pixels.
        patch: side of a patch, in pixels.
        n_embd: width of its residual stream.
        n_ff: number of columns of its FFNs.
        n_layer: number of its blocks.
        n_head: number of heads of its attention.
        eps: number that its norms add to the variance.
        mean, std: see `PictureRule`.
        act: activation of its FFNs.
        n_text: width of the text model that it is for.
    """

    image: int
    patch: int
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    eps: float
    mean: Channels
    std: Channels
    act: Activation
    n_text: int

    @classmethod
    def read(cls, keys: Keys, n_text: int) -> Self:
        """Read the sizes of a file.

        Raises:
            InvalidGGUF: some are missing or contradict each other.
        """
        found = cls(
            image=keys.integer("vision.image_size"),
            patch=keys.integer("vision.patch_size"),
            n_embd=keys.integer("vision.embedding_length"),
            n_ff=keys.integer("vision.feed_forward_length"),
            n_layer=keys.integer("vision.block_count"),
            n_head=keys.integer("vision.attention.head_count"),
            eps=keys.number("vision.attention.layer_norm_epsilon"),
            mean=_channels(keys, "vision.image_mean"),
            std=_channels(keys, "vision.image_std"),
            act=SILU if keys.flag("use_silu", default=False) else GELU,
            n_text=n_text,
        )
        if found.n_embd % found.n_head or found.image < found.patch:
            raise keys.invalid("the sizes of its vision encoder contradict each other")
        if min(found.std) <= 0:
            raise keys.invalid("it divides colours by zero")
        return found

    @property
    def n_side(self) -> int:
        """Number of patches along a side of the picture that it was trained with."""
        return self.image // self.patch


def _channels(keys: Keys, name: str) -> Channels:
    red, green, blue = keys.numbers(name, N_CHANNELS, 0.5)
    return red, green, blue


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


def patches(pixels: Tensor, patch: int) -> Tensor:
    """Return the patches of pixels (3, height, width), row by row: (rows, columns, 3 × patch²)."""
    n, height, width = pixels.shape
    cut = pixels.reshape(n, height // patch, patch, width // patch, patch)
    return cut.permute(1, 3, 0, 2, 4).reshape(height // patch, width // patch, -1)


class TowerBlock(Module):
    """Block of a vision transformer: `x + attention(ln1(x))`, then `x + ffn(ln2(x))`."""

    def __init__(self, sizes: TowerSizes) -> None:
        n, self.n_head, self.act = sizes.n_embd, sizes.n_head, sizes.act
        self.ln1 = LayerNorm(n, sizes.eps, WHOLE)
        self.attn_q, self.attn_k, self.attn_v = (Linear(n, n, WHOLE) for _ in range(3))
        self.attn_out = Linear(n, n, WHOLE)
        self.ln2 = LayerNorm(n, sizes.eps, WHOLE)
        self.ffn_up = Linear(n, sizes.n_ff, WHOLE)
        self.ffn_down = Linear(sizes.n_ff, n, WHOLE)

    def __call__(self, x: Tensor, ops: PictureOps) -> Tensor:
        """Map the residual stream x (T, n_embd) to the next block's."""
        normed = self.ln1.apply(x, ops)
        heads = [
            matrix(normed).reshape(len(x), self.n_head, -1)
            for matrix in (self.attn_q, self.attn_k, self.attn_v)
        ]
        return self.fed(x + self.attn_out(ops.attend_all(*heads).flatten(1)), ops)

    def fed(self, x: Tensor, ops: PictureOps) -> Tensor:
        """Return `x + ffn(ln2(x))`."""
        return x + self.ffn_down(ops.activate(self.act, self.ffn_up(self.ln2.apply(x, ops))))


class Tower(Module, ABC):
    """An encoder of pictures.

    Attributes:
        architectures: values of `general.architecture` of the text models that it is for.
        sizes: its sizes.
        rule: what prompts need to know of its pictures.
    """

    architectures: ClassVar[tuple[str, ...]]
    sizes: TowerSizes
    rule: PictureRule

    @abstractmethod
    def __init__(self, keys: Keys, n_text: int) -> None:
        """Declare the tower of a file for a text model of width `n_text`."""

    @abstractmethod
    def encode(self, pixels: Tensor, ops: PictureOps) -> Tensor:
        """Return the features (tokens, n_text) of normalised pixels (3, height, width)."""

    @classmethod
    def adapt(cls, source: TensorSource, keys: Keys) -> None:
        """Exchange the matrices of FFNs in files that have them under each other's names.

        Early converters wrote them so; their shapes tell.
        """
        first = source.tensors.get("v.blk.0.ffn_down.weight")
        n_embd, n_ff = (keys.integer(f"vision.{x}_length") for x in ("embedding", "feed_forward"))
        if first is None or n_embd == n_ff or first.shape != (n_ff, n_embd):
            return
        for layer in range(keys.integer("vision.block_count")):
            for kind in ("weight", "bias"):
                names = [f"v.blk.{layer}.ffn_{part}.{kind}" for part in ("up", "down")]
                if all(name in source.tensors for name in names):
                    up, down = (source.tensors[name] for name in names)
                    source.tensors |= {names[0]: down, names[1]: up}
