"""CPU operations against the reference, with and without kernels."""

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.ops import CpuOps
from engine.model.forward.batch import Batch
from engine.model.forward.cache import LayerCache
from engine.model.forward.operands import Activation, RopeParams, Routing, Scores
from engine.model.forward.ops import Ops
from engine.model.forward.state import KVState
from engine.model.sharding.shares import Ranges
from tests.helpers.kv_layers import as_multiplied

REFERENCE = Ops()


@pytest.fixture(scope="module")
def fast() -> CpuOps:
    return CpuOps(ThreadPool(2))


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_operations(fast: CpuOps, dtype: torch.dtype) -> None:
    """The kernels' F32 and the fallback's F64 against the reference."""
    x, y, w = (numbers(n, *s, dtype=dtype) for n, s in enumerate([(5, 3, 64), (5, 3, 64), (64,)]))
    cos, sin = numbers(3, 5, 1, 32, dtype=dtype), numbers(4, 5, 1, 32, dtype=dtype)
    silu = Activation("silu")
    for name, arguments in (
        ("rms_norm", (x, w, None, 1e-6)),
        ("layer_norm", (x, w, w, 1e-6)),
        ("activate", (silu, x)),
        ("gated", (Activation("oai", 7.0), x, y)),
        ("rope", (x, cos, sin, "neox")),
    ):
        found = getattr(fast, name)(*arguments)
        assert found.dtype == dtype
        torch.testing.assert_close(
            found, getattr(REFERENCE, name)(*arguments), rtol=2e-6, atol=2e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts(fast: CpuOps, dtype: torch.dtype) -> None:
    logits, y = numbers(1, 4, 9, dtype=dtype), numbers(2, 12, 20, dtype=dtype)
    results = []
    for ops in (fast, REFERENCE):
        weights, groups = ops.assign(Routing(9, 3), logits, None)
        results.append(ops.sum_of_experts(y, weights, groups))
    assert results[0].dtype == dtype
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)


def test_cos_sin_of_any_position(fast: CpuOps) -> None:
    """Across blocks of positions, for several rotations."""
    plain, other = RopeParams(64, "norm", 1e4), RopeParams(64, "norm", 1e6)
    for params, factors in ((plain, None), (other, None), (plain, numbers(1, 32).abs() + 1)):
        for first in (0, 1, 255, 256, 100_000):
            positions = torch.tensor([first])
            fast.begin(Batch.of_one(first, 1, 0), torch.tensor([first]))
            found = fast.rope_angles(params, factors, positions)
            expected = REFERENCE.rope_angles(params, factors, positions)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
            assert found[0].shape == expected[0].shape == (1, 1, 32)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("n_tokens", [1, 8, 9])
def test_attention(fast: CpuOps, kv_type: str, n_tokens: int) -> None:
    state = KVState(Ranges(((0, 6),), 6), Ranges(((0, 3),), 3), 32, 32)
    caches = [LayerCache(state, 0, 60, kv_type, torch.device("cpu")) for _ in range(2)]
    q, k, v = numbers(1, n_tokens, 6, 32), numbers(2, 40, 3, 32), numbers(3, 40, 3, 32)
    results = []
    for ops, cache in zip((fast, REFERENCE), caches, strict=True):
        batch = Batch.of_one(30, n_tokens, 0)
        ops.write_cache(cache, k[:30], v[:30], Batch.of_one(0, 30, 0))
        ops.write_cache(cache, k[30 : 30 + n_tokens], v[30 : 30 + n_tokens], batch)
        mine = q if ops is fast else as_multiplied(q, cache)
        results.append(ops.attention(mine, cache, batch, Scores(0.2, window=9)))
    assert torch.equal(caches[0].k, caches[1].k)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=2e-6)


def test_unsupported_caches_are_written_by_torch(fast: CpuOps) -> None:
    state = KVState(Ranges(((0, 1),), 1), Ranges(((0, 1),), 1), 8, 8)
    cache = LayerCache(state, 0, 4, "f32", torch.device("cpu"))
    k = numbers(1, 2, 1, 8, dtype=torch.float64)
    fast.write_cache(cache, k, k, Batch.of_one(1, len(k), 0))
    assert torch.equal(cache.v[0, 1:3], k[:, 0].float())


@pytest.mark.parametrize(
    "scores",
    [Scores(0.2), Scores(0.2, window=7), Scores(0.2, chunk=16), Scores(0.2, softcap=5.0)],
    ids=str,
)
@pytest.mark.parametrize("n_past", [0, 23])
def test_attention_of_a_prompt(fast: CpuOps, scores: Scores, n_past: int) -> None:
    """Any mask, and scores that torch's kernel does not support."""
    state = KVState(Ranges(((0, 6),), 6), Ranges(((0, 3),), 3), 32, 32)
    cache = LayerCache(state, 0, 60, "f16", torch.device("cpu"))
    cache.write(numbers(1, 60, 3, 32), numbers(2, 60, 3, 32), Batch.of_one(0, 60, 0))
    q = numbers(3, 30, 6, 32)
    batch = Batch.of_one(n_past, len(q), 0)
    found = fast.attention(q, cache, batch, scores)
    expected = REFERENCE.attention(q, cache, batch, scores)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
