"""Heads that share groups, and the norm over a group whose heads may lie on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.layers.module import Module, Slot, TensorSource
from engine.sharding.placement import Shard
from engine.sharding.ranges import Ranges

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.context import Context


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Which heads of a rank belong to which of its groups.

    Attributes:
        heads: heads of each rank.
        groups: the groups of these heads; ranks may share one.
    """

    heads: Ranges
    groups: Ranges

    @property
    def size(self) -> int:
        """Heads of one group."""
        return self.heads.total // self.groups.total

    @property
    def are_whole(self) -> bool:
        """No group has heads on two ranks."""
        return all(start % self.size == stop % self.size == 0 for start, stop in self.heads.spans)

    def of_heads(self, x: Tensor, rank: int) -> Tensor:
        """For each head of the rank what its group has: (T, groups, …) to (T, heads, …)."""
        repeated = x.repeat_interleave(self.size, dim=1)
        return repeated[:, self.inside(rank)]

    def of_each(self, rank: int) -> tuple[int, ...]:
        """For each head of the rank which of the rank's groups it belongs to."""
        inside = self.inside(rank)
        return tuple(i // self.size for i in range(inside.start, inside.stop))

    def sums(self, x: Tensor, rank: int) -> Tensor:
        """Sums over the rank's heads of every group of the layer: (T, heads) to (T, n_group)."""
        start, stop = self.groups.spans[rank]
        padded = x.new_zeros(x.shape[0], (stop - start) * self.size)
        padded[:, self.inside(rank)] = x
        sums = x.new_zeros(x.shape[0], self.groups.total)
        sums[:, start:stop] = padded.view(x.shape[0], -1, self.size).sum(-1)
        return sums

    def inside(self, rank: int) -> slice:
        """The rank's heads among all heads of its groups."""
        start, stop = self.heads.spans[rank]
        begin = self.groups.spans[rank][0] * self.size
        return slice(start - begin, stop - begin)


class GroupedRMSNorm(Module):
    """An RMS norm of each group of heads by itself, cut by heads.

    Where a group has heads on several ranks, its sum of squares is reduced: one number per token
    and group. A file has the weight as (n_group, elements of a group) or flat.

    Args:
        n: elements of all groups together.
        optional: where the file has no weight, vectors stay as they are.

    Attributes:
        weight: (elements of this rank's heads,), or None.
    """

    weight: Tensor | None = None

    def __init__(
        self, n: int, groups: HeadGroups, eps: float, *, optional: bool = False
    ) -> None:  # fmt: skip
        self.shape = (groups.groups.total, n // groups.groups.total)
        self.groups = groups
        self.eps = eps
        self.optional = optional
        self.is_absent = False

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        tensor, flat = f"{name}.weight", (self.shape[0] * self.shape[1],)
        self.is_absent = self.optional and tensor not in source
        if self.is_absent:
            return []
        weight = source.get(tensor, flat, self.shape)
        return [Slot(self, "weight", weight, Shard(0, self.groups.heads), is_matrix=False)]

    def __call__(self, x: Tensor | None, ctx: Context) -> Tensor | None:
        """Normalise x (T, elements of this rank's heads); None from a rank without heads.

        Every rank of the block's group calls it.
        """
        if self.is_absent:
            return x
        if self.groups.are_whole:
            return None if x is None else self._local(x, ctx)
        n_head = self.groups.heads.size(ctx.rank)
        heads = None if x is None else x.reshape(x.shape[0], n_head, -1)
        sums = None if heads is None else self.groups.sums(heads.square().sum(-1), ctx.rank)
        mean = ctx.all_reduce(sums, n=self.groups.groups.total) / self.shape[1]
        if heads is None:
            return None
        start, stop = self.groups.groups.spans[ctx.rank]
        factors = self.groups.of_heads((mean[:, start:stop] + self.eps).rsqrt(), ctx.rank)
        assert self.weight is not None, "a rank without heads must not compute it"
        return (heads * factors[..., None]).flatten(1) * self.weight

    def _local(self, x: Tensor, ctx: Context) -> Tensor:
        """The same where every group is whole on its rank."""
        assert self.weight is not None, "a rank without heads must not compute it"
        grouped = x.reshape(x.shape[0], self.groups.groups.size(ctx.rank), -1)
        weight = self.weight.view(grouped.shape[1:])
        return ctx.ops.rms_norm(grouped, weight, None, self.eps).flatten(1)
