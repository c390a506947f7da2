"""Collectives of one rank, and the one-shot all-reduce inside kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.operands import Addend, NormLayer

Group = tuple[int, ...]
"""Ranks that take part in a collective, in ascending order."""


class FusedAllReduce(Protocol):
    """One-shot all-reduce inside a kernel, which can compute the operations after the sum too."""

    def all_reduce(self, x: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Return the sum of the members' values, with the same bits on all of them.

        Args:
            x: this rank's values, F32 of `shape`; None if it has none.
        """
        ...

    def add_norm(
        self, x: Tensor, addend: Addend, norm: NormLayer | None, x_bytes: int | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Compute `Ops.add_norm` of the all-reduced addend in one kernel.

        Args:
            x_bytes: bytes of a quantised activation; None if the result is not quantised as well.

        Returns:
            The result of `Ops.add_norm`; None, on all members alike, if the kernel cannot do it.
        """
        ...


class Communicator(Protocol):
    """Collectives of one rank; a rank that has no value passes `None`.

    Every member of a group makes the same calls in the same order. Sums run in rank order on every
    rank, so all members end with the same bits, whatever the number of ranks.

    Raises:
        CommError: a rank left, or passed an invalid value; the error names that rank. `LeftAlone`
            names none: another rank's error says what has happened.

    Attributes:
        rank: number of this rank.
    """

    rank: int

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others so far, replayed calls excluded."""
        ...

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the sum of the members' values; all members get the same bits.

        Args:
            shape: shape of the members' values, if every member knows it.
        """
        ...

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        """Join slices along the last dimension, in rank order, on the first member of the group.

        The others get None.

        Args:
            alike: a tensor that has the same bits on all ranks whose devices round as this one's;
                it is compared between ranks where that costs little.
        """
        ...

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the tensor of rank `source` on every member of the group.

        Args:
            shape: shape of the tensor, if every member knows it.
        """
        ...

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        """Return the one-shot all-reduce inside kernels for values of n numbers.

        Returns:
            None, on all members alike, if there is none for this group and size.
        """
        ...
