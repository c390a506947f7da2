"""Attention by kernels against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.backends.gpu import attention as gpu
from engine.backends.gpu.attention import write
from engine.backends.gpu.launch.configs import KernelTarget, use_target
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.backends.gpu.page_tables import PagedRows
from engine.model.forward.attention import attend
from engine.model.forward.batch import Batch
from engine.model.forward.cache import LayerCache
from engine.model.forward.operands import Scores
from engine.model.forward.state import KVState
from engine.model.sharding.shares import Ranges
from tests.helpers.kv_pairs import MIXED
from tests.helpers.tiers import paired

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
PLAIN = Scores(0.2)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(
    kv_type: str, n_head: int, n_kv: int, dim_k: int, dim_v: int, n_ctx: int, *,
    v_in_k: bool = False, device: str = "cpu",
) -> LayerCache:  # fmt: skip
    """Return a layer's cache full of random numbers."""
    heads, kv_heads = (Ranges(((0, n),), n) for n in (n_head, n_kv))
    state = KVState(heads, kv_heads, dim_k, dim_v, v_in_k=v_in_k)
    held = LayerCache(state, 0, n_ctx, kv_type, torch.device(device))
    if device == "meta":
        return held
    held = LayerCache(state, 0, n_ctx, kv_type, torch.device("cpu"))
    v = None if v_in_k else numbers(2, n_ctx, n_kv, dim_v)
    held.write(numbers(1, n_ctx, n_kv, dim_k), v, Batch.of_one(0, n_ctx, 0))
    return moved(held, device)


def moved(held: LayerCache, device: str) -> LayerCache:
    """Return a copy of a cache on another device."""
    n_unit = held.v.shape[-1]
    held.k = held.k.to(device)
    held.v = held.k[..., :n_unit] if held.is_shared else held.v.to(device)
    held.head_map = None if held.head_map is None else held.head_map.to(device)
    return held


def alone(held: LayerCache, n_past: int, n_tokens: int, device: str = "cpu") -> PagedRows:
    """Return the rows of a sequence that has the cache alone."""
    positions = torch.arange(n_past, n_past + n_tokens, device=device)
    return PagedRows.alone(positions, held.k.shape[1])


def check(
    held: LayerCache, q: Tensor, n_past: int, scores: Scores = PLAIN,
    sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Check that attention gives the reference's result."""
    found = gpu.attention(
        q, held, alone(held, n_past, len(q), str(q.device)), scores, sinks, slopes
    )
    assert found is not None
    expected = attend(q, held, Batch.of_one(n_past, len(q), 0), scores, sinks, slopes)
    atol = 2e-4 if "bf16" in held.types else 2e-5  # Triton's interpreter cuts to BF16
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)
    return found


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink tiles and pieces, so that a short context has many."""
    monkeypatch.setattr(gpu, "FEW_KEYS", 16)
    monkeypatch.setattr(gpu, "FEW_PIECES", 2)
    monkeypatch.setattr(gpu, "MANY_KEYS", 16)
    monkeypatch.setattr(gpu, "MAX_PIECES", 2)
    whole = gpu.tiles_of

    def tiles_of(shape: gpu.AttentionShape, target: KernelTarget, *, is_few: bool) -> gpu.TileSizes:
        return replace(whole(shape, target, is_few=is_few), rows=4 if is_few else 8, keys=16)

    monkeypatch.setattr(gpu, "tiles_of", tiles_of)


@pytest.mark.parametrize("kv_type", [*TYPES, *MIXED])
@pytest.mark.parametrize(("n_tokens", "n_past"), [(1, 0), (2, 61), (20, 40)])
@pytest.mark.usefixtures("small_tiles")
def test_each_type_of_the_cache(kv_type: str, n_tokens: int, n_past: int, device: str) -> None:
    held = layer(kv_type, 4, 2, 64, 32, 70, device=device)
    check(held, numbers(3, n_tokens, 4, 64).to(device) * 2, n_past)


@pytest.mark.parametrize("dims", [(1, 1), (8, 24), (40, 80), (96, 112)])
@pytest.mark.usefixtures("small_tiles")
def test_heads_that_end_anywhere(dims: tuple[int, int], device: str) -> None:
    check(layer("f16", 2, 1, *dims, 30, device=device), numbers(4, 2, 2, dims[0]).to(device), 27)


@pytest.mark.parametrize(
    "scores",
    [
        Scores(0.2, window=1), Scores(0.2, window=21), Scores(0.2, chunk=32),
        Scores(0.2, window=20, chunk=50), Scores(0.3, softcap=2.0), Scores(0.2, first=1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("n_tokens", "n_past"), [(3, 62), (12, 40)])
@pytest.mark.usefixtures("small_tiles")
def test_what_tokens_see(scores: Scores, n_tokens: int, n_past: int, device: str) -> None:
    held = layer("f16", 2, 1, 16, 16, 66, device=device)
    check(held, numbers(5, n_tokens, 2, 16).to(device) * 2, n_past, scores)


@pytest.mark.parametrize(("n_tokens", "n_past"), [(2, 40), (20, 9)])
@pytest.mark.usefixtures("small_tiles")
def test_sinks_and_slopes(n_tokens: int, n_past: int, device: str) -> None:
    """Both for few tokens and for many, where keys are one piece."""
    held = layer("f32", 4, 2, 16, 16, 42, device=device)
    q = numbers(6, n_tokens, 4, 16).to(device)
    sinks, slopes = numbers(7, 4).to(device) * 30, numbers(8, 4).to(device).abs() / 20
    check(held, q, n_past, PLAIN, sinks, None)
    check(held, q, n_past, PLAIN, None, slopes)


@pytest.mark.parametrize("kv_type", ["f16", "q4_0"])
@pytest.mark.parametrize("n_tokens", [1, 20])
@pytest.mark.usefixtures("small_tiles")
def test_values_that_are_part_of_keys(kv_type: str, n_tokens: int, device: str) -> None:
    held = layer(kv_type, 4, 1, 96, 64, 40, v_in_k=True, device=device)
    check(held, numbers(9, n_tokens, 4, 96).to(device), 20)


def test_long_heads_whose_queries_are_read_again(device: str) -> None:
    held = layer("f16", 2, 1, 320, 256, 40, v_in_k=True, device=device)
    check(held, numbers(10, 3, 2, 320).to(device), 30, Scores(0.05))


@pytest.mark.parametrize("n_tokens", [1, 20])
@pytest.mark.usefixtures("small_tiles")
def test_heads_that_are_mapped(n_tokens: int, device: str) -> None:
    held = layer("f16", 5, 2, 16, 32, 50, device=device)
    held.head_map = torch.tensor([0, 1, 1, 0, 1], device=device)
    check(held, numbers(11, n_tokens, 5, 16).to(device), 29)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_queries_of_all_sizes(kv_type: str, scale: float, device: str) -> None:
    held = layer(kv_type, 2, 1, 32, 32, 20, device=device)
    check(held, numbers(12, 1, 2, 32).to(device) * scale, 10, Scores(1 / scale))


@pytest.mark.parametrize("size", [1e-3, 1e4])
def test_values_of_all_sizes(size: float, device: str) -> None:
    """Values in blocks: their scales are multiplied with weights in F16."""
    held = layer("q8_0", 2, 1, 32, 32, 20)
    held.write(numbers(1, 20, 1, 32), numbers(2, 20, 1, 32) * size, Batch.of_one(0, 20, 0))
    q, held = numbers(18, 1, 2, 32).to(device), moved(held, device)
    found = gpu.attention(q, held, alone(held, 10, 1, device), PLAIN)
    assert found is not None
    expected = attend(q, held, Batch.of_one(10, len(q), 0), PLAIN, None, None)
    torch.testing.assert_close(found / size, expected / size, rtol=1e-4, atol=2e-5)


def test_scores_far_apart(device: str) -> None:
    """The largest score may come late, so that earlier ones have no weight."""
    held = layer("f32", 2, 1, 16, 16, 150, device=device)
    held.k *= 400
    check(held, numbers(13, 1, 2, 16).to(device).abs() * 10, 149, Scores(1.0))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.usefixtures("small_tiles")
def test_bits_do_not_depend_on_other_tokens(kv_type: str, device: str) -> None:
    held = layer(kv_type, 3, 1, 32, 32, 60, device=device)
    q, sinks = numbers(14, 8, 3, 32).to(device), numbers(15, 3).to(device)
    for scores in (PLAIN, Scores(0.2, window=20)):
        together = gpu.attention(q, held, alone(held, 44, 8, device), scores, sinks)
        assert together is not None
        for token in (0, 4, 7):
            one = q[token : token + 1]
            rows = alone(held, 44 + token, 1, device)
            by_itself = gpu.attention(one, held, rows, scores, sinks)
            assert by_itself is not None
            assert torch.equal(together[token], by_itself[0])


@pytest.mark.parametrize(
    ("kv_type", "lengths"),
    [
        *paired(list(TYPES), [(1, 33), (8, 27), (9, 0)]),
        ("q4_0/f16", (1, 33)), ("f32/q8_0", (8, 27)), ("q8_0/q4_0", (9, 0)),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("small_tiles")
def test_new_keys_and_values_are_written_first(
    kv_type: str, lengths: tuple[int, int], device: str
) -> None:
    """For few tokens the attention kernel writes them, with the bits of the writing kernel."""
    n_tokens, n_past = lengths
    q, k, v = (numbers(n, n_tokens, 4 // n, 96).to(device) for n in (1, 2, 4))
    v = v.expand(-1, 2, -1)[..., :32]
    for scores in (PLAIN, Scores(0.2, window=3)):
        both = [layer(kv_type, 4, 2, 96, 32, 40, device=device) for _ in range(2)]
        place = alone(both[0], n_past, n_tokens, device)
        found = gpu.attention(q, both[0], place, scores, new=(k, v))
        assert write(both[1], k, v, place)
        expected = gpu.attention(q, both[1], place, scores)
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)
        assert torch.equal(both[0].k, both[1].k)
        assert torch.equal(both[0].v, both[1].v)


def test_new_keys_that_are_values_too(device: str) -> None:
    both = [layer("q8_0", 4, 1, 96, 64, 40, v_in_k=True, device=device) for _ in range(2)]
    q, k = numbers(1, 2, 4, 96).to(device), numbers(2, 2, 1, 96).to(device)
    place = alone(both[0], 9, 2, device)
    found = gpu.attention(q, both[0], place, PLAIN, new=(k, None))
    assert write(both[1], k, None, place)
    expected = gpu.attention(q, both[1], place, PLAIN)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)
    assert torch.equal(both[0].k, both[1].k)


@pytest.mark.parametrize("n_tokens", [1, 12, 20])
@pytest.mark.usefixtures("small_tiles")
def test_only_the_position_in_memory_counts(n_tokens: int, device: str) -> None:
    """Launches also work after other tokens, as a graph replays them.

    The tokens are few, some, and enough for a single piece.
    """
    held, q = layer("f16", 2, 1, 16, 16, 80, device=device), numbers(16, n_tokens, 2, 16)
    q, place, starts = q.to(device), alone(held, 3, n_tokens, device), list[KernelLaunch]()
    positions = place.positions

    def note(start: KernelLaunch) -> bool:
        starts.append(start)
        return True

    for scores in (PLAIN, Scores(0.2, window=25)):
        starts.clear()
        positions.copy_(torch.arange(3, 3 + n_tokens))
        with intercept_launches(note):
            out = gpu.attention(q, held, place, scores)
        assert out is not None
        positions.copy_(torch.arange(55, 55 + n_tokens))
        for start in starts:
            start.run()
        expected = gpu.attention(q, held, alone(held, 55, n_tokens, device), scores)
        assert expected is not None
        assert torch.equal(out, expected)
        torch.testing.assert_close(
            out,
            attend(q, held, Batch.of_one(55, len(q), 0), scores, None, None),
            rtol=1e-4,
            atol=3e-5,
        )


@pytest.mark.parametrize("scores", [PLAIN, Scores(0.1, window=512)], ids=str)
def test_memory_beside_inputs_is_what_is_said(scores: Scores) -> None:
    """All new tensors count except the result; on a device without memory."""
    target = KernelTarget("nvidia", 86, 82)
    held = layer("f16", 32, 8, 128, 128, 1 << 15, device="meta")
    made = dict[int, int]()
    for n_tokens in (1, 8, 9, 30, 160, 2000):
        q, starts = torch.empty(n_tokens, 32, 128, device="meta"), list[KernelLaunch]()
        place = alone(held, 0, n_tokens, "meta")

        def note(start: KernelLaunch, starts: list[KernelLaunch] = starts) -> bool:
            starts.append(start)
            return True

        with use_target(target), intercept_launches(note):
            out = gpu.attention(q, held, place, scores)
        assert out is not None
        assert out.shape == q.shape
        tensors = {id(x): x for x in starts[0].args if isinstance(x, Tensor)}
        known = {id(x) for x in (q, held.k, held.v, out, *place)}
        made[n_tokens] = sum(x.nbytes for key, x in tensors.items() if key not in known)
        said = gpu.work_bytes(gpu.shape_of(q, held, place, scores), n_tokens, target)
        assert max(made.values()) <= said <= 2 * max(made.values())
    assert not made[2000]


def test_what_does_not_fit_is_refused() -> None:
    held, q = layer("f16", 4, 2, 32, 32, 40), numbers(17, 1, 4, 32)
    place = alone(held, 3, 1)
    for wrong in (q[..., :31], q[:, :3], q.double(), q.mT):
        assert gpu.attention(wrong, held, place, PLAIN) is None
    assert gpu.attention(q, held, place, PLAIN, numbers(18, 3)) is None
    assert gpu.attention(q, held, place, PLAIN, None, numbers(18, 4).double()) is None
    before = held.k.clone()
    for wrong in (numbers(19, 1, 2, 31), numbers(19, 2, 2, 32), numbers(19, 1, 1, 32)):
        assert gpu.attention(q, held, place, PLAIN, new=(wrong, wrong)) is None
    assert torch.equal(held.k, before)
    held.is_on_host = True
    assert gpu.attention(q, held, place, PLAIN) is None
