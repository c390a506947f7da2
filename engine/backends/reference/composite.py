"""Operations composed of other operations, which all implementations of `Ops` share."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from engine.backends.reference import recurrent
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import SILU, PlacedStates
from engine.model.forward.ops import Ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from engine.model.forward.batch import Batch, Tables
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.operands import (
        Activation,
        DeltaInputs,
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
