"""The reference operations that every backend is measured against: plain torch in F32."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, normalize, relu, silu, softplus

from engine.backends.reference import recurrent
from engine.backends.reference.attention import attend
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import OAI_ALPHA, SILU, PlacedStates
from engine.model.forward.ops import Ops

if TYPE_CHECKING:
    from engine.model.forward.batch import Batch, Tables
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.operands import (
        Activation,
        DeltaInputs,
        RopeParams,
        Routing,
        ScanInputs,
        Scores,
        States,
    )
    from engine.model.forward.ops import Addend, ExpertLayer, FusedAllReduce, LinearLayer, NormLayer


class CompositeOps(Ops):
    """Operations composed of others; an implementation adds the rest.

    An implementation with a kernel for a composed operation overrides it, and falls back on this
    class where the kernel cannot be used.
    """

    @abstractmethod
    def scan_chunks(self, chunks: recurrent.Chunks, state: Tensor) -> Tensor:
        """Scan chunks of tokens, see `engine.backends.reference.recurrent.scan_chunks`.

        `state` may have any strides.
        """

    @abstractmethod
    def route(self, routing: Routing, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of each token's experts, both (T, n_used); see `Routing`.

        Args:
            logits: the router's logits, (T, n_expert).
            bias: bias for the choice, which does not change the weights, (n_expert,); or None.
        """

    @abstractmethod
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        """Rotate the first elements of each head of x (T, n_head, head_dim) (arXiv 2104.09864)."""

    def extend(self, tables: Tables) -> None:
        """Do nothing: nothing is computed ahead of the host."""

    def linears(self, x: Tensor, *layers: LinearLayer) -> Sequence[Tensor]:
        return [layer(x) for layer in layers]

    def gated_linears(
        self, act: Activation, x: Tensor, gate: LinearLayer, up: LinearLayer
    ) -> Tensor:
        return self.gated(act, *self.linears(x, gate, up))

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        return self.rms_norm(x - x.mean(-1, keepdim=True), weight, bias, eps)

    def add_norm(
        self,
        x: Tensor,
        addend: Addend,
        norm: NormLayer | None,
        one_shot: FusedAllReduce | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if one_shot is not None:
            addend = addend.summed(one_shot.all_reduce(addend.partial, x.shape))
        delta = addend.partial
        assert delta is not None, "no rank of the group had a value"
        if addend.bias is not None:
            delta = delta + addend.bias
        if addend.norm is not None and not addend.norm.is_absent:
            delta = addend.norm.apply(delta, self)
        if addend.scale != 1.0:
            delta = delta * addend.scale
        if norm is not None and norm.is_absent:
            norm = None
        if addend.sum_scale is None:
            return self.sum_and_norm(x, delta, norm)
        x = (x + delta) * addend.sum_scale
        return x, None if norm is None else norm.apply(x, self)

    def sum_and_norm(
        self, x: Tensor, delta: Tensor, norm: NormLayer | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return x + delta, both (T, n_embd), and its norm or None without one."""
        x = x + delta
        return x, None if norm is None else norm.apply(x, self)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return (x / cap).tanh() * cap

    def norm_gated(self, x: Tensor, norm: NormLayer, act: Activation, gate: Tensor) -> Tensor:
        return self.gated(act, gate, norm.apply(x, self).flatten(1))

    def causal_conv(
        self, x: Tensor, state: States, weight: Tensor, bias: Tensor | None,
        act: Activation | None = None, gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        if isinstance(state, PlacedStates):
            return self.of_each(
                state,
                lambda rows, one: self.causal_conv(
                    x[rows], one, weight, bias, act, gates and (gates[0][rows], gates[1][rows])
                ),
            )
        y = recurrent.causal_conv(x if gates is None else gates[0] * x, state, weight, bias)
        if act is not None:
            y = self.activate(act, y)
        return y if gates is None else gates[1] * y

    def delta_net(self, x: DeltaInputs, state: States) -> Tensor:
        if isinstance(state, PlacedStates):
            return self.of_each(state, lambda rows, one: self.delta_net(x.rows(rows), one))
        q, k = self.l2_norm(x.q, x.eps), self.l2_norm(x.k, x.eps)
        if x.key_of is not None:
            q, k = q.index_select(1, x.key_of), k.index_select(1, x.key_of)
        dt = self.softplus(x.step + x.step_bias)
        log_decay = dt * (x.rate if dt.dim() == 2 else x.rate[:, None])
        beta = x.beta.sigmoid()
        q = q * x.scale
        return recurrent.gated_delta_rule(q, k, x.v, log_decay, beta, state, self.scan_chunks)

    def selective_scan(
        self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor,
        state: States,
    ) -> Tensor:  # fmt: skip
        if isinstance(state, PlacedStates):
            return self.of_each(
                state,
                lambda rows, one: self.selective_scan(
                    x[rows], step[rows], a, b[rows], c[rows], d, gate[rows], one
                ),
            )
        y = recurrent.selective_scan(x, self.softplus(step), a, b, c, d, state)
        return self.gated(SILU, gate, y)

    def state_space_scan(self, x: ScanInputs, state: States) -> Tensor:
        if isinstance(state, PlacedStates):
            return self.of_each(state, lambda rows, one: self.state_space_scan(x.rows(rows), one))
        dt, b, c = self.softplus(x.step + x.step_bias), x.b, x.c
        if x.key_of is not None:
            b, c = b.index_select(1, x.key_of), c.index_select(1, x.key_of)
        y = recurrent.state_space_scan(
            x.values, dt, x.rate, b, c, x.skip, state, self.scan_chunks
        )  # fmt: skip
        return self.gated(SILU, x.gate, y.flatten(1))

    def of_each(self, states: PlacedStates, compute: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Return what sequences compute, one after the other.

        Args:
            states: state of each sequence.
            compute: returns the result of some rows of one sequence, and updates its state.
        """
        found: list[Tensor] = []
        row, last = 0, None
        for piece in states.batch.pieces:
            if piece == last:  # the last row of a captured pass, repeatedly
                found.append(found[-1])
                continue
            last, state = piece, states.held[piece.slot]
            if piece.read_slot != piece.slot:
                state.copy_(states.held[piece.read_slot])
            found.append(compute(slice(row, row + piece.n), state))
            row += piece.n
        return found[0] if len(found) == 1 else torch.cat(found)

    def assign(
        self, routing: Routing, logits: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Groups]:
        weights, chosen = self.route(routing, logits, bias)
        chosen, place = chosen.sort(-1)
        return weights.gather(-1, place), Groups.of(chosen)

    def experts(
        self,
        act: Activation,
        x: Tensor,
        gate: ExpertLayer | None,
        up: ExpertLayer | None,
        down: ExpertLayer,
        groups: Groups,
        factors: Tensor | None = None,
    ) -> Tensor:
        rows = self.expert_rows(x, groups, factors)
        ups = rows if up is None else up(rows, groups)
        if gate is None:
            return down(self.activate(act, ups), groups)
        gates = gate(rows, groups)
        if up is None:
            gates, ups = gates.chunk(2, dim=-1)
        return down(self.gated(act, gates, ups), groups)

    def expert_rows(self, x: Tensor, groups: Groups, factors: Tensor | None) -> Tensor:
        """Return what experts multiply of x (T, n_in), see `Weight.grouped` and `experts`."""
        return groups.rows(x, factors)

    def ropes(
        self,
        xs: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        style: str,
        norms: Sequence[NormLayer] = (),
    ) -> Sequence[Tensor]:
        return [self.rope(x, cos, sin, style) for x in self.normed(xs, norms)]

    def normed(self, xs: Sequence[Tensor], norms: Sequence[NormLayer]) -> Sequence[Tensor]:
        """Normalise each tensor with its norm, if there are norms."""
        if not norms:
            return xs
        pairs = zip(xs, norms, strict=True)
        return [x if norm.is_absent else norm.apply(x, self) for x, norm in pairs]

    def new_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: LayerCache,
        batch: Batch,
        scores: Scores,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        self.write_cache(cache, k, v, batch)
        return self.attention(q, cache, batch, scores, sinks, slopes)


class ReferenceOps(CompositeOps):
    """Operations in plain torch in F32, the oracle of the others.

    They have no state, so one instance serves all ranks.
    """

    def begin(self, batch: Batch, positions: Tensor) -> None:
        """Do nothing: no operation keeps state between passes."""

    @property
    def memory(self) -> Sequence[Tensor]:
        return ()

    def rms_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return _affine(y, weight, bias)

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        return normalize(x, dim=-1, eps=eps)

    def concat(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, dim=-1)

    def activate(self, act: Activation, x: Tensor) -> Tensor:
        return ACTIVATIONS[act.kind](x)

    def gated(self, act: Activation, gate: Tensor, up: Tensor) -> Tensor:
        if act.kind == "oai":
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            return gate * (OAI_ALPHA * gate).sigmoid() * (up + 1)
        gate = ACTIVATIONS[act.kind](gate)
        if act.limit:
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        return gate * up

    def softplus(self, x: Tensor) -> Tensor:
        return softplus(x)

    def xielu(self, x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
        below = (x.clamp(max=eps).expm1() - x) * negative
        return torch.where(x > 0, positive * x * x, below) + beta * x

    def opened(self, x: Tensor, door: Tensor, y: Tensor, other: Tensor | None = None) -> Tensor:
        y = y * (x @ door)[:, None].sigmoid()
        return y if other is None else other + y

    def scan_chunks(self, chunks: recurrent.Chunks, state: Tensor) -> Tensor:
        return recurrent.scan_chunks(chunks, state)

    def route(self, routing: Routing, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if routing.gating == "softmax_chosen":
            best, chosen = (logits if bias is None else logits + bias).topk(routing.n_used)
            weights = (
                logits.gather(-1, chosen).softmax(-1) if bias is not None else best.softmax(-1)
            )
            return weights * routing.scale, chosen
        scores = logits.softmax(-1) if routing.gating == "softmax" else logits.sigmoid()
        ranking = scores if bias is None else scores + bias
        if bias is None and routing.n_group == 1:
            ranking = logits  # same order, and large logits do not all become 1
        if routing.n_group > 1:
            ranking = _only_best_groups(ranking, routing.n_group, routing.n_group_used)
        chosen = ranking.topk(routing.n_used).indices
        weights = scores.gather(-1, chosen)
        if routing.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
        return weights if routing.scale == 1.0 else weights * routing.scale, chosen

    def sum_of_experts(self, y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
        return groups.sum(y if weights is None else y * groups.weights(weights))

    def rope_angles(
        self, params: RopeParams, factors: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        # in F64: far positions times high frequencies lose too many bits in F32
        frequency = frequencies(params, factors, positions.device)
        angles = positions.double()[:, None, None] * frequency
        magnitude = params.magnitude()
        return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        n_rot = 2 * cos.shape[-1]
        plain, rest = x[..., :n_rot], x[..., n_rot:]
        if style == "norm":
            a, b = plain[..., 0::2], plain[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        else:
            a, b = plain.chunk(2, dim=-1)
            rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
        return rotated if not rest.shape[-1] else torch.cat((rotated, rest), dim=-1)

    def write_cache(self, cache: LayerCache, k: Tensor, v: Tensor | None, batch: Batch) -> None:
        cache.write(k, v, batch)

    def attention(
        self,
        q: Tensor,
        cache: LayerCache,
        batch: Batch,
        scores: Scores,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        return attend(q, cache, batch, scores, sinks, slopes)


REFERENCE = ReferenceOps()
"""Shared instance, which the other implementations fall back on."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: torch.square(relu(x)),
    "sigmoid": torch.sigmoid,
}
"""Function of each kind of activation; "oai" exists only with a gate."""

SMALLEST_SUM = 6.103515625e-5
"""Smallest divisor of the chosen experts' weights: F16's smallest normal number (as llama.cpp)."""


def frequencies(params: RopeParams, factors: Tensor | None, device: torch.device) -> Tensor:
    """Return the angle by which each pair turns per position, F64 (n_rot / 2,)."""
    pair = torch.arange(params.n_rot // 2, dtype=torch.float64, device=device)
    frequency = params.base ** (-2 * pair / params.n_rot)
    if factors is not None:
        frequency = frequency / factors.double()
    if not params.yarn:
        return frequency * params.scale
    low, high = params.yarn_bounds()
    unscaled = 1 - ((pair - low) / max(0.001, high - low)).clamp(0, 1)
    return frequency * (params.scale * (1 - unscaled) + unscaled)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return `x * weight + bias`, each as far as given."""
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _only_best_groups(scores: Tensor, n_group: int, n_used: int) -> Tensor:
    """Set scores (T, n_expert) to -inf outside the groups whose two best experts sum highest."""
    groups = scores.reshape(scores.shape[0], n_group, -1)
    best = groups.topk(2, dim=-1).values.sum(-1).topk(n_used, dim=-1).indices
    is_best = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, value=True)
    return groups.masked_fill(~is_best[..., None], -torch.inf).reshape(scores.shape)
