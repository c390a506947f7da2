"""KV cache writes and attention kernels against the reference."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.cpu.kernels.cache.cache_ops import CacheOps
from engine.backends.cpu.kernels.language.isa import Isa, supported
from engine.backends.cpu.kernels.running.call_log import CallLog
from engine.backends.cpu.kernels.running.replay import KernelReplay
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.model.forward.attention import attend
from engine.model.forward.batch import Batch, Piece
from engine.model.forward.cache import LayerCache
from engine.model.forward.operands import Scores
from engine.model.forward.pages import PAGE
from tests.helpers.kv_layers import as_multiplied, layer, numbers
from tests.helpers.kv_pairs import MIXED
from tests.helpers.tiers import first_in_full, swept

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
ISAS = supported()


EVERY = pytest.mark.parametrize(
    ("isa", "kv_type"), first_in_full(ISAS, TYPES), ids=lambda x: getattr(x, "name", x)
)
"""All types on the best instruction set here, one type on the others."""

QUICK = [case.values for case in first_in_full(ISAS, TYPES) if not case.marks]


def attended(
    steps: CacheOps, q: Tensor, held: LayerCache, n_past: int, scores: Scores,
    sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    found = steps.attention(q, held, Batch.of_one(n_past, len(q), 0), scores, sinks, slopes)
    assert found is not None
    return found


@EVERY
@pytest.mark.parametrize("n_tokens", [1, 3, 300])
def test_writes_match_the_reference(isa: Isa, kv_type: str, n_tokens: int) -> None:
    steps = CacheOps(ThreadPool(2), isa)
    fast, plain = (layer(kv_type, 6, 3, 96, 64, 310) for _ in range(2))
    whole = numbers(3, n_tokens, 3 * (96 + 64)) * 5
    k = whole[:, : 3 * 96].reshape(n_tokens, 3, 96)
    v = whole[:, 3 * 96 :].reshape(n_tokens, 3, 64)
    assert steps.write(fast, k, v, Batch.of_one(7, n_tokens, 0))
    plain.write(k, v, Batch.of_one(7, n_tokens, 0))
    assert torch.equal(fast.k, plain.k)
    assert torch.equal(fast.v, plain.v)


@EVERY
def test_rounding_matches_torch_and_gguf(isa: Isa, kv_type: str) -> None:
    """Numbers of all magnitudes, ties, both zeros, and the smallest and largest F16 numbers."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2000, 64)) * np.exp(rng.uniform(-22, 12, (2000, 1)))
    x = x.astype(np.float32)
    x[0], x[1] = 0, -0.0
    x[2] = np.where(np.arange(64) % 2, 1, -1)
    x[3, :4] = 65519.9, 65520, -65536, 1e9
    x[4] = np.arange(64) * 2.0**-25
    x[5] = np.round(x[5] * 4) / 8
    x[6] = 1 + np.arange(64) * 2.0**-12
    held = layer(kv_type, 1, 1, 64, 64, 2000)
    k = torch.from_numpy(x).unsqueeze(1)
    assert CacheOps(ThreadPool(1), isa).write(held, k, None, Batch.of_one(0, 2000, 0))
    if kv_type in ("q8_0", "q4_0"):
        kind = gguf.GGMLQuantizationType[kv_type.upper()]
        with np.errstate(over="ignore", invalid="ignore"):
            expected = torch.from_numpy(gguf.quants.quantize(x, kind))
    else:
        expected = k[:, 0].to(held.k.dtype)
    assert torch.equal(held.k[0].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("isa", "kv_type"), first_in_full(ISAS, TYPES[:3]), ids=lambda x: getattr(x, "name", x)
)
def test_head_sizes_that_are_no_multiple_of_16(isa: Isa, kv_type: str) -> None:
    steps = CacheOps(ThreadPool(1), isa)
    for dim_k, dim_v in ((1, 1), (8, 6), (40, 24), (33, 100), (80, 48)):
        held = layer(kv_type, 6, 2, dim_k, dim_v, 150)
        k, v = numbers(4, 1, 2, dim_k), numbers(5, 1, 2, dim_v)
        expected = layer(kv_type, 6, 2, dim_k, dim_v, 150)
        expected.write(k, v, Batch.of_one(140, 1, 0))
        assert steps.write(held, k, v, Batch.of_one(140, 1, 0))
        assert torch.equal(held.k, expected.k)
        assert torch.equal(held.v, expected.v)
        q = numbers(6, 1, 6, dim_k)
        found = attended(steps, q, held, 140, Scores(dim_k**-0.5))
        torch.testing.assert_close(
            found, attend(q, held, Batch.of_one(140, len(q), 0), Scores(dim_k**-0.5), None, None)
        )


@EVERY
@pytest.mark.parametrize(
    ("n_head", "n_kv"), [(1, 1), (4, 4), (8, 4), (7, 1), (32, 8), (19, 1), (5, 1)]
)
def test_attention_for_groups_of_all_sizes(isa: Isa, kv_type: str, n_head: int, n_kv: int) -> None:
    steps = CacheOps(ThreadPool(2), isa)
    held = layer(kv_type, n_head, n_kv, 64, 96, 2 * PAGE + 20)
    for n_past in (0, 1, 16, 62, PAGE - 1, PAGE, 2 * PAGE + 17):
        q = numbers(7, 1, n_head, 64) * 2
        found = attended(steps, q, held, n_past, Scores(0.2))
        q = as_multiplied(q, held, isa)
        expected = attend(q, held, Batch.of_one(n_past, len(q), 0), Scores(0.2), None, None)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=8e-6)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    size = st.sampled_from([1, 5, 64, 257, 700])
    n_kv = draw(st.integers(1, 3))
    isa, kv_type = draw(st.sampled_from([*QUICK, (ISAS[0], "q8_0/q4_0")]))
    return {
        "isa": isa,
        "kv_type": kv_type,
        "n_kv": n_kv,
        "n_head": n_kv * draw(st.integers(1, 9)),
        "n_past": draw(st.integers(0, 1500)),
        "n_tokens": draw(st.sampled_from([1, 2, 5, 40])),
        "window": draw(st.just(0) | size),
        "chunk": draw(st.just(0) | size),
        "softcap": draw(st.sampled_from([0.0, 2.0])),
        "sinks": draw(st.booleans()),
        "slopes": draw(st.booleans()),
        "v_in_k": draw(st.booleans()),
        "is_irregular": draw(st.booleans()),
    }


@given(cases())
@settings(deadline=None, max_examples=60)
def test_attention_matches_the_reference(case: dict[str, Any]) -> None:
    n_head, n_past, n_tokens = case["n_head"], case["n_past"], case["n_tokens"]
    held = layer(
        case["kv_type"], n_head, case["n_kv"], 96, 64, n_past + n_tokens, v_in_k=case["v_in_k"]
    )
    if case["is_irregular"]:
        held.head_map = torch.tensor([i * i % case["n_kv"] for i in range(n_head)])
    q = numbers(8, n_tokens, n_head, 96) * 2
    sinks = numbers(9, n_head) if case["sinks"] else None
    slopes = numbers(10, n_head).abs() / 50 if case["slopes"] else None
    scores = Scores(0.15, case["window"], case["chunk"], case["softcap"])
    found = attended(CacheOps(ThreadPool(1), case["isa"]), q, held, n_past, scores, sinks, slopes)
    q = as_multiplied(q, held, case["isa"])
    for t in range(n_tokens):
        expected = attend(q[t : t + 1], held, Batch.of_one(n_past + t, 1, 0), scores, sinks, slopes)
        torch.testing.assert_close(found[t : t + 1], expected, rtol=2e-5, atol=8e-6)


@pytest.mark.parametrize(
    "kv_type", swept([case.values[0] for case in MIXED], ("q8_0/q4_0", "bf16/f16"))
)
def test_key_and_value_types_can_be_combined(kv_type: str) -> None:
    held, q = layer(kv_type, 6, 2, 64, 96, PAGE + 20), numbers(7, 1, 6, 64) * 2
    found = attended(CacheOps(ThreadPool(2)), q, held, PAGE + 9, Scores(0.2))
    q = as_multiplied(q, held)
    expected = attend(q, held, Batch.of_one(PAGE + 9, len(q), 0), Scores(0.2), None, None)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=8e-6)


@EVERY
def test_results_do_not_depend_on_threads_and_other_tokens(isa: Isa, kv_type: str) -> None:
    held = layer(kv_type, 12, 2, 64, 64, 1600)
    q, scores, sinks = numbers(11, 3, 12, 64), Scores(0.125), numbers(12, 12)
    one, three = (
        attended(CacheOps(ThreadPool(n), isa), q, held, 1590, scores, sinks) for n in (1, 3)
    )
    assert torch.equal(one, three)
    alone = attended(CacheOps(ThreadPool(2), isa), q[2:], held, 1592, scores, sinks)
    assert torch.equal(one[2:], alone)


@pytest.mark.parametrize("isa", swept(ISAS, (ISAS[0], ISAS[-1])), ids=lambda isa: isa.name)
def test_extreme_and_infinite_scores(isa: Isa) -> None:
    """The largest score may come late, so that all earlier weights become 0."""
    held = layer("f32", 2, 1, 16, 16, 600)
    held.k *= 400
    held.k[0, 3] = -torch.inf
    q = numbers(13, 1, 2, 16).abs() * 10
    found = attended(CacheOps(ThreadPool(1), isa), q, held, 599, Scores(1.0))
    torch.testing.assert_close(
        found, attend(q, held, Batch.of_one(599, len(q), 0), Scores(1.0), None, None)
    )
    held.v[0, 5] = torch.nan
    assert attended(CacheOps(ThreadPool(1), isa), q, held, 599, Scores(1.0)).isnan().all()


def test_calls_can_be_replayed_for_another_position() -> None:
    """Calls read positions only from the memory that `begin` writes, with and without a window."""
    steps, held = CacheOps(ThreadPool(1)), layer("f16", 4, 2, 32, 32, 600)
    kinds = [Scores(0.3), Scores(0.3, window=20), Scores(0.3, chunk=256)]
    q, k = numbers(18, 1, 4, 32), numbers(19, 1, 2, 32)
    log = CallLog()
    steps._pool.log_calls(log.address)
    steps.write(held, k, k, Batch.of_one(100, 1, 0))
    outs = [attended(steps, q, held, 100, scores) for scores in kinds]
    steps._pool.log_calls(0)
    replay = KernelReplay(log, steps._pool)
    for n_past in (0, 19, 300, 599):
        held.k[:, n_past] = 0
        steps.begin(Batch.of_one(n_past, 1, 0))
        replay.run(0, log.n_used)
        assert torch.equal(held.k[:, n_past], k[0].half())
        for scores, out in zip(kinds, outs, strict=True):
            assert torch.equal(out, attended(CacheOps(ThreadPool(1)), q, held, n_past, scores))


def test_a_reallocated_cache_is_detected() -> None:
    steps, held = CacheOps(ThreadPool(1)), layer("f16", 2, 1, 32, 32, 40)
    q = numbers(14, 1, 2, 32)
    before = attended(steps, q, held, 30, Scores(0.3))
    held.k = held.k.clone()
    held.k[0, 30] += 1
    after = attended(steps, q, held, 30, Scores(0.3))
    assert not torch.equal(before, after)
    torch.testing.assert_close(
        after, attend(q, held, Batch.of_one(30, len(q), 0), Scores(0.3), None, None)
    )


def test_out_of_range_accesses_are_refused() -> None:
    steps, held = CacheOps(ThreadPool(1)), layer("f16", 4, 2, 32, 32, 40)
    x, scores = numbers(15, 3, 2, 32), Scores(0.1)
    for start in (-1, 38, 1 << 40):
        assert not steps.write(held, x, x, Batch.of_one(start, 3, 0))
    begin = Batch.of_one(0, 3, 0)
    assert not steps.write(held, x[..., :31], x, begin)
    assert not steps.write(held, x, x[:, :1], begin)
    assert not steps.write(held, x.double(), x, begin)
    assert not steps.write(held, x[:2], x[:2], begin)
    assert not steps.write(held, x, x, Batch((Piece(0, 3, ([1],)),), 0))
    assert steps.write(held, x, x, Batch.of_one(37, 3, 0))
    q = numbers(16, 1, 4, 32)
    for n_past in (40, -1, 1 << 40):
        assert steps.attention(q, held, Batch.of_one(n_past, 1, 0), scores, None, None) is None
    one = Batch.of_one(5, 1, 0)
    assert steps.attention(q.expand(2, -1, -1), held, one, scores, None, None) is None
    for wrong in (q[..., :31], q[:, :3], q.double(), q.mT):
        assert steps.attention(wrong, held, one, scores, None, None) is None
    assert steps.attention(q, held, one, scores, numbers(17, 3), None) is None
    assert steps.attention(q, held, one, scores, None, numbers(17, 4).double()) is None
    for pages in ([1], []):
        elsewhere = Batch((Piece(5, 1, (pages,)),), 0)
        assert steps.attention(q, held, elsewhere, scores, None, None) is None
