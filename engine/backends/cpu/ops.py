"""Operations on CPUs, using our kernels where they exist and are faster than torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.cpu.kernels.cache.cache_ops import CacheOps
from engine.backends.cpu.kernels.small.small_ops import SmallOps
from engine.backends.cpu.plain_weights import float_product
from engine.backends.cpu.recurrent import RecurrentOps
from engine.backends.cpu.routing import ExpertFFN, RoutingOps
from engine.backends.cpu.weights import JointProduct, PlaneWeight, can_join
from engine.model.forward.operands import SIGMOID, PlacedStates
from engine.model.forward.ops import REFERENCE, Ops
from engine.model.forward.recording import refuse_replay

if TYPE_CHECKING:
    from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
    from engine.model.forward.batch import Batch
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.expert_rows import Groups
    from engine.model.forward.operands import (
        Activation,
        DeltaInputs,
        ExpertLayer,
        LinearLayer,
        NormLayer,
        RopeParams,
        Routing,
        ScanInputs,
        Scores,
        States,
    )

BLOCK = 256
"""Number of positions whose cosines and sines are computed together."""

N_BLOCKS = 64
"""Maximum number of cached blocks."""

CosSin = tuple[Tensor, Tensor]
"""Cosines and sines, each (T, 1, n_rot / 2)."""


class RopeCache:
    """Cached cosines and sines for one rotation; for single tokens, always in the same memory.

    They are computed in blocks of positions because torch's bits depend on the number of elements.

    Args:
        compute: function that maps positions (T,) to cosines and sines.
    """

    def __init__(self, compute: Callable[[Tensor], CosSin]) -> None:
        self._compute = compute
        self._blocks: dict[int, CosSin] = {}
        self._of_singles: dict[int, CosSin] = {}

    def move(self, positions: Sequence[int]) -> None:
        """Update the memory for this number of single tokens if it is in use."""
        held = self._of_singles.get(len(positions))
        if held is not None:
            self._write(positions, held)

    def of_singles(self, positions: Sequence[int]) -> CosSin:
        """Return the memory for this number of single tokens; see `move`."""
        n = len(positions)
        if n not in self._of_singles:
            cos, sin = self._block(0)
            held = self._of_singles[n] = cos[:n].clone(), sin[:n].clone()
            self._write(positions, held)
        return self._of_singles[n]

    def _write(self, positions: Sequence[int], goal: CosSin) -> None:
        for row, position in enumerate(positions):
            number, index = divmod(position, BLOCK)
            for held, block in zip(goal, self._block(number), strict=True):
                held[row].copy_(block[index])

    def at(self, positions: Sequence[int]) -> CosSin:
        """Return the cosines and sines for any positions, in new memory."""
        numbers = dict.fromkeys(position // BLOCK for position in positions)
        starts = {number: n * BLOCK for n, number in enumerate(numbers)}
        rows = torch.tensor([starts[p // BLOCK] + p % BLOCK for p in positions])
        blocks = [self._block(number) for number in numbers]
        cos, sin = (torch.cat(parts).index_select(0, rows) for parts in zip(*blocks, strict=True))
        return cos, sin

    def _block(self, number: int) -> CosSin:
        if number not in self._blocks:
            if len(self._blocks) == N_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            positions = torch.arange(number * BLOCK, (number + 1) * BLOCK)
            self._blocks[number] = self._compute(positions)
        return self._blocks[number]


class CpuOps(Ops):
    """One rank's CPU operations, to be used only by the rank's thread.

    Results differ from the reference in the last bits. Unsupported tensors (for example, those of
    other types) use the reference.

    Args:
        pool: the rank's threads.
    """

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._small_ops = SmallOps(pool)
        self._cache_ops = CacheOps(pool)
        self._joint: dict[tuple[LinearLayer, ...], tuple[JointProduct | None, bool]] = {}
        self._expert_ffns: dict[tuple[ExpertLayer, ...], ExpertFFN | None] = {}
        self._rope_caches: dict[tuple[int, int], RopeCache] = {}
        self._sectioned: set[tuple[int, int]] = set()
        self._singles: tuple[int, ...] = ()
        self._shifted: tuple[int, ...] = ()
        self._routing_ops = RoutingOps(pool)
        self._recurrent_ops = RecurrentOps(pool)

    @property
    def memory(self) -> Sequence[Tensor]:
        return (self._cache_ops.memory,)

    def begin(self, batch: Batch, positions: Tensor) -> None:
        self._cache_ops.begin(batch)
        self._recurrent_ops.begin(batch)
        self._singles = tuple(p.n_past for p in batch.pieces) if batch.is_of_singles else ()
        self._shifted = tuple(p.n_past + p.shift for p in batch.pieces) if self._singles else ()
        for key, rope_cache in self._rope_caches.items():
            rope_cache.move(self._shifted if key in self._sectioned else self._singles)

    def linears(self, x: Tensor, *layers: LinearLayer) -> Sequence[Tensor]:
        joint, are_bare = self._joint_product(layers)
        if joint is None or x.shape[0] > joint.n_tokens:
            return super().linears(x, *layers)
        products = joint(x)
        if are_bare:
            return products
        return [layer.finish(y) for layer, y in zip(layers, products, strict=True)]

    def gated_linears(
        self, act: Activation, x: Tensor, gate: LinearLayer, up: LinearLayer
    ) -> Tensor:
        joint, are_bare = self._joint_product((gate, up))
        kernel = self._small_ops.activation(act.kind, act.limit)
        if joint is None or not are_bare or kernel is None:
            return super().gated_linears(act, x, gate, up)
        if x.shape[0] <= joint.n_tokens:
            return joint.gated(x, *kernel)
        products = self.linears(x, gate, up)
        y = self._small_ops.gated(act.kind, act.limit, *products, in_place=True)
        return super().gated(act, *products) if y is None else y

    def _joint_product(self, layers: tuple[LinearLayer, ...]) -> tuple[JointProduct | None, bool]:
        """Return the layers' cached joint product or None, and whether none has a bias or scale."""
        if layers not in self._joint:
            are_bare = all(layer.is_bare for layer in layers)
            self._joint[layers] = _join(layers), are_bare
        return self._joint[layers]

    def rms_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = self._small_ops.rms_norm(x, weight, bias, eps)
        return super().rms_norm(x, weight, bias, eps) if y is None else y

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        y = self._small_ops.layer_norm(x, weight, bias, eps)
        return super().layer_norm(x, weight, bias, eps) if y is None else y

    def sum_and_norm(
        self, x: Tensor, delta: Tensor, norm: NormLayer | None
    ) -> tuple[Tensor, Tensor | None]:
        if norm is None:
            y = self._small_ops.pairwise("add", x, delta)
            return x + delta if y is None else y, None
        parameters = norm.weight, norm.bias, norm.eps
        found = self._small_ops.add_norm(norm.kind, x, delta, *parameters)
        return super().sum_and_norm(x, delta, norm) if found is None else found

    def activate(self, act: Activation, x: Tensor) -> Tensor:
        y = self._small_ops.gated(act.kind, 0.0, x, None)
        return super().activate(act, x) if y is None else y

    def gated(self, act: Activation, gate: Tensor, up: Tensor) -> Tensor:
        y = self._small_ops.gated(act.kind, act.limit, gate, up)
        return super().gated(act, gate, up) if y is None else y

    def softplus(self, x: Tensor) -> Tensor:
        y = self._small_ops.function("softplus", x)
        return super().softplus(x) if y is None else y

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        y = self._small_ops.function("softcap", x, cap)
        return super().softcap(x, cap) if y is None else y

    def xielu(self, x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
        y = self._small_ops.function("xielu", x, positive, negative, beta, eps)
        return super().xielu(x, positive, negative, beta, eps) if y is None else y

    def opened(self, x: Tensor, door: Tensor, y: Tensor, other: Tensor | None = None) -> Tensor:
        if x.dtype is not torch.float32:
            return super().opened(x, door, y, other)
        logits = torch.empty(x.shape[0], 1)
        float_product(self._pool, door[None, None], x[:, None], logits[:, None])
        y = y * self.activate(SIGMOID, logits)
        return y if other is None else other + y

    def assign(
        self, routing: Routing, logits: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Groups]:
        assigned = self._routing_ops.assign(routing, logits, bias)
        return super().assign(routing, logits, bias) if assigned is None else assigned

    def sum_of_experts(self, y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
        total = self._routing_ops.sum_of_experts(y, weights, groups)
        return super().sum_of_experts(y, weights, groups) if total is None else total

    def experts(
        self, act: Activation, x: Tensor, gate: ExpertLayer | None, up: ExpertLayer | None,
        down: ExpertLayer, groups: Groups, factors: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        kernel = self._small_ops.activation(act.kind, act.limit)
        if gate is not None and up is not None and factors is None and kernel is not None:
            found = self._expert_ffn((gate, up, down))
            if found is not None and found.is_fast(groups):
                return found(x, groups, *kernel)
        return super().experts(act, x, gate, up, down, groups, factors)

    def _expert_ffn(self, layers: tuple[ExpertLayer, ...]) -> ExpertFFN | None:
        if layers not in self._expert_ffns:
            are_bare = all(layer.scale is None and layer.bias is None for layer in layers)
            found = ExpertFFN.of(*(layer.weight for layer in layers)) if are_bare else None
            self._expert_ffns[layers] = found
        return self._expert_ffns[layers]

    def expert_rows(self, x: Tensor, groups: Groups, factors: Tensor | None) -> Tensor:
        n_token, n_used = groups.row_of.shape
        return x if factors is None and min(n_token, n_used) > 1 else groups.rows(x, factors)

    def rope_angles(
        self, params: RopeParams, factors: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        key = id(params), id(factors)
        if key not in self._rope_caches:
            self._rope_caches[key] = RopeCache(partial(REFERENCE.rope_angles, params, factors))
            if params.sections:
                self._sectioned.add(key)
        found = self._rope_caches[key]
        if not self._singles:
            return found.at(positions.tolist())
        return found.of_singles(self._shifted if params.sections else self._singles)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        y = self._small_ops.rope(x, cos, sin, style)
        return super().rope(x, cos, sin, style) if y is None else y

    def write_cache(self, cache: LayerCache, k: Tensor, v: Tensor | None, batch: Batch) -> None:
        if not self._cache_ops.write(cache, k, v, batch):
            refuse_replay("no kernel can write to this cache")
            super().write_cache(cache, k, v, batch)

    def attention(
        self,
        q: Tensor,
        cache: LayerCache,
        batch: Batch,
        scores: Scores,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        if batch.two_way(scores.window):
            return super().attention(q, cache, batch, scores, sinks, slopes)
        y = self._cache_ops.attention(q.contiguous(), cache, batch, scores, sinks, slopes)
        if y is not None:
            return y
        refuse_replay("no kernel can read this cache")
        return super().attention(q, cache, batch, scores, sinks, slopes)

    def causal_conv(
        self, x: Tensor, state: States, weight: Tensor, bias: Tensor | None,
        act: Activation | None = None, gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        y = self._recurrent_ops.causal_conv(x, state, weight, bias, act, gates)
        if y is not None:
            return y
        _note_places(state)
        return super().causal_conv(x, state, weight, bias, act, gates)

    def delta_net(self, x: DeltaInputs, state: States) -> Tensor:
        y = self._recurrent_ops.delta_net(x, state)
        if y is not None:
            return y
        _note_places(state)
        return super().delta_net(x, state)

    def selective_scan(
        self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor,
        state: States,
    ) -> Tensor:  # fmt: skip
        y = self._recurrent_ops.selective_scan(x, step, a, b, c, d, gate, state)
        if y is not None:
            return y
        _note_places(state)
        return super().selective_scan(x, step, a, b, c, d, gate, state)

    def state_space_scan(self, x: ScanInputs, state: States) -> Tensor:
        y = self._recurrent_ops.state_space_scan(x, state)
        if y is not None:
            return y
        _note_places(state)
        return super().state_space_scan(x, state)


def _note_places(state: States) -> None:
    """Refuse a replay: without a kernel, the recording would contain this pass's state slots."""
    if isinstance(state, PlacedStates):
        refuse_replay("no kernel can find this state")


def _join(layers: Sequence[LinearLayer]) -> JointProduct | None:
    weights = [layer.weight for layer in layers]
    found = [weight for weight in weights if isinstance(weight, PlaneWeight)]
    return JointProduct(found) if len(found) == len(weights) and can_join(found) else None
