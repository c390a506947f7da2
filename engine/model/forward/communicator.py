"""Interfaces to one rank's collectives, and to a one-shot all-reduce inside kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.operands import Addend, NormLayer

Group = tuple[int, ...]  # ranks that take part in a collective, ascending


class FusedAllReduce(Protocol):
    """One-shot all-reduce inside a kernel, which can also compute the operations after the sum."""

    def all_reduce(self, x: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Return the sum of the members' values, F32 of `shape`, with the same bits on all of the
        members."""

    def add_norm(
        self, x: Tensor, addend: Addend, norm: NormLayer | None, x_bytes: int | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Compute `Ops.add_norm` of the all-reduced addend in one kernel.

        Args:
            x_bytes: bytes of a quantised activation; None to leave the result unquantised.

        Returns:
            The result of `Ops.add_norm`; None, on all members, if the kernel does not support it.
        """


class Communicator(Protocol):
    """Collectives of one rank; a rank without a value passes `None`.

    Every member of a group makes the same calls in the same order. All ranks sum in rank order, so
    all members get the same bits, regardless of the number of ranks.

    Raises:
        CommError: a rank left, or passed an invalid value; the error names that rank. `LeftAlone`
            names none, because another rank's error states the cause.
    """

    rank: int

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for other ranks so far, excluding replays."""

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return the sum of the members' values, with the same bits on all members.

        `shape` is the shape of the values, if every member knows it.
        """

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        """Concatenate slices along the last dimension, in rank order, on the group's first member.

        The other members get None.

        Args:
            alike: a tensor with the same bits on all ranks with the same kind of device; ranks
                compare it if that is cheap.
        """

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return rank `source`'s tensor (of `shape`, if known) on every member of the group."""

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        """Return the in-kernel one-shot all-reduce for n values; None, on all members, if there is
        none."""
