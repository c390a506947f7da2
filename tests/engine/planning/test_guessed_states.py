"""Places of the recurrent states behind guesses: for as many as there is memory for."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine import LoadParams, Planner
from engine.model.forward.state import FEW_GUESSED
from engine.planning.plan import LARGE_FRACTION, Plan
from tests.helpers.least_recurrent import least_recurrent_gguf


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    made = Planner(least_recurrent_gguf(tmp_path_factory.mktemp("models") / "m.gguf", "qwen35"))
    yield made
    made.close()


def planned(
    planner: Planner, *devices: str, free: dict[str, int] | None = None, **options: Any
) -> Plan:
    return planner.plan(LoadParams("m.gguf", devices, n_ctx=256, **options), free)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_each_guess_that_a_pass_may_check_has_a_state(planner: Planner, device: str) -> None:
    wanted = [planned(planner, device, draft_max=n).n_guessed for n in (1, 3, 7, 15)]
    assert wanted == [1, 3, 7, 15]
    assert planned(planner, device, draft="off").n_guessed == 0
    slots = [planned(planner, device, parallel=n).cache_size.n_slots for n in (1, 2, 4)]
    assert slots == [8, 16, 16]
    assert planned(planner, "cpu", "1/cpu", machines=(1, 1)).n_guessed == FEW_GUESSED


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_few_have_one_where_memory_is_scarce(planner: Planner, device: str) -> None:
    """What fits with few states still fits, and larger batches of prompts come first."""
    options: dict[str, Any] = {"n_batch": 64, "checkpoint_bytes": 0}
    few = planned(planner, device, draft_max=FEW_GUESSED, **options)
    many = planned(planner, device, **options)
    needed = many.bytes_by_device()[device]
    n_state = sum(x.memory.kv for x in many.devices) - sum(x.memory.kv for x in few.devices)
    assert n_state == 4 * 4 * (2 * 16 * 16 + 64 * 3)
    enough = int(needed / LARGE_FRACTION) + 1
    for free, n_guessed in ((enough, 7), (enough - 2, FEW_GUESSED), (1, FEW_GUESSED)):
        found = planned(planner, device, free={device: free}, **options)
        assert found.n_guessed == n_guessed
    exact = planned(planner, device, free={device: 1}, **options).bytes_by_device()
    assert not planned(planner, device, free=exact, **options).shortages(exact)
