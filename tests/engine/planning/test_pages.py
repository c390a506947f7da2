"""Planned memory of caches whose layers keep only what they see, at the sizes of real models."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.formats.gguf.reader import GGUFFile
from engine.load_params import LoadParams
from engine.model.architectures.declare import declare
from engine.model.forward.cache import Cache
from engine.model.forward.pages import NO_WINDOW, AttentionWindow
from engine.model.forward.state import windows_of
from engine.planning.plan import Plan, make_plan
from engine.planning.planner import Planner
from tests.helpers.hollow import hollow_gemma3, hollow_llama, hollow_llama4

MIB, GIB = 1 << 20, 1 << 30


def gemma_270m(path: Path) -> Path:
    return hollow_gemma3(
        path, n_layer=18, n_embd=640, n_head=4, n_head_kv=1, head_dim=256, n_ff=2048, n_swa=512,
        n_ctx=32768,
    )  # fmt: skip


def gemma_27b(path: Path) -> Path:
    return hollow_gemma3(
        path, n_layer=62, n_embd=5376, n_head=32, n_head_kv=16, head_dim=128, n_ff=21504,
        n_swa=1024, n_ctx=131072,
    )  # fmt: skip


def kv_bytes(plan: Plan) -> int:
    return sum(device.memory.kv for device in plan.devices)


def planned(path: Path, **options: object) -> Plan:
    return Planner(path).plan(LoadParams(str(path), **{"devices": ("cpu",), **options}))  # type: ignore[arg-type]


def test_a_small_gemma_holds_three_whole_layers_and_few_windows(tmp_path: Path) -> None:
    path = gemma_270m(tmp_path / "m.gguf")
    plan = planned(path, n_ctx=32768)
    page = 256 * 2 * 256 * 2
    assert kv_bytes(plan) == (3 * 128 + 15 * 11) * page <= 150 * MIB
    assert kv_bytes(planned(path, n_ctx=32768, parallel=8)) == (3 * 1024 + 15 * 50) * page
    assert kv_bytes(planned(path, n_ctx=100)) == 18 * page, "pages are whole"
    assert plan.windows == (NO_WINDOW, AttentionWindow(512))
    assert plan.rooms[:3] == ((1, 32768), (2, 16384), (3, 10752))


@pytest.mark.parametrize("devices", [("cpu",), ("cuda:0", "cuda:1"), ("cpu",) * 3])
def test_a_large_gemma_at_128k_takes_a_sixth(tmp_path: Path, devices: tuple[str, ...]) -> None:
    """All layers whole would take 62 GiB."""
    path = gemma_27b(tmp_path / "m.gguf")
    plan = planned(path, n_ctx=131072, devices=devices, n_batch=512)
    token = 16 * 2 * 128 * 2
    assert kv_bytes(plan) == (10 * 512 + 52 * 17) * 256 * token < 11.8 * GIB
    assert 62 * 131072 * token == 62 * GIB


def test_chunks_are_kept_from_their_beginning(tmp_path: Path) -> None:
    """Twelve layers of 48 see all; the others a chunk of 8,192 tokens, and the batch behind it."""
    path = hollow_llama4(tmp_path / "m.gguf")
    plan = planned(path, n_ctx=131072)
    chunk = -(-(8192 + 512 - 2) // 256) + 1
    pages = chunk + 2 * (-(-(8192 + 1 - 2) // 256) + 1)
    assert kv_bytes(plan) == (12 * 512 + 36 * pages) * 256 * 8 * 2 * 128 * 2
    assert plan.windows == (NO_WINDOW, AttentionWindow(8192, is_chunked=True))
    whole = 48 * 32 * 256 * 8 * 2 * 128 * 2
    assert kv_bytes(planned(path, n_ctx=8192)) == whole, "a chunk is the whole context"


def test_room_for_several_requests_is_as_many_pages(tmp_path: Path) -> None:
    path = hollow_llama(tmp_path / "m.gguf", n_layer=2)
    one = kv_bytes(planned(path, n_ctx=4096))
    assert [kv_bytes(planned(path, n_ctx=4096, parallel=n)) for n in (2, 7, 16)] == [
        2 * one, 7 * one, 16 * one
    ]  # fmt: skip
    assert kv_bytes(planned(path, n_ctx=4097)) == one * 17 // 16


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_groups_and_plans_are_the_same_for_all_splits(tmp_path: Path, mode: str) -> None:
    path = gemma_270m(tmp_path / "m.gguf")
    params = LoadParams(str(path), ("cpu",) * 3, (5, 1, 1), mode, n_ctx=4096, parallel=2)
    with GGUFFile.open(path) as file:
        declaration = declare(file, params)
        assert windows_of(declaration.states) == (NO_WINDOW, AttentionWindow(512))
        plan = make_plan(declaration, params, None)
    assert plan == Planner(path).plan(params)
    alone = planned(path, n_ctx=4096, parallel=2)
    assert (plan.windows, plan.rooms) == (alone.windows, alone.rooms)


@pytest.mark.parametrize("write", [gemma_270m, hollow_llama4])
@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_what_is_planned_is_allocated(
    tmp_path: Path, write: Callable[[Path], Path], mode: str
) -> None:
    path = write(tmp_path / "m.gguf")
    params = LoadParams(str(path), ("cpu",) * 3, (5, 1, 2), mode, n_ctx=32768, parallel=2)
    with GGUFFile.open(path) as file:
        declaration = declare(file, params)
        plan = make_plan(declaration, params, None)
    for rank, device in enumerate(plan.devices):
        cache = Cache(declaration.states, rank, plan.cache_size, torch.device("meta"))
        assert cache.n_bytes == device.memory.kv
