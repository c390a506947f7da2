"""Positions to which handles snap."""

import gc
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import LoadParams, Planner, load_model
from engine.formats.gguf.reader import GGUFFile
from engine.model.architectures.declare import declare
from engine.planning.evaluation.handle_positions import MAX_STEPS
from engine.planning.plan import make_plan
from tests.helpers.hollow import hollow_moe
from tests.helpers.tiny_gguf import tiny_gguf

SETTINGS = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [
        tiny_gguf(folder / "a.gguf", n_layer=5, n_head=8, n_head_kv=4, n_ff=300),
        tiny_gguf(folder / "b.gguf", arch="qwen3", n_head_kv=1, qk_norm=True, tied=True),
        hollow_moe(folder / "c.gguf", n_layer=7, n_embd=512, n_head=16, n_vocab=500),
    ]


def boundary(planner: Planner, params: LoadParams, handle: int) -> float:
    return sum(d.effective for d in planner.plan(params).devices[: handle + 1])


@SETTINGS
@given(
    index=st.integers(0, 2),
    split=st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any),
    mode=st.sampled_from(["tensor", "layer", "groups"]),
    data=st.data(),
)
def test_every_position_gives_the_share_it_says(
    paths: list[Path], index: int, split: list[int], mode: str, data: st.DataObject
) -> None:
    """A separate plan, declared as by the loader, has the same share; other ranks keep theirs."""
    path, handle = paths[index], data.draw(st.integers(0, len(split) - 2))
    params = LoadParams(str(path), ("cpu",) * len(split), tuple(map(float, split)), mode)
    positions = Planner(path).positions(params, handle)
    chosen = data.draw(st.lists(st.integers(0, len(positions) - 1), min_size=1, max_size=5))
    with GGUFFile.open(path) as file:
        for i in chosen:
            asked = replace(params, split=positions[i].split)
            devices = make_plan(declare(file, asked), asked, None).devices
            assert sum(d.effective for d in devices[: handle + 1]) == positions[i].effective
            assert devices[handle].asked + devices[handle + 1].asked == pytest.approx(
                sum(positions[0].split[handle : handle + 2])
            )


@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("split", [(1.0, 1.0, 1.0), (0.0, 1.0, 3.0)])
def test_the_nearest_position_is_found_by_what_ranks_get(
    paths: list[Path], split: tuple[float, ...], mode: str
) -> None:
    params = LoadParams(str(paths[2]), ("cpu",) * 3, split, mode)
    positions = Planner(paths[2]).positions(params, 1)
    moves = [positions.nearest(x / 29) for x in (0, 29, *range(7, 19), 3, 25)]
    shares = [positions[i].effective for i in range(len(positions))]
    for x, index in zip((0, 29, *range(7, 19), 3, 25), moves, strict=True):
        distance = min(abs(share - x / 29) for share in shares)
        assert abs(shares[index] - x / 29) == pytest.approx(distance, abs=1e-3)


def test_a_step_changes_what_ranks_get_and_ends_at_the_ends(paths: list[Path]) -> None:
    planner = Planner(paths[0])
    positions = planner.positions(LoadParams(str(paths[0]), ("cpu",) * 2), 0)
    shares, index = [positions[0].effective], 0
    while index < len(positions) - 1:
        index = positions.after(index)
        shares.append(positions[index].effective)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert len(shares) > 5 * 4, "units of 32 columns and heads, in five blocks"
    assert all(a < b for a, b in pairwise(shares))
    assert positions.after(index) == index
    back = [positions[index].effective]
    while index > 0:
        index = positions.before(index)
        back.append(positions[index].effective)
    assert back[::-1] == shares


def test_a_layer_split_moves_by_whole_blocks(paths: list[Path]) -> None:
    params = LoadParams(str(paths[0]), ("cpu",) * 3, (2, 2, 1), "layer")
    positions = Planner(paths[0]).positions(params, 0)
    assert [p.split for p in map(positions.__getitem__, range(len(positions)))] == [
        pytest.approx((n / 5, (4 - n) / 5, 1 / 5)) for n in range(5)
    ]


def test_ranks_without_a_share_have_nothing_to_move(paths: list[Path]) -> None:
    positions = Planner(paths[0]).positions(LoadParams(str(paths[0]), ("cpu",) * 3, (0, 0, 1)), 0)
    assert len(positions) == 1
    assert positions.nearest(0.5) == positions.after(0) == positions.before(0) == 0


def test_positions_really_load(paths: list[Path]) -> None:
    params = LoadParams(str(paths[0]), ("cpu",) * 2)
    positions = Planner(paths[0]).positions(params, 0)
    for i in (0, positions.nearest(0.37), len(positions) - 1):
        with load_model(paths[0], ["cpu"] * 2, positions[i].split, n_ctx=16) as model:
            assert model.logits([1, 2]).shape[0] == 2


def test_a_large_model_answers_at_once(tmp_path: Path) -> None:
    """80 blocks of 128 experts: a drag begins and goes on without delay."""
    path = hollow_moe(tmp_path / "m.gguf")
    planner, gpus = Planner(path), ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    params = LoadParams(str(path), gpus, (4, 3, 2, 1))
    planner.plan(params)
    gc.collect()  # else that of all tests before may come now
    start = time.thread_time()
    positions = planner.positions(params, 1)
    positions.nearest(0.6)
    assert time.thread_time() - start < 0.1
    assert len(positions) == MAX_STEPS + 1
    moves = [0.6 + 0.002 * i for i in range(30)]
    start = time.thread_time()
    found = [positions[positions.nearest(x)] for x in moves]
    assert (time.thread_time() - start) / len(moves) < 0.012
    step = (positions[MAX_STEPS].effective - positions[0].effective) / MAX_STEPS
    assert all(abs(p.effective - x) < step for p, x in zip(found, moves, strict=True))
