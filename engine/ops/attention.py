"""Softmax attention over a cache: by torch's kernels where they can, else step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from engine.cache import LayerCache
    from engine.layers.attention import Scores

SCORE_ELEMENTS = 1 << 22
"""Scores that are held at once where no kernel avoids them: 16 MiB, used three times over."""


def attend(
    q: Tensor,
    cache: LayerCache,
    n_past: int,
    scores: Scores,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    """See `ReferenceOps.attention`; q (T, n_head, head_dim), result (T, n_head, head_dim_v)."""
    n_tokens = q.shape[0]
    first, stop = _first_visible(scores, n_past), n_past + n_tokens
    k, v = cache.read(first, stop)
    q = q.transpose(0, 1)
    if scores.softcap or sinks is not None or slopes is not None:
        out = _explicit(q, k, v, scores, first, sinks, slopes)
    elif n_tokens == 1:
        out = _decode(q, k, v, scores.scale)
    else:
        mask = None
        if stop - first > n_tokens or scores.window or scores.chunk:
            mask = _mask(scores, slice(n_past, stop), slice(first, stop), q.device)
        out = _fused(q, k, k if cache.is_shared else v, mask, scores.scale)[..., : v.shape[-1]]
    return out.transpose(0, 1)


def _first_visible(scores: Scores, n_past: int) -> int:
    """The first position that any query of a pass after `n_past` tokens sees."""
    first = max(0, n_past - scores.window + 1) if scores.window else 0
    return max(first, n_past // scores.chunk * scores.chunk) if scores.chunk else first


def _mask(scores: Scores, queries: slice, keys: slice, device: torch.device) -> Tensor:
    """(queries, keys), true where a query may look; both are intervals of positions."""
    key = torch.arange(keys.start, keys.stop, device=device)
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    mask = key <= query
    if scores.window:
        mask &= query - key < scores.window
    if scores.chunk:
        mask &= query // scores.chunk == key // scores.chunk
    return mask


def _decode(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query per head: q (n_head, 1, d), k and v (n_head_kv, S, d); (n_head, 1, d_v)."""
    grouped = q.reshape(k.shape[0], -1, q.shape[-1])
    weights = (grouped @ k.transpose(1, 2) * scale).softmax(-1)
    return (weights @ v).reshape(q.shape[0], 1, v.shape[-1])


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Kernels that never hold all T × S scores; they want keys as long as values.

    Without a mask the queries see each other causally.
    """
    is_grouped = q.shape[0] != k.shape[0]
    if is_grouped and q.is_cuda:  # there none of them serves groups in F32
        k, v = _repeated(k, q.shape[0]), _repeated(v, q.shape[0])
        is_grouped = False
    return scaled_dot_product_attention(
        q[None], k[None], v[None], mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )[0]


def _repeated(t: Tensor, n_head: int) -> Tensor:
    """Keys or values (n_head_kv, S, d) for each query head; a single one is not copied."""
    if t.shape[0] == 1:
        return t.expand(n_head, -1, -1)
    return t.repeat_interleave(n_head // t.shape[0], dim=0)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    first: int,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    """What the kernels cannot do: q (n_head, T, d), the last T of the keys' positions.

    One group of heads and some queries at a time, so that scores take bounded memory.

    Args:
        first: position of the first key.

    Returns:
        (n_head, T, d_v)
    """
    n_head, n_tokens, _ = q.shape
    size, stop = n_head // k.shape[0], first + k.shape[1]
    step = max(1, SCORE_ELEMENTS // (size * k.shape[1]))
    out = q.new_empty(n_head, n_tokens, v.shape[-1])
    for start in range(0, n_tokens, step):
        part = slice(start, min(start + step, n_tokens))
        begin = stop - n_tokens
        queries = slice(begin + part.start, begin + part.stop)
        mask = _mask(scores, queries, slice(first, stop), q.device)
        for group, (keys, values) in enumerate(zip(k, v, strict=True)):
            heads = slice(group * size, (group + 1) * size)
            s = _scores(q[heads, part], keys, scores)
            if slopes is not None:
                s = s + slopes[heads, None, None] * _distances(queries, first, keys)
            s = s.masked_fill(~mask, -torch.inf)
            out[heads, part] = _weights(s, None if sinks is None else sinks[heads]) @ values
    return out


def _scores(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """Scores (heads, T, S) of q (heads, T, d) and k (S, d)."""
    s = q @ k.T * scores.scale
    return scores.softcap * (s / scores.softcap).tanh() if scores.softcap else s


def _distances(queries: slice, first: int, k: Tensor) -> Tensor:
    """Position of key minus position of query, (T, S), for keys (S, d) from `first` on."""
    key = torch.arange(first, first + k.shape[0], device=k.device, dtype=k.dtype)
    query = torch.arange(queries.start, queries.stop, device=k.device, dtype=k.dtype)
    return key - query[:, None]


def _weights(s: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores (heads, T, S), with a logit per head that takes weight but has no value."""
    if sinks is None:
        return s.softmax(-1)
    sink = sinks[:, None, None].expand(-1, s.shape[1], 1)
    return torch.cat((s, sink), dim=-1).softmax(-1)[..., :-1]
