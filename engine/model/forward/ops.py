"""Operations that layers call, in plain torch in F32: the reference, and the base of the backends.

`CpuOps` and `GpuOps` override the operations they have kernels for, and fall back to these methods
if a kernel does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, normalize, relu, silu, softplus

from engine.model.forward import recurrent
from engine.model.forward.attention import attend
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import (
    OAI_ALPHA,
    SILU,
    Activation,
    Addend,
    DeltaInputs,
    ExpertLayer,
    LinearLayer,
    NormLayer,
    PlacedStates,
    RopeParams,
    Routing,
    ScanInputs,
    Scores,
    States,
)

if TYPE_CHECKING:
    from engine.model.forward.batch import Batch, Tables
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.communicator import FusedAllReduce


class Ops:
    """Operations of one rank. Tensors are F32 and on its device; T is the number of tokens.

    This class has no state, so one instance serves all ranks.
    """

    def begin(self, batch: Batch, positions: Tensor) -> None:
        """Prepare for a pass; `positions` (T,) are on the device, always at the same address for
        single tokens."""

    def extend(self, tables: Tables) -> None:
        """Give more pages to the only sequence in a running pass.

        Run-ahead steps that have already started are unaffected; later ones use these tables.
        """

    @property
    def memory(self) -> Sequence[Tensor]:
        """Persistent memory of the operations, apart from a pass's allocations."""
        return ()

    def linears(self, x: Tensor, *layers: LinearLayer) -> Sequence[Tensor]:
        """Apply several linear maps to the same x (T, n_in)."""
        return [layer(x) for layer in layers]

    def gated_linears(
        self, act: Activation, x: Tensor, gate: LinearLayer, up: LinearLayer
    ) -> Tensor:
        """Return `act(gate(x)) * up(x)` for x (T, n_in)."""
        return self.gated(act, *self.linears(x, gate, up))

    def rms_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Return `x / sqrt(mean(x²) + eps) * weight + bias` over the last dimension."""
        y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return _affine(y, weight, bias)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Return `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension."""
        return self.rms_norm(x - x.mean(-1, keepdim=True), weight, bias, eps)

    def norm(self, x: Tensor, layer: NormLayer) -> Tensor:
        """Apply a norm to x (..., n) with its layer's weight and bias."""
        normalise = self.rms_norm if layer.kind == "rms" else self.layer_norm
        return normalise(x, layer.weight, layer.bias, layer.eps)

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        """Return `x / max(|x|, eps)` over the last dimension."""
        return normalize(x, dim=-1, eps=eps)

    def add_norm(
        self, x: Tensor, addend: Addend, norm: NormLayer | None,
        one_shot: FusedAllReduce | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Add to the residual stream x (T, n_embd), and normalise the result for its next reader.

        Args:
            addend: value to add: the sum over ranks or, with `one_shot`, this rank's partial sum.
            norm: norm that reads the result next; None if unknown.
            one_shot: all-reduce that sums the ranks' partial sums.

        Returns:
            The residual stream, and the normalised stream if there is a norm, else None.
        """
        if one_shot is not None:
            addend = addend.summed(one_shot.all_reduce(addend.partial, x.shape))
        delta = addend.partial
        assert delta is not None, "no rank of the group had a value"
        if addend.bias is not None:
            delta = delta + addend.bias
        if addend.norm is not None and not addend.norm.is_absent:
            delta = self.norm(delta, addend.norm)
        if addend.scale != 1.0:
            delta = delta * addend.scale
        if norm is not None and norm.is_absent:
            norm = None
        if addend.sum_scale is None:
            return self.sum_and_norm(x, delta, norm)
        x = (x + delta) * addend.sum_scale
        return x, None if norm is None else self.norm(x, norm)

    def sum_and_norm(
        self, x: Tensor, delta: Tensor, norm: NormLayer | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return x + delta, both (T, n_embd), and the normalised sum if there is a norm."""
        x = x + delta
        return x, None if norm is None else self.norm(x, norm)

    def concat(self, *parts: Tensor) -> Tensor:
        """Join the parts along the last dimension."""
        return torch.cat(parts, dim=-1)

    def activate(self, act: Activation, x: Tensor) -> Tensor:
        """Apply the activation of an ungated FFN, elementwise."""
        return ACTIVATIONS[act.kind](x)

    def gated(self, act: Activation, gate: Tensor, up: Tensor) -> Tensor:
        """Return `act(gate) * up`, elementwise."""
        if act.kind == "oai":
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            return gate * (OAI_ALPHA * gate).sigmoid() * (up + 1)
        gate = ACTIVATIONS[act.kind](gate)
        if act.limit:
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        return gate * up

    def softplus(self, x: Tensor) -> Tensor:
        """Return `ln(1 + e^x)`, elementwise."""
        return softplus(x)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Return `cap * tanh(x / cap)`, elementwise."""
        return (x / cap).tanh() * cap

    def xielu(self, x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
        """Apply xIELU, elementwise (see `architectures.llama_variants.Xielu`)."""
        below = (x.clamp(max=eps).expm1() - x) * negative
        return torch.where(x > 0, positive * x * x, below) + beta * x

    def norm_gated(self, x: Tensor, norm: NormLayer, act: Activation, gate: Tensor) -> Tensor:
        """Return `act(gate) * norm(x)` for heads x (T, n_head, n) and gate (T, n_head × n)."""
        return self.gated(act, gate, self.norm(x, norm).flatten(1))

    def opened(self, x: Tensor, door: Tensor, y: Tensor, other: Tensor | None = None) -> Tensor:
        """Return `other + sigmoid(x · door) * y`.

        Args:
            x: input of the gate, (T, n_in).
            door: vector that maps x to the gate's logit, (n_in,).
            y: gated value, (T, n).
            other: value to add, (T, n); or None.
        """
        y = y * (x @ door)[:, None].sigmoid()
        return y if other is None else other + y

    def causal_conv(
        self, x: Tensor, state: States, weight: Tensor, bias: Tensor | None,
        act: Activation | None = None, gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Convolve over time (see `recurrent.causal_conv`), then activate.

        Args:
            state: inputs before x, (channels, K - 1) per sequence, updated in place.
            act: activation of the result, or None.
            gates: factors on x and on the activated result, both shaped like x.
        """
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
        """Run a gated delta net over the projected operands; return (T, n_head, head_dim).

        `state` has (n_head, head_dim, head_dim) per sequence and is updated in place.
        """
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
        """Return `silu(gate) * y` with y of `recurrent.selective_scan` (Mamba 1).

        Args:
            step: step size Δ before the softplus, (T, channels).
            gate: gate before its SiLU, (T, channels).
            state: recurrent state, (channels, n_state) per sequence, updated in place.
        """
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
        """Run a Mamba 2 scan over the projected operands; return (T, n_head × head_dim).

        `state` has (n_head, head_dim, n_state) per sequence and is updated in place.
        """
        if isinstance(state, PlacedStates):
            return self.of_each(state, lambda rows, one: self.state_space_scan(x.rows(rows), one))
        dt, b, c = self.softplus(x.step + x.step_bias), x.b, x.c
        if x.key_of is not None:
            b, c = b.index_select(1, x.key_of), c.index_select(1, x.key_of)
        scan = self.scan_chunks
        y = recurrent.state_space_scan(x.values, dt, x.rate, b, c, x.skip, state, scan)
        return self.gated(SILU, x.gate, y.flatten(1))

    def of_each(self, states: PlacedStates, compute: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Run a recurrent operation for each sequence in turn, and concatenate the results.

        `compute` takes some rows and the state of their sequence, which it updates.
        """
        results: list[Tensor] = []
        row, last = 0, None
        for piece in states.batch.pieces:
            if piece == last:  # a captured pass is padded with copies of its last row
                results.append(results[-1])
                continue
            last, state = piece, states.held[piece.state_slot]
            if piece.read_slot != piece.state_slot:
                state.copy_(states.held[piece.read_slot])
            results.append(compute(slice(row, row + piece.n), state))
            row += piece.n
        return results[0] if len(results) == 1 else torch.cat(results)

    def scan_chunks(self, chunks: recurrent.Chunks, state: Tensor) -> Tensor:
        """See `recurrent.scan_chunks`; `state` may have any strides."""
        return recurrent.scan_chunks(chunks, state)

    def assign(
        self, routing: Routing, logits: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Groups]:
        """Select each token's experts.

        Args:
            logits: router logits, (T, n_expert).
            bias: bias of the selection, which does not change the weights, (n_expert,); or None.

        Returns:
            Weights (T, n_used) in ascending order of experts, and the rows grouped by expert.
        """
        weights, chosen = self.route(routing, logits, bias)
        chosen, place = chosen.sort(-1)
        return weights.gather(-1, place), Groups.of(chosen)

    def route(self, routing: Routing, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of each token's experts, both (T, n_used); see `Routing`.

        For the arguments see `assign`.
        """
        if routing.gating == "softmax_chosen":
            best, chosen = (logits if bias is None else logits + bias).topk(routing.n_used)
            weights = (
                logits.gather(-1, chosen).softmax(-1) if bias is not None else best.softmax(-1)
            )
            return weights * routing.scale, chosen
        scores = logits.softmax(-1) if routing.gating == "softmax" else logits.sigmoid()
        ranking = scores if bias is None else scores + bias
        if bias is None and routing.n_group == 1:
            ranking = logits  # same order, but large logits do not all become 1
        if routing.n_group > 1:
            ranking = _only_best_groups(ranking, routing.n_group, routing.n_group_used)
        chosen = ranking.topk(routing.n_used).indices
        weights = scores.gather(-1, chosen)
        if routing.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=MIN_SUM)
        return weights if routing.scale == 1.0 else weights * routing.scale, chosen

    def experts(
        self, act: Activation, x: Tensor, gate: ExpertLayer | None, up: ExpertLayer | None,
        down: ExpertLayer, groups: Groups, factors: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return `down(act(gate(x)) * up(x))` for each token's experts, (n_row, n_out).

        Args:
            x: input, (T, n_in).
            gate: gate matrices; None for `down(act(up(x)))`.
            up: up matrices; None if `gate` has the rows of both, gate first.
            factors: factor on each expert's input, (T, n_used); or None.
        """
        rows = self.expert_rows(x, groups, factors)
        ups = rows if up is None else up(rows, groups)
        if gate is None:
            return down(self.activate(act, ups), groups)
        gates = gate(rows, groups)
        if up is None:
            gates, ups = gates.chunk(2, dim=-1)
        return down(self.gated(act, gates, ups), groups)

    def expert_rows(self, x: Tensor, groups: Groups, factors: Tensor | None) -> Tensor:
        """Return the experts' input rows from x (T, n_in); see `Weight.grouped` and `experts`."""
        return groups.rows(x, factors)

    def sum_of_experts(self, y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
        """Sum each token's rows of y (n_row, n), weighted by (T, n_used) if given, to (T, n)."""
        return groups.sum(y if weights is None else y * groups.weights(weights))

    def rope_angles(
        self, params: RopeParams, factors: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each (T, 1, n_rot / 2), for positions (T,)."""
        # in F64, because far positions times high frequencies lose too many bits in F32
        frequency = frequencies(params, factors, positions.device)
        angles = positions.double()[:, None, None] * frequency
        magnitude = params.magnitude()
        return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()

    def ropes(
        self, xs: Sequence[Tensor], cos: Tensor, sin: Tensor, style: str,
        norms: Sequence[NormLayer] = (),
    ) -> Sequence[Tensor]:  # fmt: skip
        """Apply RoPE to tensors of equal head size, (T, n_head, head_dim), after their `norms`, if
        any."""
        return [self.rope(x, cos, sin, style) for x in self.normed(xs, norms)]

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        """Rotate the first elements of each head of x (T, n_head, head_dim) (arXiv 2104.09864)."""
        n_rot = 2 * cos.shape[-1]
        plain, rest = x[..., :n_rot], x[..., n_rot:]
        if style == "norm":
            a, b = plain[..., 0::2], plain[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        else:
            a, b = plain.chunk(2, dim=-1)
            rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
        return rotated if not rest.shape[-1] else torch.cat((rotated, rest), dim=-1)

    def normed(self, xs: Sequence[Tensor], norms: Sequence[NormLayer]) -> Sequence[Tensor]:
        """Normalise each tensor with its norm, if there are norms."""
        if not norms:
            return xs
        pairs = zip(xs, norms, strict=True)
        return [x if norm.is_absent else self.norm(x, norm) for x, norm in pairs]

    def write_cache(self, cache: LayerCache, k: Tensor, v: Tensor | None, batch: Batch) -> None:
        """Write k and v to the cache at the rows' positions; see `LayerCache.write`."""
        cache.write(k, v, batch)

    def attention(
        self, q: Tensor, cache: LayerCache, batch: Batch, scores: Scores,
        sinks: Tensor | None = None, slopes: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Apply causal softmax attention with q (T, n_head, head_dim) over the cache.

        The cache already holds the keys and values of all rows. Each row sees its own sequence up
        to its own position, and later positions in the same interval of `Batch.two_way`; less if a
        window or chunk limits it.

        Args:
            sinks: logits that take weight but have no value, (n_head,); or None.
            slopes: decrease in the scores per token of distance, (n_head,) (ALiBi, arXiv
                2108.12409); or None.

        Returns:
            (T, n_head, head_dim_v)
        """
        return attend(q, cache, batch, scores, sinks, slopes)

    def new_attention(
        self, q: Tensor, k: Tensor, v: Tensor | None, cache: LayerCache, batch: Batch,
        scores: Scores, sinks: Tensor | None = None, slopes: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write k and v to the cache at the rows' positions, then attend as `attention` does."""
        self.write_cache(cache, k, v, batch)
        return self.attention(q, cache, batch, scores, sinks, slopes)


REFERENCE = Ops()  # operations in plain torch, against which the others are checked

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: torch.square(relu(x)),
    "sigmoid": torch.sigmoid,
}
"""Function for each kind of activation; "oai" exists only with a gate."""

MIN_SUM = 6.103515625e-5
"""Minimum divisor for the experts' weights: F16's smallest normal number (as in llama.cpp)."""


def frequencies(params: RopeParams, factors: Tensor | None, device: torch.device) -> Tensor:
    """Return the rotation of each pair per position, F64 (n_rot / 2,)."""
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
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _only_best_groups(scores: Tensor, n_group: int, n_used: int) -> Tensor:
    """Set scores (T, n_expert) to -inf outside the groups with the highest two-expert sums."""
    groups = scores.reshape(scores.shape[0], n_group, -1)
    best = groups.topk(2, dim=-1).values.sum(-1).topk(n_used, dim=-1).indices
    is_best = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, value=True)
    return groups.masked_fill(~is_best[..., None], -torch.inf).reshape(scores.shape)
