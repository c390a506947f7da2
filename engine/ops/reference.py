"""The exact operations every backend is measured against: plain torch in F32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from engine.cache import LayerCache
    from engine.layers.rope import RopeParams


class ReferenceOps:
    """Stateless; one instance serves all ranks."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last dimension."""
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`, element by element."""
        return silu(gate) * up

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

    def attention(self, q: Tensor, cache: LayerCache, n_past: int, scale: float) -> Tensor:
        """Causal softmax attention of q (T, n_head, head_dim) over the cache.

        The cache holds n_past + T positions already; query t sees the first n_past + t + 1.

        Returns:
            (T, n_head, head_dim_v)
        """
        n_tokens = q.shape[0]
        k, v = cache.read(n_past + n_tokens)
        q = q.transpose(0, 1)
        if n_tokens == 1:
            return _decode_attention(q, k, v, scale)
        mask = None
        if n_past:
            mask = _causal_mask(n_tokens, n_past, q.device)
        is_grouped = q.shape[0] != k.shape[0]
        if is_grouped and q.is_cuda:  # no F32 kernel there serves groups without all T × S scores
            k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
            is_grouped = False
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], mask, is_causal=mask is None, scale=scale,
            enable_gqa=is_grouped,
        )  # fmt: skip
        return out[0].transpose(0, 1)


def _decode_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query per head: q (n_head, 1, d), k and v (n_head_kv, S, d); (1, n_head, d_v)."""
    grouped = q.reshape(k.shape[0], -1, q.shape[-1])
    weights = (grouped @ k.transpose(1, 2) * scale).softmax(-1)
    return (weights @ v).reshape(1, q.shape[0], v.shape[-1])


def _causal_mask(n_tokens: int, n_past: int, device: torch.device) -> Tensor:
    """(T, n_past + T), true where query t may look."""
    whole = torch.ones(n_tokens, n_past + n_tokens, dtype=torch.bool, device=device)
    return whole.tril(n_past)
