"""Operations on CPUs: our own kernels where they exist and are faster than torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cpu.flash_attention import attend_fused, serves
from engine.cpu.kernels.cache_ops import MAX_TOKENS, CacheOps
from engine.cpu.kernels.small_ops import SmallOps
from engine.cpu.routing import RoutingOps
from engine.cpu.weights import JointProduct, PlaneWeight
from engine.forward.recording import refuse_replay
from engine.ops.composite import CompositeOps
from engine.ops.reference import REFERENCE

if TYPE_CHECKING:
    from engine.cpu.kernels.team import Team
    from engine.forward.cache import LayerCache
    from engine.forward.expert_rows import Groups
    from engine.forward.operands import Activation, RopeParams, Routing, Scores
    from engine.forward.ops import LinearLayer
    from engine.ops.recurrent import Chunks

ANGLES = 256
"""Number of positions whose angles are computed at once."""


class CpuOps(CompositeOps):
    """Operations of one rank on the CPU; only the rank's thread may call them.

    Results differ from the reference in the last bits. Tensors that no kernel accepts, such as
    those of other types, go to the reference.

    Args:
        team: threads of the rank.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._small_ops = SmallOps(team)
        self._cache_ops = CacheOps(team)
        self._joint: dict[tuple[LinearLayer, ...], tuple[JointProduct | None, bool]] = {}
        self._angles: dict[tuple[int, int], _Angles] = {}
        self._n_past = 0
        self._routing_ops = RoutingOps(team)

    @property
    def memory(self) -> Sequence[Tensor]:
        return (self._cache_ops.memory,)

    def begin(self, n_past: int, n_tokens: int, position: Tensor) -> None:
        if n_tokens == 1:
            self._n_past = n_past
            self._cache_ops.move(n_past)
            for angles in self._angles.values():
                angles.move(n_past)

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
        if joint is None or not are_bare or kernel is None or x.shape[0] > joint.n_tokens:
            return super().gated_linears(act, x, gate, up)
        return joint.gated(x, *kernel)

    def _joint_product(self, layers: tuple[LinearLayer, ...]) -> tuple[JointProduct | None, bool]:
        """Return the joint product of the layers' matrices, and whether none has bias or scale.

        The product is None if the matrices cannot be joined. Both are kept for later calls.
        """
        if layers not in self._joint:
            are_bare = all(layer.is_bare for layer in layers)
            self._joint[layers] = _join(layers), are_bare
        return self._joint[layers]

    def rms_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = self._small_ops.rms_norm(x, weight, bias, eps)
        return REFERENCE.rms_norm(x, weight, bias, eps) if y is None else y

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        y = self._small_ops.layer_norm(x, weight, bias, eps)
        return super().layer_norm(x, weight, bias, eps) if y is None else y

    def activate(self, act: Activation, x: Tensor) -> Tensor:
        y = self._small_ops.gated(act.kind, 0.0, x, None)
        return REFERENCE.activate(act, x) if y is None else y

    def gated(self, act: Activation, gate: Tensor, up: Tensor) -> Tensor:
        y = self._small_ops.gated(act.kind, act.limit, gate, up)
        return REFERENCE.gated(act, gate, up) if y is None else y

    def assign(
        self, routing: Routing, logits: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Groups]:
        assigned = self._routing_ops.assign(routing, logits, bias)
        return super().assign(routing, logits, bias) if assigned is None else assigned

    def sum_of_experts(self, y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
        total = self._routing_ops.sum_of_experts(y, weights, groups)
        return REFERENCE.sum_of_experts(y, weights, groups) if total is None else total

    def rope_angles(
        self, params: RopeParams, factors: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        if positions.numel() != 1:
            return REFERENCE.rope_angles(params, factors, positions)
        key = id(params), id(factors)
        if key not in self._angles:
            self._angles[key] = _Angles(partial(REFERENCE.rope_angles, params, factors))
            self._angles[key].move(self._n_past)
        return self._angles[key].current

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        y = self._small_ops.rope(x, cos, sin, style)
        return REFERENCE.rope(x, cos, sin, style) if y is None else y

    def write_cache(self, cache: LayerCache, k: Tensor, v: Tensor | None, start: int) -> None:
        if not self._cache_ops.write(cache, k, v, start):
            refuse_replay("no kernel writes such a cache")
            REFERENCE.write_cache(cache, k, v, start)

    def attention(
        self,
        q: Tensor,
        cache: LayerCache,
        n_past: int,
        scores: Scores,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        n_tokens = q.shape[0]
        if n_tokens <= MAX_TOKENS:
            y = self._cache_ops.attention(q, cache, n_past, scores, sinks, slopes)
            if y is not None:
                return y
        elif sinks is None and slopes is None and serves(cache, scores, n_past + n_tokens):
            self._team.rest()
            return attend_fused(q, cache, n_past, scores)
        refuse_replay("no kernel reads such a cache")
        return REFERENCE.attention(q, cache, n_past, scores, sinks, slopes)

    # no kernel: torch

    def concat(self, *parts: Tensor) -> Tensor:
        return REFERENCE.concat(*parts)

    def route(self, routing: Routing, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return REFERENCE.route(routing, logits, bias)

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        return REFERENCE.l2_norm(x, eps)

    def softplus(self, x: Tensor) -> Tensor:
        return REFERENCE.softplus(x)

    def xielu(self, x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
        return REFERENCE.xielu(x, positive, negative, beta, eps)

    def opened(self, x: Tensor, door: Tensor, y: Tensor, other: Tensor | None = None) -> Tensor:
        return REFERENCE.opened(x, door, y, other)

    def scan_chunks(self, chunks: Chunks, state: Tensor) -> Tensor:
        return REFERENCE.scan_chunks(chunks, state)


class _Angles:
    """Cosines and sines of a rotation at the current position, always in the same memory.

    Args:
        compute: function from positions (T,) to cosines and sines.

    Attributes:
        current: cosines and sines, each (1, 1, n_rot / 2).
    """

    def __init__(self, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._compute = compute
        self._block_index = -1
        self._block = self.current = compute(torch.zeros(1, dtype=torch.int64))

    def move(self, position: int) -> None:
        """Move to another position; angles are computed for a block of positions at once."""
        block_index, index = divmod(position, ANGLES)
        if block_index != self._block_index:
            self._block_index = block_index
            start = block_index * ANGLES
            self._block = self._compute(torch.arange(start, start + ANGLES))
        for current, block in zip(self.current, self._block, strict=True):
            current.copy_(block[index : index + 1])


def _join(layers: Sequence[LinearLayer]) -> JointProduct | None:
    """Return the joint product of the layers' matrices.

    Returns:
        None unless all are in planes and have the same columns.
    """
    weights = [layer.weight for layer in layers]
    planes = [weight for weight in weights if isinstance(weight, PlaneWeight)]
    if len(planes) < len(weights) or len({weight.extent for weight in planes}) > 1:
        return None
    return JointProduct(planes)
