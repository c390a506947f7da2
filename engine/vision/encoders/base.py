"""Base classes of towers: their sizes, and what all of them can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from engine.model.forward.operands import GELU, SILU
from engine.model.layers.fused import separate
from engine.model.layers.module import Module, TensorSource
from engine.model.layers.per_layer import per_layer_width
from engine.model.sharding.placement import Replicate

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.operands import Activation
    from engine.model.layers.hparams import HParams
    from engine.model.layers.keys import Keys
    from engine.vision.encoders.operations import PictureOps
    from engine.vision.images.rule import Channels, PictureRule

WHOLE = Replicate((0,))
"""Placement of all tensors of a tower: whole on the one rank that encodes."""


class TextModel(NamedTuple):
    """What a tower needs to know of the text model that it is for.

    Attributes:
        architecture: value of `general.architecture`.
        n_embd: width of its residual stream.
        has_layer_inputs: whether each of its layers has an input of its own (Gemma 3n and 4 E).
    """

    architecture: str
    n_embd: int
    has_layer_inputs: bool = False

    @classmethod
    def of(cls, hp: HParams) -> TextModel:
        """Return what towers need to know of a model with these sizes."""
        return cls(hp.architecture, hp.n_embd, per_layer_width(hp) > 0)


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
    def read(cls, keys: Keys, n_text: int, *, has_blocks: bool = True) -> Self:
        """Read the sizes of a file.

        Args:
            has_blocks: whether the tower has blocks; the sizes of blocks are zero elsewhere.

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
        of_blocks = found.n_layer, found.n_ff, found.n_head
        if has_blocks and (not all(of_blocks) or found.n_embd % found.n_head):
            raise keys.invalid("the sizes of its vision encoder contradict each other")
        if found.image < found.patch:
            raise keys.invalid("the sizes of its vision encoder contradict each other")
        if min(found.std) <= 0:
            raise keys.invalid("it divides colours by zero")
        return found

    @property
    def n_side(self) -> int:
        """Number of patches along a side of the picture that it was trained with."""
        return self.image // self.patch

    @property
    def head_dim(self) -> int:
        """Number of elements of a head of its attention."""
        return self.n_embd // self.n_head

    def check_rotation(self, keys: Keys) -> None:
        """Check that heads can be rotated by rows and columns.

        Raises:
            InvalidGGUF: they cannot.
        """
        if self.head_dim % 4:
            raise keys.invalid("heads of its vision encoder cannot be rotated in two dimensions")


def _channels(keys: Keys, name: str) -> Channels:
    red, green, blue = keys.numbers(name, 3, 0.5)
    return red, green, blue


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
    def __init__(self, keys: Keys, text: TextModel) -> None:
        """Declare the tower of a file for a text model."""

    @abstractmethod
    def encode(self, pixels: Tensor, ops: PictureOps) -> Tensor:
        """Return the features (tokens, n_text) of normalised pixels (3, height, width)."""

    @classmethod
    def adapt(cls, source: TensorSource, keys: Keys) -> None:
        """Rename and split tensors of `source` to those that towers declare."""
        n_layer = keys.integer("vision.block_count")
        n_embd, n_ff = (keys.integer(f"vision.{x}_length") for x in ("embedding", "feed_forward"))
        down = source.tensors.get("v.blk.0.ffn_down.weight")
        is_exchanged = down is not None and n_embd != n_ff and down.shape == (n_ff, n_embd)
        for block in (f"v.blk.{layer}." for layer in range(n_layer)):
            parts = tuple((f"{block}attn_{part}", n_embd) for part in "qkv")
            separate(source, f"{block}attn_qkv", parts, (n_embd,))
            if is_exchanged:
                _exchange_ffn(source, block)


def _exchange_ffn(source: TensorSource, block: str) -> None:
    """Exchange the matrices of an FFN that an early converter wrote under each other's names."""
    for kind in ("weight", "bias"):
        names = [f"{block}ffn_{part}.{kind}" for part in ("up", "down")]
        if all(name in source.tensors for name in names):
            up, down = (source.tensors[name] for name in names)
            source.tensors |= {names[0]: down, names[1]: up}
