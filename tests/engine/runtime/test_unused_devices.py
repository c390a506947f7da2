"""Unused devices are left alone: GPUs, ranks without a share, and reserved memory."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from engine import LoadParams, Model, NoDevice, OutOfDeviceMemory, Planner, load_model
from engine.hardware import torch_devices
from engine.model.layers.module import Module
from tests.helpers.fake_nvml import install, three_gpus
from tests.helpers.tiny_gguf import tiny_gguf

IDS = [5, 9, 3, 17, 3]
CUDA = (
    "init", "_lazy_init", "is_available", "mem_get_info", "memory_allocated", "memory_reserved",
    "max_memory_allocated", "reset_peak_memory_stats", "empty_cache", "cudart", "device",
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_gguf(tmp_path / "m.gguf", n_layer=3, quant="Q8_0", n_ff=128)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every call fail that would initialise a GPU."""

    def touched(*args: object, **options: object) -> None:
        raise AssertionError("a GPU was touched")

    for name in CUDA:
        monkeypatch.setattr(torch.cuda, name, touched)


def answer(model: Model) -> list[int]:
    list(model.generate(IDS))
    logits = model.logits(IDS)
    model.memory()
    return [int(row.argmax()) for row in logits]


@pytest.mark.usefixtures("no_cuda")
def test_a_model_on_the_cpu_touches_no_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(three_gpus(), monkeypatch)
    with load_model(path, ["cpu", "cpu"], kv_on_host=True) as model:
        assert len(answer(model)) == len(IDS)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("mode", ["tensor", "layer", "groups"])
def test_a_gpu_without_a_share_is_not_touched(
    path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    install(three_gpus(), monkeypatch)
    with load_model(path) as model:
        expected = answer(model)
    devices = ["cuda:0", "cpu", "cuda:2"]
    with load_model(path, devices, [0, 1, 0], split_mode=mode, kv_on_host=True) as model:
        assert answer(model) == expected
        assert all(rank.recordings for rank in model.runtime.ranks), "tokens are repeated natively"
        memory = model.memory()
    assert [m.device for m in memory] == devices
    assert [m.measured.total + m.measured.host_kv for m in memory[::2]] == [0, 0]


@pytest.mark.usefixtures("no_cuda")
def test_a_gpu_that_is_named_by_its_uuid_is_not_touched_without_a_share(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(three_gpus(), monkeypatch)
    devices, reserve = ["GPU-aaaa1111", "cpu", "gpu-AAAA3"], {"GPU-bbbb2222": 1 << 20}
    with load_model(path, devices, [0, 1, 0], reserve=reserve) as model:
        answer(model)
        assert model.params.devices == ("cuda:2", "cpu", "cuda:1")
        assert model.params.reserve == (("cuda:0", 1 << 20),)


def test_a_gpu_that_is_not_here_is_refused_even_without_a_share(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(three_gpus(), monkeypatch)
    with pytest.raises(NoDevice, match="cuda:7"):
        load_model(path, ["cpu", "cuda:7"], [1, 0])


def matrices(module: Module) -> Iterator[object]:
    """Yield the tensors of a module and of all modules in it; None where one is not held."""
    for name in ("weight", "bias", "scale", "value"):
        yield getattr(module, name, None)
    for _, child in module.children():
        yield from matrices(child)


@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize(
    ("split", "options"),
    [
        ([3, 0, 1], {}),
        ([3, 0, 1], {"split_mode": "layer"}),
        ([3, 0, 1], {"split_mode": "groups", "groups": [2, 1]}),
        ([1, 0, 0], {"overrides": [("ffn", "#2")], "n_cpu_blocks": 1}),
        ([1, 1, 1], {"overrides": [(".", "#0"), ("attn", "#2")]}),
    ],
    ids=str,
)
def test_a_rank_without_a_slice_holds_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, split: list[int], options: dict[str, object],
    backend: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("TANDEM_BACKEND", backend)
    with load_model(path, ["cpu"] * 3, split, cpu_threads=2, **options) as model:  # type: ignore[arg-type]
        answer(model)
        used, idle, other = model.runtime.ranks
        assert [m is None for m in matrices(idle.model)] == [True] * len(list(matrices(idle.model)))
        assert not all(m is None for m in matrices(used.model))
        assert not all(m is None for m in matrices(other.model))
        assert idle.context.cache.n_bytes == 0
        assert not idle.context.cache.layers
        assert model.plan.devices[1].memory.total == 0
        assert model.memory()[1].measured.total == 0
        assert model.n_threads == 2, "those of the idle rank serve the others"
        memory = (*idle.backend.memory, *idle.context.ops.memory)
        assert sum(m.nbytes for m in memory) == 0


def test_what_is_reserved_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner(path).plan(LoadParams(str(path)))
    needed, gib = plan.total_bytes, 1 << 30
    monkeypatch.setattr(
        "engine.runtime.thread_runtime.free_bytes",
        lambda devices: dict.fromkeys(devices, needed + gib),
    )
    load_model(path, reserve={"cpu": gib}).close()
    with pytest.raises(OutOfDeviceMemory, match=r"to load the model and keep 1\.00 GiB in rese"):
        load_model(path, reserve={"cpu": gib + 1})
    load_model(path, reserve={"cuda:0": 1 << 60}).close()


def test_the_shortage_counts_what_is_reserved(path: Path) -> None:
    params = LoadParams(
        str(path), ("cuda:0", "cuda:1"), (1, 0), reserve=(("cuda:0", 100), ("cuda:1", 1 << 60))
    )
    plan = Planner(path).plan(params)
    needed = plan.bytes_by_device()["cuda:0"]
    assert plan.shortages({"cuda:0": needed + 100, "cuda:1": 0}) == {}
    assert plan.shortages({"cuda:0": needed + 93}) == {"cuda:0": 7}
    pinned = plan.devices[0].memory.pinned
    assert plan.shortages({"cuda:0": 40, "cpu": pinned}) == {"cuda:0": needed + 60}
    assert plan.shortages({"cpu": pinned - 1}) == {"cpu": 1}
    assert plan.shortages({}) == {}


@pytest.mark.usefixtures("reference")
def test_weights_are_packed_where_dense_ones_would_use_the_reserve(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q4_0")
    planner, free = Planner(path), {"cpu": 1 << 40}
    assert planner.plan(LoadParams(str(path)), free).storage == "f32"
    keeping = LoadParams(str(path), reserve=(("cpu", 1 << 40),))
    assert planner.plan(keeping, free).storage == "packed"


def test_keys_and_values_on_the_host_count_for_the_cpu(path: Path) -> None:
    devices = ("cuda:0", "cpu", "cuda:1")
    at_home = Planner(path).plan(LoadParams(str(path), devices))
    away = Planner(path).plan(LoadParams(str(path), devices, kv_on_host=True))
    assert [d.memory.kv for d in away.devices] == [0, at_home.devices[1].memory.kv, 0]
    assert [d.memory.host_kv for d in away.devices[::2]] == [
        d.memory.kv for d in at_home.devices[::2]
    ]
    assert [d.memory.weights for d in away.devices] == [d.memory.weights for d in at_home.devices]
    working = [sum(d.memory.compute for d in plan.devices) for plan in (at_home, away)]
    assert away.total_bytes - working[1] == at_home.total_bytes - working[0]
    assert working[0] <= working[1] < 1.05 * working[0], "room for what is read from the host"
    moved = sum(d.memory.host_kv for d in away.devices)
    assert away.bytes_by_device()["cpu"] - at_home.bytes_by_device()["cpu"] == moved > 0
    assert away.shortages({"cpu": away.bytes_by_device()["cpu"] - 1}) == {"cpu": 1}


def test_nobody_waits_for_a_gpu_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch frees cached memory on all GPUs at once, and would wait for the hung one, too."""
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    monkeypatch.setattr(torch_devices, "_hanging", set())
    cpu, first, second = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))
    torch_devices.release_cached_memory([cpu, first, second])
    assert freed == [1, 1]
    torch_devices.mark_hanging([cpu])
    torch_devices.release_cached_memory([first])
    assert len(freed) == 3
    torch_devices.mark_hanging([second])
    torch_devices.release_cached_memory([cpu, first])
    assert len(freed) == 3
