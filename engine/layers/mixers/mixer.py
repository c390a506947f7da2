"""What stands first in a block: whatever lets tokens see each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import TYPE_CHECKING

from engine.layers.module import Module
from engine.layers.rope import Rope
from engine.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.context import Context
    from engine.layers.hparams import HParams


class Mixer(Module, ABC):
    """Attention, linear attention, a state-space model or a short convolution.

    Args:
        rope: rotates queries and keys of this layer; None where positions are not rotated.

    Attributes:
        n_reduce: how often the ranks meet inside it.
    """

    is_nameless = True
    n_reduce = 0

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        self.hp = hp
        self.split = split
        self.layer = layer
        self._rope = (rope,)  # wrapped: it belongs to the model

    @property
    def rope(self) -> Rope | None:
        return self._rope[0]

    @classmethod
    @abstractmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        """The sizes by which it is cut."""

    @abstractmethod
    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Map x (T, n_embd) to this rank's summand of (T, n_embd); None if it has no slice."""

    @property
    def bias(self) -> Tensor | None:
        """What is added once after the reduce."""
        return None


def split_last(x: Tensor, *widths: int) -> list[Tensor]:
    """Neighbouring parts of the last dimension, which `widths` add up to."""
    ends = accumulate(widths)
    return [x[..., end - width : end] for end, width in zip(ends, widths, strict=True)]
