"""Layers that hold tensors: linear maps, vectors, the embedding, and the tied output head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.forward.operands import ALL, NO_SLICE, ExpertLayer, LinearLayer, Weight
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.sharding.placement import Placement, Replicate, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context

EMBEDDING = "token_embd.weight"


class Linear(LinearLayer, Module):
    """Linear map `y = x Wᵀ`, split by rows (outputs) or by columns (inputs) of W.

    If W is split by rows, the result is this rank's slice of the outputs. If W is split by columns,
    it is a partial sum that the caller all-reduces; the bias is then left to `Context.all_reduce`,
    so that it is added once.

    Args:
        group: ranks that add the bias after the all-reduce; required if W is split by columns.
    """

    def __init__(
        self, n_in: int, n_out: int, placement: Placement, group: tuple[int, ...] = ()
    ) -> None:
        self.shape = (n_out, n_in)
        self.placement = placement
        self.group = group
        self.is_partial = isinstance(placement, Shard) and placement.dim == 1

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        weight = source.get(f"{name}.weight", self.shape)
        slots = [Slot(self, "weight", weight, self.placement, is_matrix=True)]
        if f"{name}.bias" in source:
            bias = source.get(f"{name}.bias", self.shape[:1])
            placement = Replicate(self.group) if self.is_partial else self.placement
            slots.append(Slot(self, "bias", bias, placement, is_matrix=False))
        if f"{name}.scale" in source:
            scale = source.get(f"{name}.scale", (1,))
            owners = Replicate(self.placement.owners())
            slots.append(Slot(self, "scale", scale, owners, is_matrix=False))
        return slots


class ExpertLinear(ExpertLayer, Module):
    """One matrix per routed expert, (n_expert, n_out, n_in); all experts have the same split.

    If they are split by columns, results are partial sums; the bias is then added on one rank only.
    """

    def __init__(self, n_expert: int, n_in: int, n_out: int, placement: Shard) -> None:
        self.shape = (n_expert, n_out, n_in)
        self.placement = placement

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        weight = source.get(f"{name}.weight", self.shape)
        slots = [Slot(self, "weight", weight, self.placement, is_matrix=True)]
        owners = self.placement.owners()
        if f"{name}.bias" in source:
            bias = source.get(f"{name}.bias", self.shape[:2])
            placement = self.placement if self.placement.dim == 1 else Replicate(owners[:1])
            slots.append(Slot(self, "bias", bias, placement, is_matrix=False))
        if f"{name}.scale" in source:
            scale = source.get(f"{name}.scale", self.shape[:1])
            slots.append(Slot(self, "scale", scale, Replicate(owners), is_matrix=False))
        return slots


class HeadLinear(Module):
    """One matrix per head, (n_head, n_out, n_in), split by heads.

    Files may also stack the matrices as (n_head × n_out, n_in).
    """

    weight: Weight | None = None

    def __init__(self, n_head: int, n_in: int, n_out: int, placement: Shard) -> None:
        self.shape = (n_head, n_out, n_in)
        self.placement = placement

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        n_head, n_out, n_in = self.shape
        weight = source.get(f"{name}.weight", self.shape, (n_head * n_out, n_in))
        return [Slot(self, "weight", weight, self.placement, is_matrix=True)]

    def __call__(self, x: Tensor, rows: slice = ALL, *, transposed: bool = False) -> Tensor:
        """Map x (T, this rank's n_head, n_in) to (T, this rank's n_head, n_out).

        `rows` selects the rows of each matrix to use. `transposed` maps from n_out to n_in instead.
        """
        assert self.weight is not None, NO_SLICE
        return self.weight.per_head(x, rows, transposed=transposed)


class Vector(Module):
    """Tensor that is not a matrix, for example a router's bias, decays or sinks.

    Args:
        shape: shape in the file.
        suffixes: alternative suffixes of the name in files.
        optional: whether a file may omit it.

    Attributes:
        value: this rank's part in F32, or None.
    """

    value: Tensor | None = None

    def __init__(
        self, shape: tuple[int, ...], placement: Placement,
        suffixes: tuple[str, ...] = (".weight",), *, optional: bool = False,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.placement = placement
        self.suffixes = suffixes
        self.optional = optional

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        names = [name + suffix for suffix in self.suffixes]
        present = next((n for n in names if n in source), None)
        if present is None and self.optional:
            return []
        tensor = source.get(present or names[0], self.shape)
        return [Slot(self, "value", tensor, self.placement, is_matrix=False)]

    def __call__(self) -> Tensor:
        """Return this rank's values."""
        assert self.value is not None, NO_SLICE
        return self.value


class Embedding(Module):
    """Embedding (n_vocab, n_embd), split by rows: each rank looks up the tokens that it holds.

    If it is used only for lookups (`is_lookup`), it stays packed as in the file.
    """

    weight: Weight | None = None

    def __init__(
        self, n_vocab: int, n_embd: int, placement: Shard, *, is_lookup: bool = False
    ) -> None:
        self.shape = (n_vocab, n_embd)
        self.placement = placement
        self.is_lookup = is_lookup

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        weight = source.get(f"{name}.weight", self.shape)
        return [Slot(self, "weight", weight, self.placement, True, self.is_lookup)]

    def __call__(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """Look up ids (T,); return (T, n_embd) on the ranks that hold rows, None on the others."""
        (ranges,) = self.placement.segments
        if not ctx.join(ranges.owners()):
            return None
        start, _ = ranges.spans[ctx.rank]
        rows = None if self.weight is None else self.weight.lookup(ids - start if start else ids)
        return ctx.all_reduce(rows, n=self.shape[1])


class CopiedHead(Linear):
    """Output head that is a copy of the embedding, which other ranks hold."""

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        weight = source.get(EMBEDDING, self.shape)
        return [Slot(self, "weight", weight, self.placement, is_matrix=True)]


class TiedHead(Module):
    """Output head that shares the embedding matrix."""

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = (embedding,)  # in a tuple, so that it is not a child of two modules

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (T, n_embd) to this rank's logits (T, its part of n_vocab)."""
        weight = self._embedding[0].weight
        assert weight is not None, NO_SLICE
        return weight.matmul(x)
