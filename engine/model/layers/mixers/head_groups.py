"""Groups of heads, and the norm over a group whose heads may lie on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.sharding.placement import Shard
from engine.model.sharding.ranges import Ranges

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Groups of equally many neighbouring heads, cut over ranks.

    Attributes:
        heads: heads of each rank.
        groups: groups that each rank's heads belong to; ranks may share one.
    """

    heads: Ranges
    groups: Ranges

    @property
    def size(self) -> int:
        """Number of heads of a group."""
        return self.heads.total // self.groups.total

    @property
    def are_whole(self) -> bool:
        """Whether no group has heads on two ranks."""
        return all(start % self.size == stop % self.size == 0 for start, stop in self.heads.spans)

    def repeat_for_heads(self, x: Tensor, rank: int) -> Tensor:
        """Repeat the values of the rank's groups for its heads: (T, groups, …) to (T, heads, …)."""
        repeated = x.repeat_interleave(self.size, dim=1)
        return repeated[:, self.own_heads(rank)]

    def group_of_each_head(self, rank: int) -> tuple[int, ...]:
        """Return the group of each of a rank's heads, numbered within the rank."""
        own = self.own_heads(rank)
        return tuple(i // self.size for i in range(own.start, own.stop))

    def sums(self, x: Tensor, rank: int) -> Tensor:
        """Sum x (T, heads of the rank) over the heads of each group of the layer: (T, n_group)."""
        start, stop = self.groups.spans[rank]
        padded = x.new_zeros(x.shape[0], (stop - start) * self.size)
        padded[:, self.own_heads(rank)] = x
        sums = x.new_zeros(x.shape[0], self.groups.total)
        sums[:, start:stop] = padded.view(x.shape[0], -1, self.size).sum(-1)
        return sums

    def own_heads(self, rank: int) -> slice:
        """Return the interval of the rank's heads among all heads of its groups."""
        start, stop = self.heads.spans[rank]
        begin = self.groups.spans[rank][0] * self.size
        return slice(start - begin, stop - begin)


class GroupedRMSNorm(Module):
    """RMS norm of each group of heads by itself, cut by heads.

    If a group has heads on several ranks, its sum of squares is all-reduced: one number per token
    and group. A file has the weight as (n_group, elements of a group) or flat.

    Args:
        n: number of elements of all groups.
        eps: number added to the mean square.
        optional: whether a file may have no weight; vectors then stay as they are.

    Attributes:
        weight: this rank's part, (elements of this rank's heads,), or None.
        is_absent: whether the norm is optional and the file has no weight.
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
        """Normalise x (T, elements of this rank's heads).

        Every rank of the block's group calls it; one without heads passes None and gets None.
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
        factors = self.groups.repeat_for_heads((mean[:, start:stop] + self.eps).rsqrt(), ctx.rank)
        assert self.weight is not None, "a rank without heads must not compute it"
        return (heads * factors[..., None]).flatten(1) * self.weight

    def _local(self, x: Tensor, ctx: Context) -> Tensor:
        """Normalise x where every group is whole on its rank."""
        assert self.weight is not None, "a rank without heads must not compute it"
        grouped = x.reshape(x.shape[0], self.groups.groups.size(ctx.rank), -1)
        weight = self.weight.view(grouped.shape[1:])
        return ctx.ops.rms_norm(grouped, weight, None, self.eps).flatten(1)
