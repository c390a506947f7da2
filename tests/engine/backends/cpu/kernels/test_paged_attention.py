"""Paged attention for rows of several sequences, against the reference, and equal bits."""

from itertools import pairwise
from typing import Any

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
from engine.model.forward.pages import GONE, PAGE
from tests.helpers.kv_layers import as_multiplied, layer, numbers
from tests.helpers.kv_pairs import MIXED
from tests.helpers.tiers import first_in_full, swept

ISAS = supported()
KINDS = pytest.mark.parametrize("isa", swept(ISAS, (ISAS[0], ISAS[-1])), ids=lambda isa: isa.name)
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")

N_PAGES = 8
TABLES = ([6, 0, 3], [1, 7], [4, 2, 5])
"""Pages of three sequences in a cache of `N_PAGES`."""

PLAIN = Scores(0.2)
HIDING = (PLAIN, Scores(0.2, window=70), Scores(0.2, chunk=100), Scores(0.2, window=300))


def piece(number: int, n_past: int, n: int) -> Piece:
    """Return tokens of one of the three sequences."""
    return Piece(n_past, n, (TABLES[number],))


def attended(
    steps: CacheOps, q: Tensor, held: LayerCache, pieces: tuple[Piece, ...], *rest: Any
) -> Tensor:
    scores, sinks, slopes = (*rest, None, None)[:3] if rest else (PLAIN, None, None)
    found = steps.attention(q, held, Batch(pieces, 0), scores, sinks, slopes)
    assert found is not None
    return found


def cut(whole: Piece, *sizes: int) -> list[Piece]:
    """Split a piece."""
    bounds = [whole.n_past]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    bounds.append(whole.stop)
    return [whole._replace(n_past=start, n=stop - start) for start, stop in pairwise(bounds)]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    size = st.sampled_from([0, 5, 64, 257])
    n_kv = draw(st.integers(1, 3))
    return {
        "isa": draw(st.sampled_from((ISAS[0], ISAS[-1]))),
        "kv_type": draw(st.sampled_from(["f16", "q8_0/q4_0"])),
        "n_kv": n_kv,
        "n_head": n_kv * draw(st.integers(1, 9)),
        "scores": Scores(0.15, draw(size), draw(size), draw(st.sampled_from([0.0, 2.0]))),
        "sinks": draw(st.booleans()),
        "slopes": draw(st.booleans()),
        "v_in_k": draw(st.booleans()),
        "is_irregular": draw(st.booleans()),
        "pages": draw(st.permutations(range(N_PAGES))),
        "n_past": draw(st.integers(0, 600)),
        "n": draw(st.sampled_from([1, 2, 9, 70])),
        "others": draw(st.lists(st.integers(0, 500), max_size=2)),
    }


@given(cases())
@settings(deadline=None, max_examples=25)
def test_any_sequences_on_any_pages(case: dict[str, Any]) -> None:
    n_head, n_kv, pages = case["n_head"], case["n_kv"], case["pages"]
    held = layer(case["kv_type"], n_head, n_kv, 96, 64, N_PAGES * PAGE, v_in_k=case["v_in_k"])
    if case["is_irregular"]:
        held.head_map = torch.tensor([i * i % n_kv for i in range(n_head)])
    tables = [pages[:3], pages[3:5], pages[5:7]]
    pieces = (
        Piece(case["n_past"], case["n"], (tables[0],)),
        *(Piece(n, 1, (t,)) for n, t in zip(case["others"], tables[1:], strict=False)),
    )
    batch = Batch(pieces, 0)
    q = numbers(8, batch.n_rows, n_head, 96) * 2
    sinks = numbers(9, n_head) if case["sinks"] else None
    slopes = numbers(10, n_head).abs() / 50 if case["slopes"] else None
    found = attended(
        CacheOps(ThreadPool(2), case["isa"]), q, held, pieces, case["scores"], sinks, slopes
    )
    q = as_multiplied(q, held, case["isa"])
    expected = attend(q, held, batch, case["scores"], sinks, slopes)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=8e-6)


@pytest.mark.parametrize("kv_type", MIXED)
def test_any_types_for_many_rows(kv_type: str) -> None:
    held, q = layer(kv_type, 6, 2, 64, 96, N_PAGES * PAGE), numbers(7, 20, 6, 64) * 2
    pieces = (piece(0, 500, 20),)
    found = attended(CacheOps(ThreadPool(2)), q, held, pieces)
    exact = attend(q, held, Batch(pieces, 0), PLAIN, None, None)
    expected = attend(as_multiplied(q, held), held, Batch(pieces, 0), PLAIN, None, None)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=8e-6)
    torch.testing.assert_close(found, exact, rtol=0.0, atol=4e-4)


@KINDS
@pytest.mark.parametrize(("n_head", "n_kv", "dims"), [(8, 2, (64, 64)), (3, 3, (40, 24))])
def test_rows_have_the_same_bits_in_any_pass(
    isa: Isa, n_head: int, n_kv: int, dims: tuple[int, int]
) -> None:
    held = layer("f16", n_head, n_kv, *dims, N_PAGES * PAGE)
    steps, sinks = CacheOps(ThreadPool(2), isa), numbers(12, n_head)
    whole, others = piece(0, 450, 100), (piece(1, 300, 1), piece(2, 511, 1))
    q = numbers(11, 102, n_head, dims[0])
    for scores in HIDING:
        expected = attended(steps, q, held, (whole, *others), scores, sinks)
        for sizes in ((1, 2, 7, 8, 9, 33), (62, 1, 1), (99,)):
            row = 0
            for part in cut(whole, *sizes):
                rows = q[row : row + part.n]
                found = attended(steps, rows, held, (part,), scores, sinks)
                assert torch.equal(found, expected[row : row + part.n]), (scores, part)
                row += part.n
        singles = (cut(whole, 98, 1)[2], *others)
        found = attended(CacheOps(ThreadPool(1), isa), q[99:], held, singles, scores, sinks)
        assert torch.equal(found, expected[99:]), scores


@pytest.mark.parametrize(
    ("isa", "kv_type"), first_in_full(ISAS, TYPES), ids=lambda x: getattr(x, "name", x)
)
def test_bits_of_all_types(isa: Isa, kv_type: str) -> None:
    """Decoding blocks first and reading them in place gives the same bits."""
    held, q = layer(kv_type, 4, 1, 64, 32, N_PAGES * PAGE), numbers(11, 30, 4, 64)
    whole = piece(2, 300, 30)
    steps = CacheOps(ThreadPool(1), isa)
    expected = attended(steps, q, held, (whole,))
    for row in (0, 7, 29):
        alone = attended(steps, q[row : row + 1], held, (piece(2, 300 + row, 1),))
        assert torch.equal(alone, expected[row : row + 1])


def test_latent_attention_with_many_heads() -> None:
    """Values are part of the keys, and one token's heads fill a tile."""
    held, q = layer("f16", 80, 1, 576, 512, N_PAGES * PAGE, v_in_k=True), numbers(3, 12, 80, 576)
    scores = Scores(0.05)
    whole = piece(0, 500, 12)
    found = attended(CacheOps(ThreadPool(2)), q, held, (whole,), scores)
    expected = attend(q, held, Batch((whole,), 0), scores, None, None)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=8e-6)
    alone = attended(CacheOps(ThreadPool(2)), q[5:6], held, (piece(0, 505, 1),), scores)
    assert torch.equal(alone, found[5:6])


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_prompts_of_few_pages(kv_type: str) -> None:
    """Tiles of a prompt whose pages are merged together give the same bits as single rows."""
    held, q = layer(kv_type, 8, 2, 64, 64, N_PAGES * PAGE), numbers(11, 300, 8, 64)
    whole, steps = piece(1, 0, 300), CacheOps(ThreadPool(2))
    for sinks in (None, numbers(12, 8)):
        found = attended(steps, q, held, (whole,), PLAIN, sinks)
        expected = attend(as_multiplied(q, held), held, Batch((whole,), 0), PLAIN, sinks, None)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=8e-6)
        for row in (0, 31, 63, 64, 255, 256, 299):
            alone = attended(steps, q[row : row + 1], held, (piece(1, row, 1),), PLAIN, sinks)
            assert torch.equal(alone, found[row : row + 1])


def test_page_results_are_merged_incrementally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for the results of all pages, the bits are the same."""
    held, q = layer("f16", 8, 2, 64, 64, N_PAGES * PAGE), numbers(3, 3, 8, 64)
    pieces = (piece(0, 700, 1), piece(1, 400, 1), piece(2, 90, 1))
    expected = attended(CacheOps(ThreadPool(2)), q, held, pieces)
    monkeypatch.setattr("engine.backends.cpu.kernels.cache.query_heads.ATTENTION_RESULTS_BYTES", 0)
    assert torch.equal(attended(CacheOps(ThreadPool(2)), q, held, pieces), expected)


@KINDS
@pytest.mark.parametrize("n", [1, 40])
def test_invisible_positions_may_hold_anything(isa: Isa, n: int) -> None:
    held, q = layer("f32", 8, 2, 64, 48, N_PAGES * PAGE), numbers(5, n, 8, 64)
    for scores in HIDING:
        pieces = (piece(0, 300, n),)
        expected = attended(CacheOps(ThreadPool(1), isa), q, held, pieces, scores)
        for number in (torch.nan, torch.inf):
            k, v = (torch.full_like(x, number) for x in (held.k, held.v))
            for slots in pieces[0].runs(0, scores.first_visible(300), 300 + n):
                seen = slice(slots.start, slots.stop)
                k[:, seen], v[:, seen] = held.k[:, seen], held.v[:, seen]
            other = layer("f32", 8, 2, 64, 48, N_PAGES * PAGE)
            other.k, other.v = k, v
            assert torch.equal(
                attended(CacheOps(ThreadPool(1), isa), q, other, pieces, scores), expected
            )


def test_an_infinite_value_affects_only_rows_that_see_it() -> None:
    held, q = layer("f32", 4, 1, 32, 32, N_PAGES * PAGE), numbers(5, 40, 4, 32)
    before = attended(CacheOps(ThreadPool(1)), q, held, (piece(0, 100, 40),))
    held.v[:, TABLES[0][0] * PAGE + 120] = torch.nan
    after = attended(CacheOps(ThreadPool(1)), q, held, (piece(0, 100, 40),))
    assert torch.equal(after[:20], before[:20])
    assert after[20:].isnan().all()


def test_freed_pages_are_not_read() -> None:
    held, q = layer("f16", 4, 2, 32, 32, N_PAGES * PAGE), numbers(5, 30, 4, 32)
    scores = Scores(0.2, window=100)
    gone = Piece(620, 30, ([GONE, GONE, 3],))
    found = attended(CacheOps(ThreadPool(1)), q, held, (gone,), scores)
    whole = gone._replace(tables=(TABLES[0],))
    assert torch.equal(found, attended(CacheOps(ThreadPool(1)), q, held, (whole,), scores))


@pytest.mark.parametrize("kv_type", TYPES)
def test_writing_to_pages(kv_type: str) -> None:
    fast, plain = (layer(kv_type, 4, 2, 64, 32, N_PAGES * PAGE) for _ in range(2))
    batch = Batch((piece(0, 200, 400), piece(1, 255, 1), piece(2, 256, 1)), 0)
    k, v = numbers(3, 402, 2, 64), numbers(4, 402, 2, 32)
    assert CacheOps(ThreadPool(2)).write(fast, k, v, batch)
    plain.write(k, v, batch)
    assert torch.equal(fast.k, plain.k)
    assert torch.equal(fast.v, plain.v)


def test_layers_of_a_group_use_its_tables() -> None:
    first, second = (layer("f16", 2, 1, 32, 32, N_PAGES * PAGE) for _ in range(2))
    second.group = 1
    q = numbers(5, 1, 2, 32)
    tables = TABLES[0], TABLES[1]
    both = (Piece(300, 1, tables),)
    steps = CacheOps(ThreadPool(1))
    for held, table in zip((first, second), tables, strict=True):
        found = attended(steps, q, held, both)
        alone = attend(q, first, Batch((Piece(300, 1, (table,)),), 0), PLAIN, None, None)
        torch.testing.assert_close(found, alone, rtol=2e-5, atol=8e-6)


def test_recorded_calls_can_be_replayed_for_other_sequences() -> None:
    """Each number of single tokens has separate, fixed addresses."""
    steps, held = CacheOps(ThreadPool(1)), layer("f16", 4, 2, 32, 32, N_PAGES * PAGE)
    kinds, recorded = [PLAIN, Scores(0.2, window=20)], []
    for n in (1, 2, 3):
        q, k = numbers(18, n, 4, 32), numbers(19, n, 2, 32)
        log = CallLog()
        batch = Batch(tuple(piece(i, 100 + i, 1) for i in range(n)), 0)
        steps.begin(batch)
        steps._pool.log_calls(log.address)
        steps.write(held, k, k, batch)
        outs = [steps.attention(q, held, batch, scores, None, None) for scores in kinds]
        steps._pool.log_calls(0)
        recorded.append((KernelReplay(log, steps._pool), log.n_used, q, k, outs))
    attended(steps, numbers(1, 50, 4, 32), held, (piece(0, 0, 50),))
    for moved in ((2, 1, 0), (1, 0, 2)):
        for n, (replay, stop, q, k, outs) in enumerate(recorded, 1):
            batch = Batch(tuple(piece(i, 90 * i + 130, 1) for i in moved[:n]), 0)
            steps.begin(batch)
            replay.run(0, stop)
            for row, one in enumerate(batch.pieces):
                (slots,) = one.runs(0, one.n_past, one.stop)
                assert torch.equal(held.k[:, slots.start], k[row].half())
            for scores, out in zip(kinds, outs, strict=True):
                assert out is not None
                assert torch.equal(
                    out, attended(CacheOps(ThreadPool(1)), q, held, batch.pieces, scores)
                )


def test_a_growing_page_table_is_detected() -> None:
    steps, held, table = CacheOps(ThreadPool(1)), layer("f16", 2, 1, 32, 32, N_PAGES * PAGE), [2]
    q = numbers(5, 1, 2, 32)
    attended(steps, q, held, (Piece(255, 1, (table,)),))
    table.append(5)
    found = attended(steps, q, held, (Piece(256, 1, (table,)),))
    expected = attended(CacheOps(ThreadPool(1)), q, held, (Piece(256, 1, ([2, 5],)),))
    assert torch.equal(found, expected)
