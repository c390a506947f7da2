"""Base of the mixers: the first part of a block, through which tokens see each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import TYPE_CHECKING

from engine.model.layers.module import Module
from engine.model.layers.norm import Rope
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams


class Mixer(Module, ABC):
    """Base of attention, linear attention, state-space models and short convolutions.

    Args:
        rope: rotation of queries and keys of this layer; None where positions are not rotated.

    Attributes:
        n_reduce: number of all-reduces inside it, before the one of its output.
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
        """Rotation of queries and keys; None where positions are not rotated."""
        return self._rope[0]

    @classmethod
    @abstractmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        """Return the sizes by which the mixer is cut."""

    @abstractmethod
    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Map x (T, n_embd) to this rank's partial sum (T, n_embd); None if it has no slice."""

    @property
    def bias(self) -> Tensor | None:
        """Bias that is added once, after the all-reduce."""
        return None


def split_last(x: Tensor, *widths: int) -> list[Tensor]:
    """Split the last dimension into neighbouring parts of the given widths."""
    ends = accumulate(widths)
    return [x[..., end - width : end] for end, width in zip(ends, widths, strict=True)]
