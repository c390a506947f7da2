"""Predicted bytes, from the header alone."""

import time
from pathlib import Path

import pytest

from engine import LoadParams, OutOfDeviceMemory, Planner, load_model
from engine.formats.gguf.reader import GGUFFile
from engine.hardware.cuda_api import CUDA_OVERHEAD_BYTES
from tests.helpers.tiny_gguf import tiny_gguf


def test_a_split_reads_every_sharded_byte_once(tmp_path: Path) -> None:
    """Ranks read their own slices; only norms are read by all."""
    path = tiny_gguf(tmp_path / "m.gguf", n_head_kv=4, head_dim=32, quant="Q8_0")
    with GGUFFile.open(path) as file:
        whole = sum(t.n_bytes for t in file.tensors.values())
        norms = sum(t.n_bytes for t in file.tensors.values() if len(t.shape) == 1)
    planner = Planner(path)
    assert planner.plan(LoadParams(str(path))).file_bytes == whole
    split = planner.plan(LoadParams(str(path), ("cpu",) * 4))
    assert split.file_bytes == whole + 3 * norms


def test_a_tied_head_is_held_once(tmp_path: Path) -> None:
    sizes = {}
    for tied in (False, True):
        path = tiny_gguf(tmp_path / f"{tied}.gguf", tied=tied)
        plan = Planner(path).plan(LoadParams(str(path), ("cpu",) * 2))
        sizes[tied] = sum(d.memory.weights for d in plan.devices)
        n_vocab = Planner(path).info.n_vocab
    assert sizes[False] - sizes[True] == n_vocab * 64 * 4


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "f16/f32"])
def test_the_cache_grows_with_the_context_and_its_type(tmp_path: Path, kv_type: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=3, n_head_kv=2, head_dim=16)
    plan = Planner(path).plan(LoadParams(str(path), n_ctx=100, kv_type=kv_type))
    width = {"f32": 4, "f16": 2, "bf16": 2, "f16/f32": 3}[kv_type]
    assert plan.devices[0].memory.kv == 3 * 256 * 2 * (16 + 16) * width, "pages are whole"


def test_shared_key_value_heads_are_counted_on_each_rank(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", n_head=4, n_head_kv=1, n_embd=64)
    alone = Planner(path).plan(LoadParams(str(path)))
    split = Planner(path).plan(LoadParams(str(path), ("cpu",) * 4))
    assert [d.memory.kv for d in split.devices] == [alone.devices[0].memory.kv] * 4


def test_a_rank_without_a_share_holds_nothing(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", qkv_bias=True, arch="qwen2")
    for mode in ("tensor", "layer"):
        params = LoadParams(str(path), ("cpu",) * 3, (5, 0, 1), split_mode=mode)
        idle = Planner(path).plan(params).devices[1]
        assert idle.memory.total == 0
        assert idle.asked == idle.effective == 0
    with load_model(path, ["cpu"] * 3, [5, 0, 1]) as model:
        assert model.memory()[1].measured.total == 0


def test_effective_shares_follow_what_is_asked(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=12, n_head=8, n_head_kv=8, n_ff=512)
    plan = Planner(path).plan(LoadParams(str(path), ("cpu",) * 3, (5, 2, 1)))
    for device in plan.devices:
        assert device.effective == pytest.approx(device.asked, abs=0.01)


@pytest.mark.usefixtures("reference")
def test_weights_stay_packed_where_they_would_not_fit_otherwise(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q4_0")
    params = LoadParams(str(path))
    planner = Planner(path)
    dense = planner.plan(params, {"cpu": 1 << 40})
    packed = planner.plan(params, {"cpu": dense.devices[0].memory.total})
    assert (dense.storage, packed.storage) == ("f32", "packed")
    assert packed.devices[0].memory.weights < dense.devices[0].memory.weights / 4


def test_what_does_not_fit_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr("engine.runtime.thread_runtime.free_bytes", lambda devices: {"cpu": 1000})
    monkeypatch.setattr("engine.runtime.loader.load_rank", lambda *args: pytest.fail("read"))
    with pytest.raises(OutOfDeviceMemory, match="cpu has 0\\.0 MiB free but"):
        load_model(path, ["cpu", "cpu"])


def test_virtual_ranks_share_the_memory_of_their_device(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    plan = Planner(path).plan(LoadParams(str(path), ("cpu",) * 3))
    assert plan.bytes_by_device() == {"cpu": plan.total_bytes}


def test_a_plan_of_a_large_model_follows_a_drag(tmp_path: Path) -> None:
    """80 layers over 8 ranks; the bound is loose because machines are noisy."""
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=80, n_embd=32, n_head_kv=8, n_head=8, n_ff=64)
    planner = Planner(path)
    params = LoadParams(str(path), ("cpu",) * 8, tuple(range(1, 9)))
    planner.plan(params)
    best = min(_seconds(lambda: planner.plan(params)) for _ in range(5))
    assert best < 0.1


def test_what_cuda_takes_counts_once_for_each_gpu_in_use(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    devices = ("cuda:0", "cuda:0", "cuda:1", "cpu")
    plan = Planner(path).plan(LoadParams(str(path), devices, (1, 1, 0, 1)))
    assert plan.overhead() == {"cuda:0": CUDA_OVERHEAD_BYTES}
    held = sum(d.memory.total for d in plan.devices[:2])
    assert plan.bytes_by_device()["cuda:0"] == held + CUDA_OVERHEAD_BYTES
    assert plan.bytes_by_device()["cuda:1"] == 0
    free = {"cuda:0": held + CUDA_OVERHEAD_BYTES - 1}
    assert plan.shortages(free) == {"cuda:0": 1}


def _seconds(fn: object) -> float:
    assert callable(fn)
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start
