"""The exact operations every backend is measured against: plain torch in F32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, normalize, relu, silu, softplus

from engine.forward.expert_rows import Groups
from engine.layers.ffn import OAI_ALPHA, SILU
from engine.ops import recurrent
from engine.ops.attention import attend

if TYPE_CHECKING:
    from engine.forward.addend import Addend
    from engine.forward.cache import LayerCache
    from engine.gpu.comm.one_shot import OneShot
    from engine.layers.ffn import Activation
    from engine.layers.linear import ExpertLinear, Linear
    from engine.layers.mixers.attention import Scores
    from engine.layers.mixers.delta_net import DeltaInputs
    from engine.layers.mixers.mamba2 import ScanInputs
    from engine.layers.moe import Routing
    from engine.layers.norm import Norm
    from engine.layers.rope import RopeParams


class ReferenceOps:
    """Stateless; one instance serves all ranks."""

    def begin(self, n_past: int, n_tokens: int, position: Tensor) -> None:
        """A pass over so many tokens after `n_past` cached ones begins.

        Args:
            position: `n_past` in the device's memory, int64 (1,); the same memory in each pass.
        """

    @property
    def memory(self) -> Sequence[Tensor]:
        """What is used beside what a pass allocates."""
        return ()

    def linears(self, x: Tensor, *layers: Linear) -> Sequence[Tensor]:
        """What several linear maps make of the same x (T, n_in)."""
        return [layer(x) for layer in layers]

    def rms_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight + bias` over the last dimension."""
        y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return _affine(y, weight, bias)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension."""
        x = x - x.mean(-1, keepdim=True)
        return self.rms_norm(x, weight, bias, eps)

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        """`x / max(|x|, eps)` over the last dimension."""
        return normalize(x, dim=-1, eps=eps)

    def add_norm(
        self, x: Tensor, addend: Addend, norm: Norm | None, one_shot: OneShot | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The stream x (T, n_embd) with what is added to it, and what a norm makes of that.

        Args:
            addend: its summand is the sum of all ranks; with `one_shot`, that of this rank.
            norm: reads the result next; None if nobody knows.
            one_shot: where the ranks' summands are added up.
        """
        if one_shot is not None:
            addend = addend.summed(one_shot.all_reduce(addend.summand, x.shape))
        delta = addend.summand
        assert delta is not None, "no rank of the group had a value"
        if addend.bias is not None:
            delta = delta + addend.bias
        if addend.norm is not None and not addend.norm.is_absent:
            delta = addend.norm.apply(delta, self)
        if addend.scale != 1.0:
            delta = delta * addend.scale
        x = x + delta
        if addend.sum_scale is not None:
            x = x * addend.sum_scale
        return x, None if norm is None or norm.is_absent else norm.apply(x, self)

    def concat(self, *parts: Tensor) -> Tensor:
        """The parts one after another in the last dimension."""
        return torch.cat(parts, dim=-1)

    def activate(self, act: Activation, x: Tensor) -> Tensor:
        """The activation of a part without a gate, element by element."""
        return ACTIVATIONS[act.kind](x)

    def gated(self, act: Activation, gate: Tensor, up: Tensor) -> Tensor:
        """`act(gate) * up`, element by element."""
        if act.kind == "oai":
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            return gate * (OAI_ALPHA * gate).sigmoid() * (up + 1)
        gate = ACTIVATIONS[act.kind](gate)
        if act.limit:
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        return gate * up

    def gated_linears(self, act: Activation, x: Tensor, gate: Linear, up: Linear) -> Tensor:
        """`act(gate(x)) * up(x)` for x (T, n_in)."""
        return self.gated(act, *self.linears(x, gate, up))

    def experts(
        self,
        act: Activation,
        x: Tensor,
        gate: ExpertLinear | None,
        up: ExpertLinear | None,
        down: ExpertLinear,
        groups: Groups,
        factors: Tensor | None = None,
    ) -> Tensor:
        """`down(act(gate(x)) * up(x))` of each token's experts, for x (T, n_in); (n_row, n_out).

        Args:
            gate: None for `down(act(up(x)))`.
            up: None where `gate` has the rows of both, those of the gate first.
            factors: on what each expert reads, (T, n_used), or None.
        """
        rows = groups.rows(x, factors)
        ups = rows if up is None else up(rows, groups)
        if gate is None:
            return down(self.activate(act, ups), groups)
        gates = gate(rows, groups)
        if up is None:
            gates, ups = gates.chunk(2, dim=-1)
        return down(self.gated(act, gates, ups), groups)

    def softplus(self, x: Tensor) -> Tensor:
        """`ln(1 + e^x)`, element by element."""
        return softplus(x)

    def xielu(self, x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
        """xIELU, element by element (see `engine.models.apertus.Xielu`)."""
        below = (x.clamp(max=eps).expm1() - x) * negative
        return torch.where(x > 0, positive * x * x, below) + beta * x

    def norm_gated(self, x: Tensor, norm: Norm, act: Activation, gate: Tensor) -> Tensor:
        """`act(gate) * norm(x)` for heads x (T, n_head, n) and gate (T, n_head × n)."""
        return self.gated(act, gate, norm.apply(x, self).flatten(1))

    def opened(self, x: Tensor, door: Tensor, y: Tensor, other: Tensor | None = None) -> Tensor:
        """`other + sigmoid(x · door) * y` for x (T, n_in), door (n_in,), y and other (T, n)."""
        y = y * (x @ door)[:, None].sigmoid()
        return y if other is None else other + y

    def causal_conv(
        self, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None,
        act: Activation | None = None, gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """See `engine.ops.recurrent.causal_conv`; then the activation, if there is one.

        Args:
            gates: factors on x, and on what comes of it last, both like x.
        """
        y = recurrent.causal_conv(x if gates is None else gates[0] * x, state, weight, bias)
        if act is not None:
            y = self.activate(act, y)
        return y if gates is None else gates[1] * y

    def delta_net(self, x: DeltaInputs, state: Tensor) -> Tensor:
        """Gated delta net from what projections make; (T, n_head, head_dim).

        Args:
            state: (n_head, head_dim, head_dim), updated in place.
        """
        q, k = self.l2_norm(x.q, x.eps), self.l2_norm(x.k, x.eps)
        if x.key_of is not None:
            q, k = q.index_select(1, x.key_of), k.index_select(1, x.key_of)
        steps = self.softplus(x.step + x.step_bias)
        log_decay = steps * (x.rate if steps.dim() == 2 else x.rate[:, None])
        beta = x.beta.sigmoid()
        q = q * x.scale
        return recurrent.gated_delta_rule(q, k, x.v, log_decay, beta, state, self.scan_chunks)

    def selective_scan(
        self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor,
        state: Tensor,
    ) -> Tensor:  # fmt: skip
        """`silu(gate) * y` for gate (T, channels) and y of `engine.ops.recurrent.selective_scan`.

        Args:
            step: becomes Δ by the softplus, (T, channels).
        """
        y = recurrent.selective_scan(x, self.softplus(step), a, b, c, d, state)
        return self.gated(SILU, gate, y)

    def state_space_scan(self, x: ScanInputs, state: Tensor) -> Tensor:
        """Mamba 2 from what projections make; (T, n_head × head_dim).

        Args:
            state: (n_head, head_dim, n_state), updated in place.
        """
        dt, b, c = self.softplus(x.step + x.step_bias), x.b, x.c
        if x.key_of is not None:
            b, c = b.index_select(1, x.key_of), c.index_select(1, x.key_of)
        y = recurrent.state_space_scan(
            x.values, dt, x.rate, b, c, x.skip, state, self.scan_chunks
        )  # fmt: skip
        return self.gated(SILU, x.gate, y.flatten(1))

    def scan_chunks(self, chunks: recurrent.Chunks, state: Tensor) -> Tensor:
        """See `engine.ops.recurrent.scan_chunks`; the state may have any strides."""
        return recurrent.scan_chunks(chunks, state)

    def route(self, routing: Routing, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each token's experts, both (T, n_used); see `Routing`.

        Args:
            logits: (T, n_expert)
            bias: (n_expert,), counts in the choice but not in the weights; or None.
        """
        if routing.gating == "softmax_chosen":
            best, chosen = (logits if bias is None else logits + bias).topk(routing.n_used)
            weights = (
                logits.gather(-1, chosen).softmax(-1) if bias is not None else best.softmax(-1)
            )
            return weights * routing.scale, chosen
        scores = logits.softmax(-1) if routing.gating == "softmax" else logits.sigmoid()
        wanted = scores if bias is None else scores + bias
        if bias is None and routing.n_group == 1:
            wanted = logits  # in the same order, but large ones do not all become 1
        if routing.n_group > 1:
            wanted = _only_best_groups(wanted, routing.n_group, routing.n_group_used)
        chosen = wanted.topk(routing.n_used).indices
        weights = scores.gather(-1, chosen)
        if routing.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
        return weights if routing.scale == 1.0 else weights * routing.scale, chosen

    def assign(
        self, routing: Routing, logits: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Groups]:
        """What `route` says, in the order of experts: weights (T, n_used) and the rows."""
        weights, chosen = self.route(routing, logits, bias)
        chosen, place = chosen.sort(-1)
        return weights.gather(-1, place), Groups.of(chosen)

    def sum_of_experts(self, y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
        """Add up each token's rows of y (n_row, n), times weights (T, n_used) if any; (T, n)."""
        return groups.sum(y if weights is None else y * groups.weights(weights))

    def rope_angles(
        self, params: RopeParams, factors: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, 1, n_rot / 2) for positions (T,), computed in F64."""
        frequency = frequencies(params, factors, positions.device)
        angles = positions.double()[:, None, None] * frequency
        magnitude = params.magnitude()
        return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        """Rotate the first elements of each head of x (T, n_head, head_dim) (arXiv 2104.09864)."""
        n_rot = 2 * cos.shape[-1]
        rotated, rest = x[..., :n_rot], x[..., n_rot:]
        if style == "norm":
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        else:
            a, b = rotated.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
        return turned if not rest.shape[-1] else torch.cat((turned, rest), dim=-1)

    def ropes(
        self, xs: Sequence[Tensor], cos: Tensor, sin: Tensor, style: str, norms: Sequence[Norm] = ()
    ) -> Sequence[Tensor]:
        """The same for several tensors with heads of one size, after their norms if there are."""
        return [self.rope(x, cos, sin, style) for x in normed(self, xs, norms)]

    def remember(self, cache: LayerCache, k: Tensor, v: Tensor | None, start: int) -> None:
        """Store k and v in the cache; see `LayerCache.write`."""
        cache.write(k, v, start)

    def attention(
        self,
        q: Tensor,
        cache: LayerCache,
        n_past: int,
        scores: Scores,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Causal softmax attention of q (T, n_head, head_dim) over the cache.

        The cache holds n_past + T positions already; query t sees the first n_past + t + 1, or the
        last of them that window and chunk let it see.

        Args:
            sinks: (n_head,), logits that take weight but have no value; or None.
            slopes: (n_head,), taken off the scores for each token between (ALiBi, arXiv
                2108.12409); or None.

        Returns:
            (T, n_head, head_dim_v)
        """
        return attend(q, cache, n_past, scores, sinks, slopes)

    def new_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: LayerCache,
        n_past: int,
        scores: Scores,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """`remember`, then `attention`."""
        self.remember(cache, k, v, n_past)
        return self.attention(q, cache, n_past, scores, sinks, slopes)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: torch.square(relu(x)),
    "sigmoid": torch.sigmoid,
}
SMALLEST_SUM = 6.103515625e-5
"""The least that chosen weights are divided by: F16's smallest normal number, as in llama.cpp."""


def normed(ops: ReferenceOps, xs: Sequence[Tensor], norms: Sequence[Norm]) -> Sequence[Tensor]:
    """Tensors after the norm of each, if there are norms."""
    if not norms:
        return xs
    both = zip(xs, norms, strict=True)
    return [x if norm.is_absent else norm.apply(x, ops) for x, norm in both]


def frequencies(params: RopeParams, factors: Tensor | None, device: torch.device) -> Tensor:
    """By how much the angle of each pair grows from position to position: F64, (n_rot / 2,)."""
    pair = torch.arange(params.n_rot // 2, dtype=torch.float64, device=device)
    frequency = params.base ** (-2 * pair / params.n_rot)
    if factors is not None:
        frequency = frequency / factors.double()
    if not params.yarn:
        return frequency * params.scale
    low, high = params.yarn_bounds()
    kept = 1 - ((pair - low) / max(0.001, high - low)).clamp(0, 1)
    return frequency * (params.scale * (1 - kept) + kept)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _only_best_groups(scores: Tensor, n_group: int, n_used: int) -> Tensor:
    """Scores (T, n_expert) with -inf outside the groups whose two best experts sum highest."""
    groups = scores.reshape(scores.shape[0], n_group, -1)
    best = groups.topk(2, dim=-1).values.sum(-1).topk(n_used, dim=-1).indices
    kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, value=True)
    return groups.masked_fill(~kept[..., None], -torch.inf).reshape(scores.shape)
