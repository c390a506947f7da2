"""The reference operations that every backend is measured against: plain torch in F32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, normalize, relu, silu, softplus

from engine.backends.reference import recurrent
from engine.backends.reference.attention import attend
from engine.backends.reference.composite import CompositeOps
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import OAI_ALPHA

if TYPE_CHECKING:
    from engine.model.forward.batch import Batch
    from engine.model.forward.cache import LayerCache
    from engine.model.forward.operands import (
        Activation,
        RopeParams,
        Routing,
        Scores,
    )


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
