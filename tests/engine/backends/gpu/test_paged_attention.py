"""Attention and writing over pages in any order, of several sequences in a pass."""

import random

import pytest
import torch
from torch import Tensor

from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.backends.gpu.ops import GpuOps
from engine.model.forward.attention import attend
from engine.model.forward.batch import MAX_AT_ONCE, Batch, Piece
from engine.model.forward.cache import LayerCache
from engine.model.forward.operands import Scores
from engine.model.forward.pages import GONE, PAGE
from engine.model.forward.state import KVState
from engine.model.sharding.shares import Ranges

N_CTX, N_PAGES = 5 * PAGE, 13
N_HEAD, N_KV, DIM = 4, 2, 32
SCORES = Scores(0.2)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(kv_type: str, device: str, group: int = 0, **sizes: bool) -> LayerCache:
    """Return a layer's cache full of random numbers."""
    heads, kv_heads = Ranges(((0, N_HEAD),), N_HEAD), Ranges(((0, N_KV),), N_KV)
    state = KVState(heads, kv_heads, DIM, DIM, **sizes)
    held = LayerCache(state, 0, N_PAGES * PAGE, kv_type, torch.device("cpu"), group)
    n = N_PAGES * PAGE
    held.write(numbers(1, n, N_KV, DIM), numbers(2, n, N_KV, DIM), Batch.of_one(0, n, 0))
    held.k, held.v = held.k.to(device), held.v.to(device)
    return held


def tables(seed: int, *lengths: int, first: tuple[int, ...] = ()) -> list[list[int]]:
    """Return tables of sequences of some lengths, with pages anywhere in the cache.

    Args:
        first: the first position that each sequence sees; all by default.
    """
    pages = random.Random(seed).sample(range(N_PAGES), N_PAGES)
    found = []
    for n, start in zip(lengths, first or (0,) * len(lengths), strict=True):
        found.append([pages.pop() for _ in range(-(-n // PAGE))])
        found[-1][: start // PAGE] = [GONE] * (start // PAGE)
    return found


def batch_of(n: int, lengths: tuple[int, ...], pages: list[list[int]], group: int = 0) -> Batch:
    """Return a batch of the last n tokens of the first sequence, and of one of each other."""
    counts = [n] + [1] * (len(lengths) - 1)
    return Batch(
        tuple(
            Piece(length - count, count, ((),) * group + (table,))
            for length, count, table in zip(lengths, counts, pages, strict=True)
        ),
        0,
    )


def positions(batch: Batch, device: str) -> Tensor:
    found = [torch.arange(piece.n_past, piece.stop) for piece in batch.pieces]
    return torch.cat(found).to(device)


def begun(batch: Batch, device: str) -> GpuOps:
    ops = GpuOps(torch.device(device), n_ctx=N_CTX)
    ops.begin(batch, positions(batch, device))
    return ops


CASES = [
    (1, (700,)), (1, (700, 3, 257)), (3, (900, 256, 512)), (20, (300, 40)), (300, (520,)),
    (1, (50,) * 9),
]  # fmt: skip
"""Number of tokens of the first sequence, and lengths of the sequences after the pass."""


@pytest.mark.parametrize(
    ("kv_type", "case"),
    [*(("f16", case) for case in CASES), *((t, CASES[2]) for t in ("f32", "bf16", "q8_0", "q4_0")),
     ("q8_0/q4_0", CASES[3])],
)  # fmt: skip
def test_pages_anywhere(kv_type: str, case: tuple[int, tuple[int, ...]], device: str) -> None:
    """New keys and values get the reference's bytes, and rows see only their own sequence."""
    n, lengths = case
    batch = batch_of(n, lengths, tables(3, *lengths))
    fast, plain = layer(kv_type, device), layer(kv_type, "cpu")
    q, k, v = (numbers(i, batch.n_rows, heads, DIM) for i, heads in ((4, 4), (5, 2), (6, 2)))
    plain.write(k, v, batch)
    expected = attend(q, plain, batch, SCORES, None, None)
    ops = begun(batch, device)
    q, k, v = q.to(device), k.to(device), v.to(device)
    found = ops.new_attention(q, k, v, fast, batch, SCORES)
    assert torch.equal(fast.k.cpu(), plain.k)
    assert torch.equal(fast.v.cpu(), plain.v)
    atol = 2e-4 if kv_type == "bf16" else 2e-5  # Triton's interpreter cuts to BF16
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=atol)
    assert torch.equal(ops.attention(q, fast, batch, SCORES), found)
    written = layer(kv_type, device)
    ops.write_cache(written, k, v, batch)
    assert torch.equal(written.k, fast.k)
    assert torch.equal(written.v, fast.v)


@pytest.mark.parametrize("scores", [Scores(0.2, window=70), Scores(0.2, chunk=512)], ids=str)
@pytest.mark.parametrize("n", [1, 3, 20])
def test_pages_behind_a_window_are_never_read(scores: Scores, n: int, device: str) -> None:
    """The table may hold anything in their place."""
    lengths = (1100, 1023, 515)
    starts = [length - (n if i == 0 else 1) for i, length in enumerate(lengths)]
    first = tuple(scores.first_visible(start) for start in starts)
    batch = batch_of(n, lengths, tables(7, *lengths, first=first), group=1)
    held, q = layer("f16", device, group=1), numbers(8, batch.n_rows, N_HEAD, DIM).to(device)
    seen = [piece.tables[1][f // PAGE :] for piece, f in zip(batch.pieces, first, strict=True)]
    unseen = set(range(N_PAGES)) - {page for pages in seen for page in pages}
    for page in unseen:
        held.k[:, page * PAGE : (page + 1) * PAGE] = torch.nan
    found = begun(batch, device).attention(q, held, batch, scores)
    expected = attend(q, held, batch, scores, None, None)
    assert unseen
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_bits_do_not_depend_on_pages_or_other_sequences(device: str) -> None:
    lengths = (600, 70, 300)
    batch = batch_of(1, lengths, tables(9, *lengths))
    held, q = layer("f16", device), numbers(10, 3, N_HEAD, DIM).to(device)
    together = begun(batch, device).attention(q, held, batch, SCORES)
    for row, piece in enumerate(batch.pieces):
        ordered = layer("f16", device)
        for index, page in enumerate(piece.tables[0]):
            goal, source = (slice(i * PAGE, (i + 1) * PAGE) for i in (index, page))
            ordered.k[:, goal], ordered.v[:, goal] = held.k[:, source], held.v[:, source]
        alone = Batch.of_one(piece.n_past, 1, 0)
        found = begun(alone, device).attention(q[row : row + 1], ordered, alone, SCORES)
        assert torch.equal(found[0], together[row])


def test_sinks_and_slopes_of_several_sequences(device: str) -> None:
    lengths = (400, 30)
    batch = batch_of(12, lengths, tables(11, *lengths))
    held, q = layer("f32", device), numbers(12, batch.n_rows, N_HEAD, DIM).to(device)
    sinks, slopes = numbers(13, N_HEAD).to(device) * 9, numbers(14, N_HEAD).abs().to(device) / 20
    found = begun(batch, device).attention(q, held, batch, SCORES, sinks, slopes)
    expected = attend(q, held, batch, SCORES, sinks, slopes)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_launches_serve_other_sequences_as_a_graph_replays_them(device: str) -> None:
    held, q = layer("f16", device), numbers(15, 2, N_HEAD, DIM).to(device)
    k, v = (numbers(n, 2, N_KV, DIM).to(device) for n in (16, 17))
    starts = list[KernelLaunch]()
    batches = [batch_of(1, n, tables(seed, *n)) for seed, n in ((18, (5, 9)), (19, (700, 512)))]
    ops, memory = GpuOps(torch.device(device), n_ctx=N_CTX), torch.zeros(2, dtype=torch.int64)
    memory = memory.to(device)
    memory.copy_(positions(batches[0], device))
    ops.begin(batches[0], memory)
    with intercept_launches(lambda start: starts.append(start) or True):
        out = ops.new_attention(q, k, v, held, batches[0], SCORES)
    fresh = layer("f16", device)
    memory.copy_(positions(batches[1], device))
    ops.begin(batches[1], memory)
    held.k.copy_(fresh.k)
    held.v.copy_(fresh.v)
    for start in starts:
        start.run()
    expected = begun(batches[1], device).new_attention(q, k, v, fresh, batches[1], SCORES)
    assert torch.equal(out, expected)
    assert torch.equal(held.k, fresh.k)


def test_a_sequence_that_gets_pages_is_begun_anew(device: str) -> None:
    """Only changes are written to the tables, wherever they are."""
    ops = GpuOps(torch.device(device), n_ctx=N_CTX)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    for pages in ([4], [4, 2], [7, 2, 1], [GONE, 2, 1, 5]):
        ops.begin(Batch((Piece(0, 1, ((), pages)),), 0), place)
        rows = ops.tables.rows(1)
        assert rows is not None
        assert rows.tables[0, : len(pages)].tolist() == pages
    ops.begin(Batch.of_one(0, 1, 0), place)
    rows = ops.tables.rows(1)
    assert rows is not None
    assert rows.tables[0].tolist() == list(range(N_CTX // PAGE))


def test_too_many_sequences_are_left_to_the_reference(device: str) -> None:
    lengths = (2,) * (MAX_AT_ONCE + 1)
    batch = batch_of(1, lengths, [[i % N_PAGES] for i in range(len(lengths))])
    held, q = layer("f32", device), numbers(20, batch.n_rows, N_HEAD, DIM).to(device)
    found = begun(batch, device).attention(q, held, batch, SCORES)
    assert torch.equal(found, attend(q, held, batch, SCORES, None, None))


@pytest.mark.parametrize("seats", [(0, 0), (0, 1)], ids=["one sequence", "two"])
def test_keys_of_guesses_are_there_before_any_row_looks(seats: tuple[int, int]) -> None:
    """Programs of a launch run in any order, and there is one per row."""
    pages = tables(3, 150)
    pieces = [
        Piece(148 + k, 1, (tuple(pages[0]),), batch_index=seat) for k, seat in enumerate(seats)
    ]
    cache, batch = layer("f16", "cpu"), Batch(tuple(pieces), 0)
    ops, starts = GpuOps(torch.device("cpu"), n_ctx=N_CTX), list[KernelLaunch]()
    ops.begin(batch, torch.tensor([148, 149]))
    q, k, v = numbers(3, 2, N_HEAD, DIM), numbers(4, 2, N_KV, DIM), numbers(5, 2, N_KV, DIM)
    with intercept_launches(lambda start: starts.append(start) is None):
        ops.new_attention(q, k, v, cache, batch, SCORES)
    (attending,) = (start for start in starts if "TOKENS" in start.constants)
    assert (attending.constants["TOKENS"] == 0) == (seats == (0, 0))


def test_one_launch_for_all_single_tokens() -> None:
    lengths = (40,) * 8
    batch = batch_of(1, lengths, tables(21, *lengths))
    held, starts = layer("f16", "cpu"), list[KernelLaunch]()
    q, k = numbers(22, 8, N_HEAD, DIM), numbers(23, 8, N_KV, DIM)
    with intercept_launches(lambda start: starts.append(start) or True):
        begun(batch, "cpu").new_attention(q, k, k, held, batch, SCORES)
    names = [start.kernel.fn.__name__ for start in starts]
    assert names == ["attend", "combine"]
    assert starts[0].grid[2] == 8
