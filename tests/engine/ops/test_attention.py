"""Attention against a plain float64 formula, one query and one key at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache import LayerCache
from engine.layers.attention import Scores
from engine.layers.state import KVState
from engine.ops import attention
from engine.parallel.ranges import Ranges

HEAD_DIM_K, HEAD_DIM_V = 8, 6


def plain(q: Any, k: Any, v: Any, n_past: int, scores: Scores, sinks: Any, slopes: Any) -> Any:
    """q (T, n_head, d), k and v (S, n_head_kv, d); (T, n_head, d_v)."""
    n_tokens, n_head, _ = q.shape
    out = np.zeros((n_tokens, n_head, v.shape[-1]))
    for t in range(n_tokens):
        at = n_past + t
        seen = [
            s for s in range(at + 1)
            if (not scores.window or at - s < scores.window)
            and (not scores.chunk or at // scores.chunk == s // scores.chunk)
        ]  # fmt: skip
        for head in range(n_head):
            kv = head // (n_head // k.shape[1])
            x = np.array([q[t, head] @ k[s, kv] * scores.scale for s in seen])
            if scores.softcap:
                x = scores.softcap * np.tanh(x / scores.softcap)
            if slopes is not None:
                x = x - slopes[head] * (at - np.array(seen))
            weights = np.exp(x - x.max())
            total = weights.sum()
            if sinks is not None:
                total += np.exp(sinks[head] - x.max())
            out[t, head] = weights / total @ v[seen, kv]
    return out


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    n_kv = draw(st.integers(1, 3))
    cut = draw(st.sampled_from(["none", "window", "chunk", "both"]))
    size = st.integers(1, 9)
    return {
        "n_past": draw(st.integers(0, 20)),
        "n_tokens": draw(st.integers(1, 20)),
        "n_kv": n_kv,
        "n_head": n_kv * draw(st.integers(1, 3)),
        "window": draw(size) if cut in ("window", "both") else 0,
        "chunk": draw(size) if cut in ("chunk", "both") else 0,
        "softcap": draw(st.sampled_from([0.0, 2.0])),
        "has_sinks": draw(st.booleans()),
        "has_slopes": draw(st.booleans()),
        "v_in_k": draw(st.booleans()),
        "held": draw(st.sampled_from([1, 40, 1 << 20])),
        "seed": draw(st.integers(0, 99)),
    }


@given(cases())
def test_attention_equals_the_plain_formula(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(case["seed"])
    n_past, n_tokens, n_kv, n_head = (case[k] for k in ("n_past", "n_tokens", "n_kv", "n_head"))
    stop = n_past + n_tokens
    state = KVState(
        Ranges(((0, n_head),), n_head), Ranges(((0, n_kv),), n_kv), HEAD_DIM_K, HEAD_DIM_V,
        v_in_k=case["v_in_k"],
    )  # fmt: skip
    cache = LayerCache(state, 0, stop + 3, "f32", torch.device("cpu"))
    q = rng.normal(size=(n_tokens, n_head, HEAD_DIM_K))
    k = rng.normal(size=(stop, n_kv, HEAD_DIM_K))
    v = k[..., :HEAD_DIM_V] if case["v_in_k"] else rng.normal(size=(stop, n_kv, HEAD_DIM_V))
    sinks = rng.normal(size=n_head) if case["has_sinks"] else None
    slopes = rng.uniform(0, 1, size=n_head) if case["has_slopes"] else None
    scores = Scores(0.7, case["window"], case["chunk"], case["softcap"])
    cache.write(tensor(k), None if case["v_in_k"] else tensor(v), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SCORE_ELEMENTS", case["held"])
        out = attention.attend(tensor(q), cache, n_past, scores, maybe(sinks), maybe(slopes))
    expected = plain(q, k, v, n_past, scores, sinks, slopes)
    assert np.abs(out.numpy() - expected).max() < 1e-5


def tensor(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(x, np.float32))


def maybe(x: Any) -> torch.Tensor | None:
    return None if x is None else tensor(x)
