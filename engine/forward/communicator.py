"""Interface to the other ranks: the collectives that layers may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.ops import FusedAllReduce

Group = tuple[int, ...]
"""Ranks that meet, in ascending order."""


class Communicator(Protocol):
    """Collectives of one rank; `None` stands for a rank that has nothing to give.

    Every member of a group makes the same calls in the same order. Sums run in rank order on every
    rank, so all members end with the same bits, whatever the number of ranks.

    Raises:
        CommError: a rank left, or gave what cannot be; it names that one. `LeftAlone` is one that
            names nobody, where others tell what has happened.
    """

    rank: int

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far, replayed calls excluded."""
        ...

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Sum over the group; every member gets the result, with the same bits.

        Args:
            shape: shape of all values, where all members know it.
        """
        ...

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        """Join slices along the last dimension, in rank order, on the first member of the group.

        The others get None.

        Args:
            alike: a tensor that has the same bits on all ranks that compute as this one does; it
                is compared where that costs little.
        """
        ...

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the tensor of rank `source` on every member of the group.

        Args:
            shape: shape of the tensor, where all members know it.
        """
        ...

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        """Return the all-reduce that kernels do by themselves for n numbers per member.

        None, on all members alike, if they do not.
        """
        ...
