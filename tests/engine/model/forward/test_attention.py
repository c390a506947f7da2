"""Tests of attention against a plain F64 formula, one query and one head at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.forward import attention
from engine.model.forward.batch import Batch
from engine.model.forward.cache import LayerCache
from engine.model.forward.operands import Scores
from engine.model.forward.state import CPU_STEP, KVState, Step
from engine.model.sharding.shares import Ranges

HEAD_DIM_K, HEAD_DIM_V = 8, 6


def plain(q: Any, k: Any, v: Any, n_past: int, scores: Scores, sinks: Any, slopes: Any) -> Any:
    """Return attention (T, n_head, d_v) of q (T, n_head, d) over k and v (S, n_head_kv, d)."""
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
        "step": Step(
            draw(st.sampled_from([1, 100, 1 << 20])), draw(st.sampled_from([1, 40, 1 << 20]))
        ),
        "seed": draw(st.integers(0, 99)),
    }


@settings(deadline=None)
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
    cache.write(tensor(k), None if case["v_in_k"] else tensor(v), Batch.of_one(0, stop, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "CPU_STEP", case["step"])
        batch = Batch.of_one(n_past, n_tokens, 0)
        out = attention.attend(tensor(q), cache, batch, scores, maybe(sinks), maybe(slopes))
    expected = plain(q, k, v, n_past, scores, sinks, slopes)
    assert np.abs(out.numpy() - expected).max() < 1e-5


class LargestResult(TorchDispatchMode):
    """Mode that finds the largest tensor which any operation made.

    Args:
        known: tensors whose views do not count.

    Attributes:
        n_elements: number of elements of that tensor.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.n_elements = 0
        self._known = {x.untyped_storage().data_ptr() for x in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in self._known:
            self.n_elements = max(self.n_elements, out.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("options", [{}, {"window": 900}, {"softcap": 5.0}], ids=str)
def test_working_memory_does_not_grow_with_what_is_cached(
    kv_type: str, options: dict[str, Any]
) -> None:
    """Check that neither the whole cache in F32 nor all scores of a long prompt are ever held."""
    n_head, n_kv, head_dim, n_tokens = 4, 2, 64, 300
    state = KVState(Ranges(((0, n_head),), n_head), Ranges(((0, n_kv),), n_kv), head_dim, head_dim)
    step, found = Step(keys=1 << 15, scores=1 << 13), []
    for n_ctx in (1000, 4000):
        cache = LayerCache(state, 0, n_ctx, kv_type, torch.device("cpu"))
        q = torch.randn(n_tokens, n_head, head_dim)
        largest = LargestResult(q, cache.k, cache.v)
        with pytest.MonkeyPatch.context() as patch, largest:
            patch.setattr(attention, "CPU_STEP", step)
            batch = Batch.of_one(n_ctx - n_tokens, n_tokens, 0)
            attention.attend(q, cache, batch, Scores(0.1, **options), None, None)
        found.append(largest.n_elements)
        assert largest.n_elements <= max(step.keys, step.scores, n_tokens * n_head * head_dim)
        whole = 2 * n_ctx * n_kv * head_dim
        assert (
            2 * step.keys <= state.n_work(0, n_tokens, n_ctx, step) <= 2 * whole + 3 * step.scores
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("n_tokens", [1, 7, 64])
def test_the_usual_step_gives_the_same(n_tokens: int) -> None:
    """Compare with torch's attention, on heads of a usual size and more keys than one step."""
    n_head, n_kv, head_dim, n_past = 8, 2, 128, 9000
    state = KVState(Ranges(((0, n_head),), n_head), Ranges(((0, n_kv),), n_kv), head_dim, head_dim)
    cache = LayerCache(state, 0, n_past + n_tokens, "f32", torch.device("cpu"))
    assert n_past * cache.width > CPU_STEP.keys
    generator = torch.Generator().manual_seed(n_tokens)
    k, v = torch.randn(2, n_past + n_tokens, n_kv, head_dim, generator=generator)
    cache.write(k, v, Batch.of_one(0, len(k), 0))
    q = torch.randn(n_tokens, n_head, head_dim, generator=generator)
    batch = Batch.of_one(n_past, n_tokens, 0)
    out = attention.attend(q, cache, batch, Scores(head_dim**-0.5), None, None)
    mask = torch.ones(n_tokens, n_past + n_tokens, dtype=torch.bool).tril(n_past)
    expected = scaled_dot_product_attention(
        *(x.transpose(0, 1).double() for x in (q, k, v)), mask, enable_gqa=True
    ).transpose(0, 1)
    assert (out - expected).abs().max() < 1e-6


def tensor(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(x, np.float32))


def maybe(x: Any) -> torch.Tensor | None:
    return None if x is None else tensor(x)
