"""The number of prompt tokens that are computed at once where nobody chose one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import LoadParams, Planner
from engine.planning.plan import LARGE_FRACTION, Plan
from tests.helpers.hollow import hollow_llama, hollow_moe

PLENTY = {"cpu": 1 << 40, "cuda:0": 1 << 40, "cuda:1": 1 << 40}


@pytest.fixture(scope="module", params=[hollow_llama, hollow_moe], ids=["llama", "moe"])
def planner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Planner]:
    path: Path = request.param(tmp_path_factory.mktemp("hollow") / "m.gguf", n_layer=2)
    made = Planner(path)
    yield made
    made.close()


def planned(
    planner: Planner, *devices: str, free: dict[str, int] | None = PLENTY, **options: Any
) -> Plan:
    params = LoadParams(planner.info.path, devices, **({"n_ctx": 8192} | options))
    return planner.plan(params, free)


def bytes_on_gpu(plan: Plan) -> int:
    return plan.bytes_by_device()["cuda:0"]


@pytest.mark.parametrize(
    ("devices", "options", "expected"),
    [
        (("cuda:0",), {}, 2048),
        (("cuda:0", "cuda:1"), {}, 2048),
        (("cuda:0",), {"n_ctx": 2048}, 2048),
        (("cuda:0",), {"n_ctx": 2047}, 1024),
        (("cuda:0",), {"n_ctx": 1000}, 512),
        (("cpu",), {}, 512),
        (("cuda:0", "cpu"), {}, 512),
        (("cuda:0", "cpu"), {"split": (1, 0)}, 2048),  # nothing is computed on the CPU
        (("cuda:0",), {"n_cpu_blocks": 1}, 512),
        (("cuda:0",), {"n_batch": 512}, 512),
        (("cuda:0",), {"n_batch": 3000}, 3000),
    ],
)
def test_gpus_that_compute_all_take_many_tokens_at_once(
    planner: Planner, devices: tuple[str, ...], options: dict[str, Any], expected: int
) -> None:
    assert planned(planner, *devices, **options).n_batch == expected
    assert planned(planner, *devices, free=None, **options).n_batch == expected


def test_batches_are_smaller_where_memory_is_scarce(planner: Planner) -> None:
    needed = {n: bytes_on_gpu(planned(planner, "cuda:0", n_batch=n)) for n in (512, 1024, 2048)}
    assert needed[512] < needed[1024] < needed[2048]
    for n, smaller in ((2048, 1024), (1024, 512)):
        enough = int(needed[n] / LARGE_FRACTION) + 1
        found = planned(planner, "cuda:0", free={"cuda:0": enough})
        assert (found.n_batch, bytes_on_gpu(found)) == (n, needed[n])
        scarce = {"cuda:0": enough - 2}
        assert planned(planner, "cuda:0", free=scarce).n_batch == smaller
        kept = planned(planner, "cuda:0", free={"cuda:0": enough}, reserve=(("cuda:0", 2),))
        assert kept.n_batch == smaller


def test_what_fits_with_small_batches_still_fits(planner: Planner) -> None:
    small = planned(planner, "cuda:0", n_batch=512)
    free = {"cuda:0": bytes_on_gpu(small)}
    found = planned(planner, "cuda:0", free=free)
    assert found == small
    assert not found.shortages(free)
    assert planned(planner, "cuda:0", free={"cuda:0": 1}) == replace(small, n_batch=512)
