"""Longest contexts, remedies where a model does not fit, and shares by memory."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import EngineError, LoadParams, Planner
from engine.planning.evaluation.fit import CONTEXT_STEP, Room
from tests.helpers.hollow import hollow_moe
from tests.helpers.tiny_gguf import tiny_gguf

GIB = 1 << 30


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    """Return the planner of a model of 12 blocks with 128 experts, 33 GiB in the file."""
    return Planner(hollow_moe(tmp_path_factory.mktemp("fit") / "m.gguf", n_layer=12))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    """Return the planner of a dense model of 10 MiB in F32."""
    path = tmp_path_factory.mktemp("fit") / "d.gguf"
    return Planner(tiny_gguf(path, n_layer=8, n_head=8, n_head_kv=4, head_dim=32, n_ctx=65536))


def rooms(cpu: float, *gpus: float) -> list[Room]:
    """Return devices with these GiB; later GPUs are slower, the CPU is the slowest."""
    cards = [Room(f"cuda:{i}", int(g * GIB), (9 - i) * 1e11) for i, g in enumerate(gpus)]
    return [*cards, Room("cpu", int(cpu * GIB), 5e10)]


def asked(planner: Planner, *devices: str, **more: object) -> LoadParams:
    params = LoadParams(planner.info.path, devices, n_ctx=8192)
    return replace(params, **more)


def fits(planner: Planner, params: LoadParams, machine: list[Room]) -> bool:
    free = {room.device: room.free_bytes for room in machine}
    return not planner.plan(params, free).shortages(free)


@pytest.mark.parametrize("free", [0.7, 0.75, 1.0, 2.0])
def test_the_longest_context_fits_and_a_longer_one_does_not(dense: Planner, free: float) -> None:
    machine, params = rooms(8, free), asked(dense, "cuda:0", kv_type="f32")
    longest = dense.fit(machine).largest_context(params)
    assert longest % CONTEXT_STEP == 0
    assert 0 < longest <= dense.info.n_ctx_train
    assert fits(dense, replace(params, n_ctx=longest), machine)
    if longest < dense.info.n_ctx_train:
        assert not fits(dense, replace(params, n_ctx=longest + CONTEXT_STEP), machine)


def test_no_context_fits_where_the_weights_do_not(moe: Planner) -> None:
    assert moe.fit(rooms(64, 10)).largest_context(asked(moe, "cuda:0")) == 0


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    gpus=st.lists(st.floats(2, 48), min_size=1, max_size=4),
    cpu=st.sampled_from([4, 24, 100]),
    n=st.integers(1, 4),
    mode=st.sampled_from(["tensor", "layer"]),
)
def test_every_remedy_fits(moe: Planner, gpus: list[float], cpu: float, n: int, mode: str) -> None:
    machine = rooms(cpu, *gpus)
    used = [room.device for room in machine][: min(n, len(gpus))]
    params = asked(moe, *used, split_mode=mode)
    remedies = moe.fit(machine).remedies(params)
    assert fits(moe, params, machine) <= (not remedies)
    for remedy in remedies:
        assert fits(moe, remedy.params, machine), remedy.sentence
        assert remedy.sentence.endswith(".")
    if not fits(moe, params, machine) and cpu == 100:
        assert remedies, "the CPU could take all of it"


def kinds(planner: Planner, params: LoadParams, machine: list[Room]) -> dict[str, LoadParams]:
    return {remedy.kind: remedy.params for remedy in planner.fit(machine).remedies(params)}


def test_uneven_devices_get_an_uneven_split(moe: Planner) -> None:
    found = kinds(moe, asked(moe, "cuda:0", "cuda:1"), rooms(1, 12, 32))
    split = found["split"].split
    assert split is not None
    assert split[0] < 0.4
    assert split == tuple(round(share, 3) for share in split), "numbers that people can read"


def test_as_few_experts_as_needed_go_to_the_cpu(moe: Planner) -> None:
    machine, params = rooms(64, 24), asked(moe, "cuda:0")
    found = kinds(moe, params, machine)
    n = found["experts"].n_cpu_moe
    assert 0 < n < 12
    assert not fits(moe, replace(params, n_cpu_moe=n - 1), machine)
    assert found["blocks"].n_cpu_blocks <= n, "a block is more than its experts"
    assert found["devices"].devices == ("cpu",)


def test_as_few_devices_as_needed_are_added(moe: Planner) -> None:
    found = kinds(moe, asked(moe, "cuda:0"), rooms(1, 24, 8, 24, 24))
    assert found["devices"].devices == ("cuda:0", "cuda:1", "cuda:2")


def test_a_long_context_is_met_by_shorter_keys_or_a_shorter_context(dense: Planner) -> None:
    machine = rooms(1, 0.95)
    params = asked(dense, "cuda:0", n_ctx=65536, kv_type="f32")
    found = kinds(dense, params, machine)
    assert found["kv_type"].kv_type == "q8_0"
    assert 0 < (found["context"].n_ctx or 0) < 65536


def test_a_smaller_cache_leaves_what_is_small_already(dense: Planner) -> None:
    """Values that are smaller than those proposed stay so."""
    machine = rooms(1, 0.95)
    params = asked(dense, "cuda:0", n_ctx=114688, kv_type="f32/q4_0")
    found = kinds(dense, params, machine)
    assert found["kv_type"].kv_type == "q8_0/q4_0"


def test_what_gpus_cannot_hold_goes_to_the_cpu(moe: Planner) -> None:
    params = asked(moe, "cuda:0")
    machine = rooms(100, 10, 10)
    found = moe.fit(machine).with_cpu(params, ("cuda:0", "cuda:1"))
    assert found.devices == ("cuda:0", "cuda:1")
    assert found.n_cpu_moe > 0
    assert fits(moe, found, machine)
    assert moe.fit(rooms(100)).with_cpu(params, ()).devices == ("cpu",)


def test_devices_in_turn_are_filled_the_fastest_first(moe: Planner) -> None:
    """Ranks that compute at the same time get shares by their speed instead."""
    machine, params = rooms(1, 31, 24), asked(moe, "cuda:1", "cuda:0", split_mode="layer")
    filled = moe.fit(machine).balanced(params, in_turn=True)
    by_speed = moe.fit(machine).balanced(params)
    assert filled is not None
    assert by_speed is not None
    assert fits(moe, filled, machine)
    assert filled.split is not None
    assert by_speed.split is not None
    assert filled.split[1] > 0.75 * sum(filled.split)
    assert 0.5 <= by_speed.split[1] / sum(by_speed.split) < 0.6


def test_a_split_that_cannot_be_made_is_said(moe: Planner) -> None:
    with pytest.raises(EngineError, match="2 numbers, but there are 1 devices"):
        moe.fit(rooms(1)).remedies(asked(moe, "cpu", split=(1.0, 2.0)))


def test_answers_come_at_once(tmp_path: Path) -> None:
    """80 blocks of 128 experts: remedies and the CPU's part take well under a second."""
    planner = Planner(hollow_moe(tmp_path / "m.gguf"))
    fit = planner.fit(rooms(400, 40, 24, 24, 24))
    params = asked(planner, "cuda:0", "cuda:1", "cuda:2", "cuda:3")
    planner.plan(params)
    start = time.thread_time()
    assert fit.remedies(params)
    fit.largest_context(params)
    fit.with_cpu(params, params.devices)
    assert time.thread_time() - start < 1


def test_fewer_requests_at_once_take_less(dense: Planner) -> None:
    machine = rooms(1, 0.95)
    params = asked(dense, "cuda:0", n_ctx=16384, kv_type="f32", parallel=16, draft="off")
    found = kinds(dense, params, machine)["parallel"]
    assert 1 < found.parallel < 16
    assert not fits(dense, replace(found, parallel=found.parallel + 1), machine)
