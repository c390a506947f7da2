"""Mamba 1, with a state per channel, and Mamba 2, with a state per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.operands import SILU, ScanInputs
from engine.model.forward.state import RecurrentState
from engine.model.layers.linear import Linear, Vector
from engine.model.layers.mixers.attention import GroupedRMSNorm, HeadGroups, split_heads
from engine.model.layers.mixers.mixer import CausalConv, Mixer, split_last
from engine.model.layers.norm import RMSNorm, Rope
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.split import COLUMN_UNIT, BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams


class Mamba(Mixer):
    """Mamba 1 layer, a selective state-space model (arXiv 2312.00752), split by channels.

    Step sizes, B and C depend on all channels, which requires a small all-reduce in addition to the
    output's. A file may have norms for step sizes, B and C (Falcon Mamba, arXiv 2410.05355).

    Attributes:
        has_norms: whether step sizes, B and C always have norms, with weights.
        widths: widths of the step sizes' input, B and C.
        state: declaration of the convolution's stored inputs and each channel's state.
    """

    has_norms: ClassVar[bool] = False
    n_reduce = 1

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        channels, keys = split.state_heads, hp.keys
        n = channels.total
        n_dt, n_state = keys.integer("ssm.time_step_rank"), keys.integer("ssm.state_size")
        self.widths = (n_dt, n_state, n_state)
        self.ssm_in = Linear(hp.n_embd, 2 * n, Shard(0, (channels, channels)))
        self.ssm_conv1d = CausalConv(n, keys.integer("ssm.conv_kernel"), channels)
        self.ssm_x = Linear(n, sum(self.widths), Shard(1, channels), split.group)
        self.ssm_dt = Linear(n_dt, n, Shard(0, channels))
        self.ssm_a = Vector((n, n_state), Shard(0, channels), ("",))
        self.ssm_d = Vector((n,), Shard(0, channels), ("",))
        self.ssm_out = Linear(n, hp.n_embd, Shard(1, channels), split.group)
        self.is_normed = self.has_norms or keys.flag("ssm.dt_b_c_rms", False)
        if self.is_normed:
            self.ssm_dt_norm = self.small_norm(n_dt)
            self.ssm_b_norm = self.small_norm(n_state)
            self.ssm_c_norm = self.small_norm(n_state)
        self.state = RecurrentState(conv=self.ssm_conv1d.memory, ssm=(channels, (n_state,)))

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        n = hp.keys.integer("ssm.inner_size")
        return BlockDims(n_state_head=n, n_state_group=n, state_unit=COLUMN_UNIT)

    @property
    def bias(self) -> Tensor | None:
        return self.ssm_out.bias

    def small_norm(self, n: int) -> RMSNorm:
        """Return a new norm for step sizes, B or C, on all ranks with channels."""
        owners = Replicate(self.split.state_heads.owners())
        return RMSNorm(n, self.hp.norm_eps, owners, affine=self.has_norms)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.state_heads):
            ctx.all_reduce(None, n=sum(self.widths))
            return None
        values, gate = self.ssm_in(x).chunk(2, dim=-1)
        values = self.ssm_conv1d(values, ctx, self.state, "conv", SILU)
        step, b, c = self.step_b_c(values, ctx)
        states = ctx.states(self.state, "ssm")
        return self.ssm_out(
            ctx.ops.selective_scan(values, step, self.ssm_a(), b, c, self.ssm_d(), gate, states)
        )

    def step_b_c(self, values: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Project values (T, this rank's channels) to step sizes before the softplus (T, this
        rank's channels), B and C (T, n_state)."""
        projected = ctx.all_reduce(self.ssm_x(values), self.ssm_x.bias, sum(self.widths))
        dt, b, c = split_last(projected, *self.widths)
        if self.is_normed:
            dt, b, c = self.ssm_dt_norm(dt, ctx), self.ssm_b_norm(b, ctx), self.ssm_c_norm(c, ctx)
        return self.ssm_dt(dt), b, c


class NormedMamba(Mamba):
    """Mamba 1 layer with weighted norms for step sizes, B and C (Jamba, arXiv 2403.19887)."""

    has_norms = True


@dataclass(frozen=True, slots=True)
class Mamba2Sizes:
    """Sizes of a Mamba 2 layer: heads, groups of heads that share B and C, channels per head, and
    elements per channel's state."""

    n_head: int
    n_group: int
    head_dim: int
    n_state: int

    @classmethod
    def read(cls, hp: HParams) -> Mamba2Sizes:
        """Read the `ssm.*` keys of a file.

        Raises:
            InvalidGGUF: the heads do not divide the channels, or the groups do not divide the
                heads.
        """
        keys = hp.keys
        n_inner, n_head = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
        n_group = keys.integer("ssm.group_count")
        if n_inner % n_head or n_group < 1 or n_head % n_group:
            raise keys.invalid(
                "the {n} channels, {heads} heads and {groups} groups in a Mamba 2 layer do not fit"
                " together",
                n=n_inner, heads=n_head, groups=n_group,
            )  # fmt: skip
        return cls(n_head, n_group, n_inner // n_head, keys.integer("ssm.state_size"))


class Mamba2(Mixer):
    """Mamba 2 layer, a state-space dual model (arXiv 2405.21060), split by heads.

    B and C belong to groups of heads; ranks that share a group both compute them.
    `norm_is_optional` says whether a file may omit `ssm_norm`.
    """

    norm_is_optional: ClassVar[bool] = False

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        sizes = self.sizes = Mamba2Sizes.read(hp)
        heads, n_head, n_inner = split.state_heads, sizes.n_head, sizes.n_head * sizes.head_dim
        self.groups = HeadGroups(heads, split.state_groups)
        channels, states = heads.scaled(sizes.head_dim), split.state_groups.scaled(sizes.n_state)
        n_mixed = n_inner + 2 * states.total
        mixed = (channels, states, states)
        self.ssm_in = Linear(
            hp.n_embd, n_inner + n_mixed + n_head, Shard(0, (channels, *mixed, heads))
        )
        self.ssm_conv1d = CausalConv(n_mixed, hp.keys.integer("ssm.conv_kernel"), *mixed)
        self.ssm_dt = Vector((n_head,), Shard(0, heads), (".bias",))
        self.ssm_a = Vector((n_head, 1), Shard(0, heads), ("",))
        self.ssm_d = Vector((n_head, 1), Shard(0, heads), ("",))
        self.ssm_norm = GroupedRMSNorm(
            n_inner, self.groups, hp.norm_eps, optional=self.norm_is_optional
        )
        self.ssm_out = Linear(n_inner, hp.n_embd, Shard(1, heads), split.group)
        self.state = RecurrentState(
            conv=self.ssm_conv1d.memory, ssm=(heads, (sizes.head_dim, sizes.n_state))
        )

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        sizes = Mamba2Sizes.read(hp)
        return BlockDims(n_state_head=sizes.n_head, n_state_group=sizes.n_group)

    @property
    def bias(self) -> Tensor | None:
        return self.ssm_out.bias

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        y = self.scan(x, ctx) if ctx.owns(self.split.state_heads) else None
        y = self.ssm_norm(y, ctx)
        return None if y is None else self.ssm_out(y)

    def scan(self, x: Tensor, ctx: Context) -> Tensor:
        """Return the gated outputs of this rank's heads, (T, heads × head_dim)."""
        sizes = self.sizes
        n_head = self.split.state_heads.size(ctx.rank)
        n_x = n_head * sizes.head_dim
        n_bc = self.split.state_groups.size(ctx.rank) * sizes.n_state
        gate, mixed, dt = split_last(self.ssm_in(x), n_x, n_x + 2 * n_bc, n_head)
        mixed = self.ssm_conv1d(mixed, ctx, self.state, "conv", SILU)
        values, b, c = split_last(mixed, n_x, n_bc, n_bc)
        inputs = ScanInputs(
            split_heads(values, sizes.head_dim),
            dt,
            self.ssm_dt(),
            self.ssm_a().flatten(),
            split_heads(b, sizes.n_state),
            split_heads(c, sizes.n_state),
            self.ssm_d().flatten(),
            gate,
            ctx.index(self.groups.group_of_each_head(ctx.rank)) if self.groups.size > 1 else None,
        )
        return ctx.ops.state_space_scan(inputs, ctx.states(self.state, "ssm"))
