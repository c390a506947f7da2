"""Linear attention with the delta rule: each token corrects a state matrix per head."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.operands import SIGMOID, SILU, Activation, DeltaInputs
from engine.model.forward.state import RecurrentState
from engine.model.layers.linear import Linear, Vector
from engine.model.layers.mixers.attention import HeadGroups, split_heads
from engine.model.layers.mixers.mixer import CausalConv, Mixer, split_last
from engine.model.layers.norm import RMSNorm, Rope
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.shares import Ranges
from engine.model.sharding.split import BlockDims, BlockSplit, tiles

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Sizes of a delta-net layer.

    Attributes:
        n_head: number of value heads, each with its own state.
        n_group: number of query and key heads; each serves n_head / n_group value heads.
        head_dim: number of elements per head of any kind.
    """

    n_head: int
    n_group: int
    head_dim: int

    @classmethod
    def read(cls, hp: HParams) -> DeltaSizes:
        """Read the `ssm.*` keys of a file.

        Raises:
            InvalidGGUF: the heads do not add up to the values, or do not divide into the groups.
        """
        keys = hp.keys
        n_head, n_group = keys.integer("ssm.time_step_rank"), keys.integer("ssm.group_count")
        head_dim, n_value = keys.integer("ssm.state_size"), keys.integer("ssm.inner_size")
        if n_group < 1 or n_head % n_group or n_value != n_head * head_dim:
            raise keys.invalid(
                "{n} key heads and {heads} value heads of {size} elements do not add up to the"
                " {total} values in its linear attention",
                n=n_group, heads=n_head, size=head_dim, total=n_value,
            )  # fmt: skip
        return cls(n_head, n_group, head_dim)


class DeltaNet(Mixer):
    """Base of layers with the gated delta rule between short convolutions and a gated norm.

    They are split by value heads. Heads are independent, so the only all-reduce is the output's.

    Attributes:
        gate_act: activation of the output gate.
        state: declaration of the convolutions' stored inputs and a matrix per value head.
    """

    gate_act: ClassVar[Activation] = SILU
    state: RecurrentState
    out_proj: Linear

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.sizes = self.sizes_of(hp, layer)
        owners = Replicate(split.state_heads.owners())
        self.ssm_norm = RMSNorm(self.sizes.head_dim, hp.norm_eps, owners)

    @classmethod
    @abstractmethod
    def sizes_of(cls, hp: HParams, layer: int) -> DeltaSizes:
        """Return the sizes of a layer."""

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        sizes = cls.sizes_of(hp, layer)
        return BlockDims(n_state_head=sizes.n_head, n_state_group=sizes.n_group)

    @property
    def bias(self) -> Tensor | None:
        return self.out_proj.bias

    @abstractmethod
    def inputs(self, x: Tensor, ctx: Context) -> tuple[DeltaInputs, Tensor]:
        """Return the delta rule's operands for x (T, n_embd), and the output gate before its
        activation, (T, n_head × head_dim)."""

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.state_heads):
            return None
        inputs, gate = self.inputs(x, ctx)
        y = ctx.ops.delta_net(inputs, ctx.states(self.state, "matrix"))
        return self.out_proj(ctx.ops.norm_gated(y, self.ssm_norm, self.gate_act, gate))


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet (arXiv 2412.06464) with groups of value heads that share a key head.

    Ranks that share a key head both compute it, as in grouped-query attention. One convolution runs
    over queries, keys and values.

    Attributes:
        groups: groups of value heads by key head.
        values: split of the value heads over ranks, in the file's order.
    """

    tensor_names: ClassVar = {"out_proj": "ssm_out"}

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        n, dim, heads = self.sizes.n_head, self.sizes.head_dim, split.state_heads
        self.groups = HeadGroups(heads, split.state_groups)
        self.values = self.file_order(heads)
        mixed = (split.state_groups, split.state_groups, *self.values)
        n_mixed = (n + 2 * self.sizes.n_group) * dim
        self.declare_projections(n_mixed, Shard(0, mixed))
        channels = (cut.scaled(dim) for cut in mixed)
        self.ssm_conv1d = CausalConv(n_mixed, hp.keys.integer("ssm.conv_kernel"), *channels)
        self.ssm_dt = Vector((n,), Shard(0, self.values), (".bias",))
        self.ssm_a = Vector((n,), Shard(0, self.values), ("",))
        self.out_proj = Linear(n * dim, hp.n_embd, Shard(1, self.values), split.group)
        self.state = RecurrentState(conv=self.ssm_conv1d.memory, matrix=(self.values, (dim, dim)))

    @classmethod
    def sizes_of(cls, hp: HParams, layer: int) -> DeltaSizes:
        return DeltaSizes.read(hp)

    @abstractmethod
    def file_order(self, heads: Ranges) -> tuple[Ranges, ...]:
        """Return the segments of the value heads in the file's order."""

    @abstractmethod
    def key_heads(self, rank: int) -> tuple[int, ...]:
        """Return the key head of each value head on a rank, numbered within the rank."""

    @abstractmethod
    def beta_and_step(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return beta before the sigmoid, and step before bias and softplus; both (T, n_head)."""

    def declare_projections(self, n_mixed: int, placement: Shard) -> None:
        """Declare projections for the gate and for queries, keys and values (`n_mixed` rows)."""
        self.attn_qkv = Linear(self.hp.n_embd, n_mixed, placement)
        n_gate = self.sizes.n_head * self.sizes.head_dim
        self.attn_gate = Linear(self.hp.n_embd, n_gate, Shard(0, self.values))

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return concatenated queries, keys and values of x (T, n_embd), and the gate."""
        return self.attn_qkv(x), self.attn_gate(x)

    def inputs(self, x: Tensor, ctx: Context) -> tuple[DeltaInputs, Tensor]:
        mixed, gate = self.project(x, ctx)
        mixed = self.ssm_conv1d(mixed, ctx, self.state, "conv", SILU)
        n_key = self.split.state_groups.size(ctx.rank) * self.sizes.head_dim
        parts = split_last(mixed, n_key, n_key, gate.shape[1])
        q, k, v = (split_heads(part, self.sizes.head_dim) for part in parts)
        beta, step = self.beta_and_step(x, ctx)
        is_shared = self.sizes.n_head > self.sizes.n_group
        key_of = ctx.index(self.key_heads(ctx.rank)) if is_shared else None
        eps = self.hp.norm_eps
        return DeltaInputs(q, k, v, step, self.ssm_dt(), self.ssm_a(), beta, key_of, eps), gate


class GroupedDeltaNet(GatedDeltaNet):
    """Gated DeltaNet whose files store the value heads of each key head together (Qwen3-Next).

    The rows of beta and step are interleaved by key head. Files from before 2026 store all
    projections that way, as rows q, k, v and gate per key head. A rank holds these rows for whole
    groups, even if another rank has some of the groups' value heads.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.ssm_ba = Linear(hp.n_embd, 2 * self.sizes.n_head, Shard(0, split.state_groups))

    def declare_projections(self, n_mixed: int, placement: Shard) -> None:
        self.is_joint = self.hp.has(self.layer, "ssm_in.weight")
        if not self.is_joint:
            super().declare_projections(n_mixed, placement)
            return
        n_rows = n_mixed + self.sizes.n_head * self.sizes.head_dim
        self.ssm_in = Linear(self.hp.n_embd, n_rows, Shard(0, self.split.state_groups))

    def file_order(self, heads: Ranges) -> tuple[Ranges, ...]:
        return (heads,)

    def key_heads(self, rank: int) -> tuple[int, ...]:
        return self.groups.group_of_each_head(rank)

    def beta_and_step(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        beta, step = split_heads(self.ssm_ba(x), 2 * self.groups.size).chunk(2, dim=-1)
        own = self.groups.own_heads(ctx.rank)
        return beta.flatten(1)[:, own], step.flatten(1)[:, own]

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        if not self.is_joint:
            return super().project(x, ctx)
        dim, size = self.sizes.head_dim, self.groups.size
        by_group = split_heads(self.ssm_in(x), 2 * (1 + size) * dim)
        q, k, *values = split_last(by_group, dim, dim, size * dim, size * dim)
        own = self.groups.own_heads(ctx.rank)
        v, gate = (split_heads(part.flatten(1), dim)[:, own].flatten(1) for part in values)
        return ctx.ops.concat(q.flatten(1), k.flatten(1), v), gate


class TiledDeltaNet(GatedDeltaNet):
    """Gated DeltaNet whose files tile value heads: the first of each key head, then the second of
    each (Qwen 3.5)."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.ssm_alpha = Linear(hp.n_embd, self.sizes.n_head, Shard(0, self.values))
        self.ssm_beta = Linear(hp.n_embd, self.sizes.n_head, Shard(0, self.values))

    def file_order(self, heads: Ranges) -> tuple[Ranges, ...]:
        return tiles(heads, self.sizes.n_group)

    def key_heads(self, rank: int) -> tuple[int, ...]:
        first = self.split.state_groups.spans[rank][0]
        return tuple(i - first for tile in self.values for i in range(*tile.spans[rank]))

    def beta_and_step(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        return self.ssm_beta(x), self.ssm_alpha(x)


class KimiDeltaAttention(DeltaNet):
    """Delta net with a decay per channel and as many key heads as value heads (arXiv 2510.26692).

    Queries, keys and values have separate convolutions. Decays and gates are low-rank projections;
    every rank with heads holds their first matrices in full.
    """

    tensor_names: ClassVar = {"out_proj": "attn_output"}
    gate_act = SIGMOID

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        heads, n_head, dim = split.state_heads, self.sizes.n_head, self.sizes.head_dim
        by_head, owners, n_out = Shard(0, heads), Replicate(heads.owners()), n_head * dim
        self.attn_q = Linear(hp.n_embd, n_out, by_head)
        self.attn_k = Linear(hp.n_embd, n_out, by_head)
        self.attn_v = Linear(hp.n_embd, n_out, by_head)
        n_taps, channels = hp.keys.integer("ssm.conv_kernel"), heads.scaled(dim)
        self.ssm_conv1d_q = CausalConv(n_out, n_taps, channels)
        self.ssm_conv1d_k = CausalConv(n_out, n_taps, channels)
        self.ssm_conv1d_v = CausalConv(n_out, n_taps, channels)
        self.ssm_f_a = Linear(hp.n_embd, dim, owners)
        self.ssm_f_b = Linear(dim, n_out, by_head)
        self.ssm_dt = Vector((n_out,), by_head, (".bias",))
        self.ssm_a = Vector((n_head, 1), by_head, ("",))
        self.ssm_beta = Linear(hp.n_embd, n_head, by_head)
        self.ssm_g_a = Linear(hp.n_embd, dim, owners)
        self.ssm_g_b = Linear(dim, n_out, by_head)
        self.out_proj = Linear(n_out, hp.n_embd, Shard(1, heads), split.group)
        memory = self.ssm_conv1d_q.memory
        self.state = RecurrentState(q=memory, k=memory, v=memory, matrix=(heads, (dim, dim)))

    @classmethod
    def sizes_of(cls, hp: HParams, layer: int) -> DeltaSizes:
        n_head = hp.n_head[layer]
        if n_head < 1:
            raise hp.keys.invalid("block {n} has no heads", n=layer)
        return DeltaSizes(n_head, n_head, hp.keys.integer("kda.head_dim"))

    def inputs(self, x: Tensor, ctx: Context) -> tuple[DeltaInputs, Tensor]:
        dim = self.sizes.head_dim
        q = self.ssm_conv1d_q(self.attn_q(x), ctx, self.state, "q", SILU)
        k = self.ssm_conv1d_k(self.attn_k(x), ctx, self.state, "k", SILU)
        v = self.ssm_conv1d_v(self.attn_v(x), ctx, self.state, "v", SILU)
        inputs = DeltaInputs(
            split_heads(q, dim),
            split_heads(k, dim),
            split_heads(v, dim),
            split_heads(self.ssm_f_b(self.ssm_f_a(x)), dim),
            self.ssm_dt().view(-1, dim),
            self.ssm_a().flatten(),
            self.ssm_beta(x),
            None,
            self.hp.norm_eps,
        )
        return inputs, self.ssm_g_b(self.ssm_g_a(x))
