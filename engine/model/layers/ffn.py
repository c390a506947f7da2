"""Dense FFNs and routed experts, split by columns of the inner dimension."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.errors import InvalidGGUF
from engine.model.forward.operands import SILU, Activation, Gating, Routing
from engine.model.layers.linear import ExpertLinear, Linear, Vector
from engine.model.layers.module import Module, TensorSource
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.shares import Ranges
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.forward.expert_rows import Groups
    from engine.model.layers.hparams import HParams

Group = tuple[int, ...]


class FFN(Module):
    """FFN `down(act(gate(x)) * up(x))` (Shazeer 2020), or `down(act(up(x)))` without a gate.

    `columns` are each rank's inner columns; `n_reduce` counts all-reduces, excluding the output's.
    """

    is_nameless = True
    n_reduce = 0

    def __init__(
        self, n_embd: int, n_ff: int, columns: Ranges, group: Group, act: Activation = SILU,
        *, is_gated: bool = True,
    ) -> None:  # fmt: skip
        self.columns = columns
        self.act = act
        self.ffn_up = Linear(n_embd, n_ff, Shard(0, columns))
        self.ffn_gate = Linear(n_embd, n_ff, Shard(0, columns)) if is_gated else None
        self.ffn_down = Linear(n_ff, n_embd, Shard(1, columns), group)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Map x (T, n_embd) to this rank's partial sum (T, n_embd); None if it has no columns."""
        if not ctx.owns(self.columns):
            return None
        return self.ffn_down(self.inner(x, ctx))

    def inner(self, x: Tensor, ctx: Context) -> Tensor:
        """Return the inner activations (T, columns of this rank)."""
        if self.ffn_gate is None:
            return ctx.ops.activate(self.act, self.ffn_up(x))
        return ctx.ops.gated_linears(self.act, x, self.ffn_gate, self.ffn_up)

    @property
    def bias(self) -> Tensor | None:
        """Bias to add once, after the all-reduce."""
        return self.ffn_down.bias


Parts = tuple[tuple[str, int], ...]  # names and row counts of a fused tensor's parts, in file order


def separate(source: TensorSource, fused: str, parts: Parts, columns: tuple[int, ...]) -> None:
    """Split the matrix `fused`, its bias and its scale into views of its parts.

    Raises:
        InvalidGGUF: its shape is wrong, a part of a bias ends inside a quantised block, or the file
            also has a tensor for a part.
    """
    n_rows = sum(rows for _, rows in parts)
    for kind, shape in (("weight", (n_rows, *columns)), ("bias", (n_rows,))):
        name = f"{fused}.{kind}"
        if name not in source:
            continue
        whole = source.get(name, shape)
        start = 0
        for part, rows in parts:
            try:
                view = whole.rows(start, start + rows, f"{part}.{kind}")
            except ValueError as error:
                raise InvalidGGUF(
                    source.path, "{name} cannot be split ({error})", name=name, error=str(error)
                ) from None
            source.add_view(view, name)
            start += rows
    if f"{fused}.scale" in source:
        scale = source.get(f"{fused}.scale", (1,))
        source.tensors |= {f"{part}.scale": scale for part, _ in parts}


def separate_qkv(source: TensorSource, hp: HParams, layer: int) -> None:
    """Split a fused `attn_qkv` (rows q, then k, then v) into three tensors.

    Gated attention has a gate after each head's rows of q.
    """
    if hp.recurrent[layer] or not hp.has(layer, "attn_qkv.weight"):
        return
    block = f"blk.{layer}."
    n_q = hp.n_head[layer] * hp.head_dim_k[layer]
    n_k = hp.n_head_kv[layer] * hp.head_dim_k[layer]
    n_v = hp.n_head_kv[layer] * hp.head_dim_v[layer]
    if source.tensors[f"{block}attn_qkv.weight"].shape[0] == 2 * n_q + n_k + n_v:
        n_q *= 2
    parts = ((f"{block}attn_q", n_q), (f"{block}attn_k", n_k), (f"{block}attn_v", n_v))
    separate(source, f"{block}attn_qkv", parts, (hp.n_embd,))


def separate_gate_up(source: TensorSource, hp: HParams, layer: int) -> None:
    """Split an `ffn_up` with twice the columns (rows gate, then up), and the shared expert's
    likewise."""
    for suffix, n_ff in (("", hp.n_ff[layer]), ("_shexp", hp.n_ff_shexp[layer])):
        gate, up = f"blk.{layer}.ffn_gate{suffix}", f"blk.{layer}.ffn_up{suffix}"
        weight = source.tensors.get(f"{up}.weight")
        if n_ff and weight is not None and weight.shape[0] == 2 * n_ff:
            separate(source, up, ((gate, n_ff), (up, n_ff)), (hp.n_embd,))


GATINGS: dict[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "softmax_chosen"}
"""Gatings by their value in `expert_gating_func`; 0 or no key means the architecture's default."""


def read_routing(hp: HParams, gating: Gating = "softmax", *, normalise: bool = True) -> Routing:
    """Read the router's keys; the arguments are the architecture's defaults.

    Raises:
        InvalidGGUF: the gating is unknown, or the groups do not fit the experts.
    """
    keys = hp.keys
    number = keys.integer("expert_gating_func", 0)
    if number not in (0, *GATINGS):
        raise keys.invalid("its expert gating ({n}) is unknown", n=number)
    routing = Routing(
        hp.n_expert,
        max(hp.n_expert_used),
        GATINGS.get(number, gating),
        keys.flag("expert_weights_norm", normalise),
        keys.number("expert_weights_scale", 1.0) or 1.0,
        max(keys.integer("expert_group_count", 1), 1),
        max(keys.integer("expert_group_used_count", 1), 1),
    )
    per_group, rest = divmod(routing.n_expert, routing.n_group)
    if routing.n_group > 1 and (
        rest
        or per_group < 2
        or routing.n_group_used > routing.n_group
        or routing.n_group_used * per_group < routing.n_used
    ):
        raise keys.invalid(
            "{n} of {total} experts cannot be chosen from {groups} of {others} groups",
            n=routing.n_used, total=routing.n_expert, groups=routing.n_group_used,
            others=routing.n_group,
        )  # fmt: skip
    return routing


class SharedExpert(FFN):
    """Expert that every token uses; some models weight it by a sigmoid gate per token."""

    tensor_names: ClassVar = {f"ffn_{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}

    def __init__(
        self, hp: HParams, split: BlockSplit, layer: int, act: Activation, *, is_gated: bool
    ) -> None:
        n_ff, columns = hp.n_ff_shexp[layer], split.shared
        super().__init__(hp.n_embd, n_ff, columns, split.group, act, is_gated=is_gated)
        owners = Replicate(columns.owners())
        self.ffn_gate_inp_shexp = Vector((hp.n_embd,), owners, optional=True)

    def add_to(self, routed: Tensor | None, x: Tensor, ctx: Context) -> Tensor | None:
        """Return `routed` plus this expert's partial sum for x (T, n_embd); both may be None."""
        y, bias, gate = self(x, ctx), self.bias, self.ffn_gate_inp_shexp.value
        if y is not None and bias is not None and ctx.rank == self.columns.owners()[0]:
            y = y + bias  # on one rank only, because gate and all-reduce follow
        if y is None or gate is None:
            return add_parts(routed, y)
        return ctx.ops.opened(x, gate, y, routed)


class MoE(Module):
    """Mixture of experts: each token goes to the `n_used` experts with the best router scores.

    Every rank computes the same routing and holds some columns of every expert; the weighted sum
    and the shared expert are added before the single all-reduce (Mixtral, arXiv 2401.04088;
    DeepSeekMoE, arXiv 2401.06066).

    Args:
        is_gated: whether experts are `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
        shared_act: activation of the shared expert; None to use the routed experts'.
        width: input and output width of the routed experts; None to use the residual stream's.

    Attributes:
        n_reduce: number of all-reduces inside it, excluding its output's.
    """

    is_nameless = True
    n_reduce = 0

    def __init__(
        self, hp: HParams, split: BlockSplit, layer: int, routing: Routing,
        act: Activation = SILU, *, is_gated: bool = True, shared_act: Activation | None = None,
        width: int | None = None,
    ) -> None:  # fmt: skip
        n_embd, n_ff, n = width or hp.n_embd, hp.n_ff_exp[layer], routing.n_expert
        self.columns, self.act = split.experts, act
        self.owners = split.experts.owners()
        self.routing = replace(routing, n_used=hp.n_expert_used[layer])
        everyone, columns = Replicate(split.group), split.experts
        self.ffn_gate_inp = Linear(hp.n_embd, n, everyone)
        self.exp_probs_b = Vector((n,), everyone, (".bias", ""), optional=True)
        self.is_fused = hp.has(layer, "ffn_gate_up_exps.weight")
        self.is_gated = is_gated
        if self.is_fused:
            gate_and_up = Shard(1, (columns, columns))
            self.ffn_gate_up_exps = ExpertLinear(n, n_embd, 2 * n_ff, gate_and_up)
        else:
            if is_gated:
                self.ffn_gate_exps = ExpertLinear(n, n_embd, n_ff, Shard(1, columns))
            self.ffn_up_exps = ExpertLinear(n, n_embd, n_ff, Shard(1, columns))
        self.ffn_down_exps = ExpertLinear(n, n_ff, n_embd, Shard(2, columns))
        self.shared: SharedExpert | None = None
        if hp.n_ff_shexp[layer]:
            self.shared = SharedExpert(hp, split, layer, shared_act or act, is_gated=is_gated)

    @property
    def bias(self) -> Tensor | None:
        """None, because experts' biases are weighted before the all-reduce."""
        return None

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Map x (T, n_embd) to this rank's partial sum (T, n_embd); None if it has no columns."""
        routed = self.routed(x, x, ctx)
        return routed if self.shared is None else self.shared.add_to(routed, x, ctx)

    def routed(self, x: Tensor, router_input: Tensor, ctx: Context) -> Tensor | None:
        """Return this rank's partial sum over routed experts, (T, n_embd); None if it has none.

        x and the router's input are (T, n_embd).
        """
        if not ctx.owns(self.columns):
            return None
        logits = ctx.agree(self.ffn_gate_inp(router_input), self.owners)
        weights, groups = ctx.ops.assign(self.routing, logits, self.exp_probs_b.value)
        return self.weighted_sum(x, weights, groups, ctx)

    def weighted_sum(self, x: Tensor, weights: Tensor, groups: Groups, ctx: Context) -> Tensor:
        """Return the weighted (T, n_used) sum of each token's expert outputs for x (T, n_embd)."""
        y = self.expert_outputs(x, groups, ctx)
        return ctx.ops.sum_of_experts(y, weights, groups)

    def expert_outputs(
        self, x: Tensor, groups: Groups, ctx: Context, factors: Tensor | None = None
    ) -> Tensor:
        """Return the outputs (n_row, n_embd) of each token's experts for x (T, n_embd).

        `factors` scale each expert's input, (T, n_used).
        """
        gate = up = None
        if self.is_fused:
            gate = self.ffn_gate_up_exps
        else:
            up = self.ffn_up_exps
            if self.is_gated:
                gate = self.ffn_gate_exps
        down = self.ffn_down_exps
        return ctx.ops.experts(self.act, x, gate, up, down, groups, factors)


def add_parts(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two partial sums; either may be None."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
