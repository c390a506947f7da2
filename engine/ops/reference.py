"""The exact operations every backend is measured against: plain torch in F32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, normalize, relu, scaled_dot_product_attention, silu, softplus

from engine.ops import recurrent

if TYPE_CHECKING:
    from engine.cache import LayerCache
    from engine.layers.attention import Scores
    from engine.layers.ffn import Activation
    from engine.layers.moe import Routing
    from engine.layers.rope import RopeParams


class ReferenceOps:
    """Stateless; one instance serves all ranks."""

    softplus = staticmethod(softplus)
    causal_conv = staticmethod(recurrent.causal_conv)
    gated_delta_rule = staticmethod(recurrent.gated_delta_rule)
    selective_scan = staticmethod(recurrent.selective_scan)
    state_space_scan = staticmethod(recurrent.state_space_scan)

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
        if routing.n_group > 1:
            wanted = _only_best_groups(wanted, routing.n_group, routing.n_group_used)
        chosen = wanted.topk(routing.n_used).indices
        weights = scores.gather(-1, chosen)
        if routing.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
        return weights * routing.scale, chosen

    def rope_angles(
        self, params: RopeParams, factors: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, 1, n_rot / 2) for positions (T,), computed in F64."""
        n_pairs = params.n_rot // 2
        pair = torch.arange(n_pairs, dtype=torch.float64, device=positions.device)
        frequency = params.base ** (-2 * pair / params.n_rot)
        if factors is not None:
            frequency = frequency / factors.double()
        if params.yarn:
            low, high = params.yarn_bounds()
            kept = 1 - ((pair - low) / max(0.001, high - low)).clamp(0, 1)
            frequency = frequency * (params.scale * (1 - kept) + kept)
        else:
            frequency = frequency * params.scale
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
            slopes: (n_head,), added to the scores times the key's position (ALiBi, arXiv
                2108.12409); or None.

        Returns:
            (T, n_head, head_dim_v)
        """
        first, stop = _visible(scores, n_past, q.shape[0]), n_past + q.shape[0]
        k, v = cache.read(first, stop)
        q = q.transpose(0, 1)
        mask = _mask(scores, q.shape[1], first, stop, q.device)
        if scores.softcap or sinks is not None or slopes is not None:
            bias = None if slopes is None else slopes[:, None, None] * _positions(k)
            return _explicit_attention(q, k, v, mask, scores, sinks, bias).transpose(0, 1)
        if q.shape[1] == 1:
            return _decode_attention(q, k, v, scores.scale)
        n_value = v.shape[-1]
        if cache.is_shared:  # the kernels that do not hold all T × S scores want equal lengths
            v = k
        is_grouped = q.shape[0] != k.shape[0]
        if is_grouped and q.is_cuda:  # no F32 kernel there serves groups without all T × S scores
            k, v = _repeated(k, q.shape[0]), _repeated(v, q.shape[0])
            is_grouped = False
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], mask, is_causal=mask is None, scale=scores.scale,
            enable_gqa=is_grouped,
        )  # fmt: skip
        return out[0, ..., :n_value].transpose(0, 1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: torch.square(relu(x)),
}
OAI_ALPHA = 1.702
SMALLEST_SUM = 6.103515625e-5
"""The least that chosen weights are divided by: F16's smallest normal number, as in llama.cpp."""


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


def _visible(scores: Scores, n_past: int, n_tokens: int) -> int:
    """The first position that any query of this pass sees."""
    first = max(0, n_past - scores.window + 1) if scores.window else 0
    return max(first, n_past // scores.chunk * scores.chunk) if scores.chunk else first


def _mask(
    scores: Scores, n_tokens: int, first: int, stop: int, device: torch.device
) -> Tensor | None:
    """(T, stop - first), true where query t may look; None where `is_causal` says it all."""
    is_cut = bool(scores.window) or bool(scores.chunk)
    if n_tokens == 1 or (stop - first == n_tokens and not is_cut):
        return None
    key = torch.arange(first, stop, device=device)
    query = torch.arange(stop - n_tokens, stop, device=device)[:, None]
    mask = key <= query
    if scores.window:
        mask &= query - key < scores.window
    if scores.chunk:
        mask &= query // scores.chunk == key // scores.chunk
    return mask


def _positions(k: Tensor) -> Tensor:
    """Places of keys (n_head_kv, S, d) from the first read on; softmax does not see the offset."""
    return torch.arange(k.shape[1], device=k.device, dtype=k.dtype)


def _repeated(t: Tensor, n_head: int) -> Tensor:
    """Keys or values (n_head_kv, S, d) for each query head; a single one is not copied."""
    if t.shape[0] == 1:
        return t.expand(n_head, -1, -1)
    return t.repeat_interleave(n_head // t.shape[0], dim=0)


def _decode_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query per head: q (n_head, 1, d), k and v (n_head_kv, S, d); (1, n_head, d_v)."""
    grouped = q.reshape(k.shape[0], -1, q.shape[-1])
    weights = (grouped @ k.transpose(1, 2) * scale).softmax(-1)
    return (weights @ v).reshape(1, q.shape[0], v.shape[-1])


def _explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores, sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """What the fused kernels cannot: q (n_head, T, d), one head group at a time; (n_head, T, d_v).

    Without a mask the queries see each other causally.
    """
    n_head, n_tokens, _ = q.shape
    size, out = n_head // k.shape[0], []
    if mask is None:
        mask = torch.ones(n_tokens, k.shape[1], dtype=torch.bool, device=q.device)
        mask = mask.tril(k.shape[1] - n_tokens)
    for group, (keys, values) in enumerate(zip(k, v, strict=True)):
        heads = slice(group * size, (group + 1) * size)
        s = q[heads] @ keys.T * scores.scale
        if scores.softcap:
            s = scores.softcap * (s / scores.softcap).tanh()
        if bias is not None:
            s = s + bias[heads]
        s = s.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            sink = sinks[heads, None, None].expand(-1, n_tokens, 1)
            weights = torch.cat((s, sink), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = s.softmax(-1)
        out.append(weights @ values)
    return torch.cat(out)
