"""Model operations on a GPU: Tandem's kernels, with the reference as fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.gpu import attention, elementwise, moe, recurrent
from engine.backends.gpu.launch.configs import allows, target_of
from engine.backends.gpu.launch.graph import refuse_capture
from engine.backends.gpu.matmul import dequant_gemm, gemv, tile_gemm
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.backends.gpu.page_tables import PageTables, StateChains
from engine.errors import Sentence
from engine.hardware.fallbacks import Fallbacks
from engine.model.forward.batch import SMALL_BATCH
from engine.model.forward.ops import Ops
from engine.model.forward.pages import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.model.forward.batch import Batch, Tables
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.communicator import FusedAllReduce
    from engine.model.forward.expert_rows import Groups
    from engine.model.forward.operands import (
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
        Weight,
    )
    from engine.model.forward.recurrent import Chunks

MAX_TURNED = 2  # tensors that one kernel rotates


class GpuOps(Ops):
    """One rank's operations on a GPU; those without a kernel fall back to the reference.

    Nothing here reads a number back from the device, so that a token can be captured in a graph;
    values that change from token to token are in device memory.

    Args:
        x_bytes: bytes per number in a quantised activation; see `planning.footprint.x_bytes`; None
            if activations are not rounded before their product.
        fallbacks: list of what makes the model's GPUs slower.
        n_ctx: maximum number of tokens in a sequence.

    Attributes:
        tables: the sequences' page tables.
    """

    def __init__(
        self, device: torch.device, x_bytes: int | None = None, fallbacks: Fallbacks | None = None,
        n_ctx: int = PAGE,
    ) -> None:  # fmt: skip
        self._device = device
        self._fallbacks = Fallbacks() if fallbacks is None else fallbacks
        self._x_bytes = x_bytes
        self.tables = PageTables(device, n_ctx)
        self._chains = StateChains(device)
        self._angles = elementwise.Angles()

    def begin(self, batch: Batch, positions: Tensor) -> None:
        self.tables.begin(batch, positions)
        self._chains.begin(batch)

    def extend(self, tables: Tables) -> None:
        self.tables.extend(tables)

    def _miss(self, what: Sentence) -> None:
        """Report that PyTorch computes a large operation because no kernel can."""
        self._fallbacks.report("operations", [str(self._device)], what)

    # products

    def linears(self, x: Tensor, *layers: LinearLayer) -> Sequence[Tensor]:
        if x.shape[0] > tile_gemm.most_rows(target_of(x.device)):
            return self._many_rows(x, layers)
        weights = [layer.weight for layer in layers if isinstance(layer.weight, GpuPlanes)]
        if len(weights) < len(layers) or any(layer.scale is not None for layer in layers):
            return super().linears(x, *layers)
        biases = [layer.added_bias for layer in layers]
        products = gemv.products(x, weights, biases)
        if products is not None:
            return products
        if len(x) > SMALL_BATCH:
            products = tile_gemm.products(x, weights)
        if products is None:
            return super().linears(x, *layers)
        return [layer.finish(y) for layer, y in zip(layers, products, strict=True)]

    def _many_rows(self, x: Tensor, layers: Sequence[LinearLayer]) -> Sequence[Tensor]:
        """Multiply with the vendor's library, rounding x once for all layers if possible."""
        weights = [_library_operand(layer.weight) for layer in layers]
        known = [weight for weight in weights if weight is not None]
        if len(known) < len(layers) or not dequant_gemm.serves(x, known):
            return super().linears(x, *layers)
        products = dequant_gemm.products(x, known)
        return [layer.finish(y) for layer, y in zip(layers, products, strict=True)]

    def gated_linears(
        self, act: Activation, x: Tensor, gate: LinearLayer, up: LinearLayer
    ) -> Tensor:
        a, b = gate.weight, up.weight
        if not isinstance(a, GpuPlanes) or not isinstance(b, GpuPlanes):
            return super().gated_linears(act, x, gate, up)
        y = gemv.gated(x, a, b, act) if gate.is_bare and up.is_bare else None
        return super().gated_linears(act, x, gate, up) if y is None else y

    # between products

    def rms_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = elementwise.rms_norm(x, weight, bias, eps)
        return super().rms_norm(x, weight, bias, eps) if y is None else y

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        y = elementwise.layer_norm(x, weight, bias, eps)
        return super().layer_norm(x, weight, bias, eps) if y is None else y

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        y = elementwise.l2_norm(x, eps)
        return super().l2_norm(x, eps) if y is None else y

    def add_norm(
        self, x: Tensor, addend: Addend, norm: NormLayer | None,
        one_shot: FusedAllReduce | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if one_shot is not None:
            found = one_shot.add_norm(x, addend, norm, self._x_bytes)
            if found is not None:
                return found
            addend = addend.summed(one_shot.all_reduce(addend.partial, x.shape))
        found = elementwise.add_norm(x, addend, norm, self._x_bytes)
        return super().add_norm(x, addend, norm) if found is None else found

    def activate(self, act: Activation, x: Tensor) -> Tensor:
        y = elementwise.activate(act, x)
        return super().activate(act, x) if y is None else y

    def gated(self, act: Activation, gate: Tensor, up: Tensor) -> Tensor:
        y = elementwise.gated(act, gate, up)
        return super().gated(act, gate, up) if y is None else y

    def xielu(self, x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
        y = elementwise.xielu(x, positive, negative, beta, eps)
        return super().xielu(x, positive, negative, beta, eps) if y is None else y

    def softplus(self, x: Tensor) -> Tensor:
        y = elementwise.softplus(x)
        return super().softplus(x) if y is None else y

    def norm_gated(self, x: Tensor, norm: NormLayer, act: Activation, gate: Tensor) -> Tensor:
        y = elementwise.norm_gated(x, norm, act, gate)
        return super().norm_gated(x, norm, act, gate) if y is None else y

    def opened(self, x: Tensor, door: Tensor, y: Tensor, other: Tensor | None = None) -> Tensor:
        found = elementwise.opened(x, door, y, other)
        return super().opened(x, door, y, other) if found is None else found

    # recurrent layers

    def causal_conv(
        self, x: Tensor, state: States, weight: Tensor, bias: Tensor | None,
        act: Activation | None = None, gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        held, chains = self._held(state)
        if held is not None:
            y = recurrent.causal_conv(x, held, weight, bias, act, gates, chains)
            if y is not None:
                return y
            self._miss(Sentence("no kernel supports this convolution"))
        return super().causal_conv(x, state, weight, bias, act, gates)

    def delta_net(self, x: DeltaInputs, state: States) -> Tensor:
        held, chains = self._held(state)
        y = None if held is None else recurrent.delta_net(x, held, chains)
        return super().delta_net(x, state) if y is None else y

    def selective_scan(
        self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor,
        state: States,
    ) -> Tensor:  # fmt: skip
        held, chains = self._held(state)
        if held is not None:
            y = recurrent.selective_scan(x, step, a, b, c, d, gate, held, chains)
            if y is not None:
                return y
            self._miss(Sentence("no kernel supports this recurrent layer"))
        return super().selective_scan(x, step, a, b, c, d, gate, state)

    def state_space_scan(self, x: ScanInputs, state: States) -> Tensor:
        held, chains = self._held(state)
        y = None if held is None else recurrent.state_space_scan(x, held, chains)
        return super().state_space_scan(x, state) if y is None else y

    def _held(self, state: States) -> tuple[Tensor | None, Tensor | None]:
        """Return states as a kernel reads them, and the chains of its rows.

        One sequence's state has no chains; for states of longer pieces, both are None.
        """
        if isinstance(state, Tensor):
            return state, None
        chains = self._chains.find(state)
        return (None, None) if chains is None else (state.held, chains)

    def of_each(self, states: PlacedStates, compute: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Look up single tokens' states in device memory, so that the work can be captured."""
        chains = self._chains.find(states)
        if chains is None:
            return super().of_each(states, compute)
        found: list[Tensor] = []
        for row in range(len(chains)):
            before = states.held.index_select(0, chains[row, 1:2])
            state = before.clone()
            y = compute(slice(row, row + 1), state[0])
            if row:  # it may repeat the previous row, in this pass or in a later replay
                is_new = chains[row, 0] >= 0
                y = torch.where(is_new, y, found[-1])
                state = torch.where(is_new, state, before)
            found.append(y)
            states.held.index_copy_(0, chains[row, 2:3], state)
        return torch.cat(found)

    def scan_chunks(self, chunks: Chunks, state: Tensor) -> Tensor:
        y = recurrent.scan_chunks(chunks, state)
        return super().scan_chunks(chunks, state) if y is None else y

    # experts

    def assign(
        self, routing_: Routing, logits: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Groups]:
        found = moe.assign(routing_, logits, bias)
        if found is None:
            self._miss(Sentence("no kernel supports that many experts"))
            return super().assign(routing_, logits, bias)
        return found

    def experts(
        self, act: Activation, x: Tensor, gate: ExpertLayer | None, up: ExpertLayer | None,
        down: ExpertLayer, groups: Groups, factors: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        y = moe.ffn(act, x, gate, up, down, groups, factors)
        if y is None:
            self._miss(Sentence("no kernel supports these experts' matrices"))
            return super().experts(act, x, gate, up, down, groups, factors)
        return y

    def sum_of_experts(self, y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
        total = moe.sum_of_experts(y, weights, groups)
        return super().sum_of_experts(y, weights, groups) if total is None else total

    # attention

    def rope_angles(
        self, params: RopeParams, factors: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not allows(positions.device, "rope_angles"):
            return super().rope_angles(params, factors, positions)
        return self._angles(params, factors, positions)

    def ropes(
        self, xs: Sequence[Tensor], cos: Tensor, sin: Tensor, style: str,
        norms: Sequence[NormLayer] = (),
    ) -> Sequence[Tensor]:  # fmt: skip
        turned = elementwise.rope_all(xs, cos, sin, style, norms) if len(xs) <= MAX_TURNED else None
        if turned is None and norms:
            return self.ropes(self.normed(xs, norms), cos, sin, style)
        return super().ropes(xs, cos, sin, style) if turned is None else turned

    def write_cache(self, cache: LayerCache, k: Tensor, v: Tensor | None, batch: Batch) -> None:
        rows = self.tables.rows(cache.group)
        if rows is None or not attention.write(cache, k, v, rows):
            why = Sentence("no kernel can write to this cache")
            self._miss(why)
            refuse_capture(why)
            super().write_cache(cache, k, v, batch)

    def attention(
        self, q: Tensor, cache: LayerCache, batch: Batch, scores: Scores,
        sinks: Tensor | None = None, slopes: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if batch.two_way(scores.window):
            return super().attention(q, cache, batch, scores, sinks, slopes)
        rows = self.tables.rows(cache.group)
        y = rows and attention.attention(q, cache, rows, scores, sinks, slopes)
        if y is None:
            why = Sentence("no kernel can read this cache")
            self._miss(why)
            refuse_capture(why)
            return super().attention(q, cache, batch, scores, sinks, slopes)
        return y

    def new_attention(
        self, q: Tensor, k: Tensor, v: Tensor | None, cache: LayerCache, batch: Batch,
        scores: Scores, sinks: Tensor | None = None, slopes: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        # each row of a sequence is computed by programs that do not see what others write
        is_ahead = batch.two_way(scores.window) or batch.checks_drafts
        rows = None if is_ahead else self.tables.rows(cache.group)
        y = rows and attention.attention(q, cache, rows, scores, sinks, slopes, (k, v))
        if y is None:
            return super().new_attention(q, k, v, cache, batch, scores, sinks, slopes)
        return y


def _library_operand(weight: Weight | None) -> GpuPlanes | Tensor | None:
    if isinstance(weight, GpuPlain):
        return weight.data
    return weight if isinstance(weight, GpuPlanes) else None
