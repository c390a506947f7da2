"""Figures per rank: memory is counted per physical device, and the texts add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.core.units import (
    context_text,
    rate_text,
    signed_percent_text,
    size_text,
    spoken_size,
    use_text,
)
from app.devices.split.figures import (
    FigureInputs,
    RowFigures,
    blocks_text,
    kinds_of,
    outside_bytes,
    plan_by_rank,
    row_figures,
    sensors_text,
    share_text,
    short_name,
    shortages,
)
from app.devices.split.session import SplitSession
from app.devices.split.settings import Mode, SplitSettings, default_settings
from engine import (
    DeviceInfo,
    DeviceMemory,
    DevicePlan,
    DeviceSnapshot,
    LoadParams,
    MemoryUse,
    ModelInfo,
    ModelLoaded,
    Plan,
    Planner,
    read_model_info,
)
from tests.helpers.tiny_gguf import tiny_gguf

GIB = 1 << 30
CPU = DeviceInfo("cpu", "cpu", "AMD EPYC 9V74 80-Core Processor", 32 * GIB, 24 * GIB, n_cores=8)
GPU = DeviceInfo("cuda:0", "cuda", "NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, uuid="a")
INFO = ModelInfo("m.gguf", "M", "llama", True, 8, 64, 4, 2, 99, 4096, 1, GIB, "F16", True, ())


def plan_for(split: SplitSettings, total: int = 10 * GIB) -> Plan:
    """Return a plan in proportion to the asked shares: 8 parts weights, 2 parts KV cache."""
    params = split.load_params("m.gguf")
    shares = params.split or (1.0,)
    devices = tuple(
        DevicePlan(i, d, s, s, MemoryUse(int(total * s * 0.8), int(total * s * 0.2)))
        for i, (d, s) in enumerate(zip(params.devices, shares, strict=True))
    )
    return Plan(devices, params.split_mode, 2048, "f16", total)


def rows_of(
    split: SplitSettings, total: int = 10 * GIB, outside: int = 4 * GIB
) -> list[RowFigures]:
    return row_figures(
        split,
        FigureInputs(
            devices={"cpu": CPU, "cuda:0": GPU},
            outside={"cpu": outside, "cuda:0": outside},
            by_rank=plan_by_rank(split, plan_for(split, total)),
        ),
    )


def test_ranks_on_one_device_share_its_memory() -> None:
    """Three CPU ranks: each row sees the two others, and all see the same free memory."""
    split = default_settings([CPU]).with_cpu_ranks(3)
    rows = rows_of(split)
    assert [row.label for row in rows] == ["CPU 0", "CPU 1", "CPU 2"]
    assert {row.free for row in rows} == {rows[0].free}
    for row in rows:
        parts = row.memory.total + sum(size for _, size in row.siblings) + row.outside + row.free
        assert parts == 32 * GIB
        assert [index for index, _ in row.siblings] == [i for i in range(3) if i != row.index]


def test_a_split_that_does_not_fit_is_one_sentence_per_device() -> None:
    """It names the device, the need, what is available and the difference."""
    split = default_settings([CPU]).with_cpu_ranks(2)
    (sentence,) = shortages(rows_of(split, total=30 * GIB))
    assert sentence.startswith("CPU: ")
    assert "30.0 GiB" in sentence
    assert "28.0 GiB available" in sentence
    assert "2.0 GiB short" in sentence
    assert shortages(rows_of(split)) == []


def test_a_device_that_is_full_without_the_model_is_no_shortage() -> None:
    """A rank that takes nothing cannot be short."""
    split = default_settings([GPU, CPU])
    rows = rows_of(split, outside=40 * GIB)
    assert [row.is_on for row in rows] == [True, False]
    assert len(shortages(rows)) == 1


def test_one_device_mode_shows_each_device_once() -> None:
    """Virtual ranks make no sense in this mode; only the chosen one is shown."""
    split = replace(default_settings([GPU, CPU]).with_cpu_ranks(3), mode="single", single=2)
    assert [row.index for row in rows_of(split)] == [0, 2]


def test_colours_are_those_of_the_monitor() -> None:
    """Colours go by the place among all devices, usable or not; virtual CPU ranks come next."""
    broken = replace(GPU, usable=False, reason="Too old.")
    second = replace(GPU, id="cuda:1", uuid="b")
    split = default_settings([broken, second, CPU]).with_cpu_ranks(2)
    rows = row_figures(split, FigureInputs({d.id: d for d in (broken, second, CPU)}))
    assert [(row.label, row.colour) for row in rows] == [("GPU 1", 1), ("CPU 0", 2), ("CPU 1", 3)]


def test_memory_of_the_loaded_model_counts_as_free_for_the_next() -> None:
    """Reloading frees it first, so it is not "other programs"."""
    params = LoadParams("m.gguf", ("cpu", "cpu"))
    memory = DeviceMemory("cpu", MemoryUse(2 * GIB), MemoryUse(2 * GIB))
    loaded = ModelLoaded(INFO, params, 2048, (memory, memory), 1.0)
    now = [DeviceSnapshot("cpu", 0.0, 9 * GIB, 32 * GIB, 23 * GIB)]
    assert outside_bytes(now, None) == {"cpu": 9 * GIB}
    assert outside_bytes(now, loaded) == {"cpu": 5 * GIB}
    gpu = DeviceMemory("cuda:0", MemoryUse(2 * GIB), MemoryUse(2 * GIB))
    on_gpu = ModelLoaded(INFO, params, 2048, (gpu,), 1.0)
    busy = [DeviceSnapshot("cuda:0", 0.0, 9 * GIB, 24 * GIB, 15 * GIB)]
    assert outside_bytes(busy, on_gpu, {"cuda:0": GIB}) == {"cuda:0": 6 * GIB}
    assert outside_bytes(busy, None, {"cuda:0": GIB}) == {"cuda:0": 9 * GIB}
    stale = [DeviceSnapshot("cpu", 0.0, 3 * GIB, 32 * GIB, 29 * GIB)]
    assert outside_bytes(stale, loaded) == {"cpu": 0}


def test_a_device_that_cannot_be_read_keeps_its_last_figures() -> None:
    """A snapshot with a problem has no total and says nothing about memory."""
    lost = DeviceSnapshot("cuda:0", 0.0, 0, 0, 0, problem="The GPU fell off the bus.")
    assert outside_bytes([lost], None) == {}


def test_figures_are_spoken_as_a_sentence() -> None:
    """A screen reader gets name, share and memory of a row."""
    row = rows_of(default_settings([GPU]))[0]
    assert row.spoken == "GPU 0, 100 percent, 10.0 gibibytes of 24.0 gibibytes"
    assert share_text(row) == "target 100.0 · actual 100.0 %"
    assert share_text(replace(row, effective=None)) == "target 100.0 %"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H200", "H200"),
        ("AMD EPYC 9V74 80-Core Processor", "EPYC 9V74 80-Core"),
        ("Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", "Core i7-8650U CPU @ 1.90GHz"),
    ],
)
def test_device_names_lose_what_says_nothing(name: str, short: str) -> None:
    """Brand and decoration are left out, the model stays."""
    assert short_name(name) == short


def test_sensors_show_what_the_device_tells() -> None:
    """Values without a reading are left out."""
    snapshot = DeviceSnapshot("cuda:0", 0.0, 1, 2, 1, temperature_c=62, power_w=309.6)
    assert sensors_text(snapshot) == "62 °C · 310 W"
    assert sensors_text(replace(snapshot, power_w=None)) == "62 °C"
    assert sensors_text(snapshot, "PCIe 4 ×16") == "PCIe 4 ×16 · 62 °C · 310 W"
    assert sensors_text(None) == ""
    assert sensors_text(None, "PCIe 4 ×16") == "PCIe 4 ×16"


def test_texts_keep_three_digits_and_their_unit() -> None:
    """Small models are not "0.0 GiB"."""
    assert size_text(13.3 * GIB) == "13.3 GiB"
    assert size_text(14 * 1024**2) == "14 MiB"
    assert size_text(1.25 * 1024**2) == "1.2 MiB"
    assert size_text(0) == "0 MiB"
    assert [size_text(n) for n in (32 << 10, 1 << 10, 512)] == ["32 KiB", "1 KiB", "512 B"]
    assert spoken_size(32 << 10) == "32 kibibytes"
    assert use_text(13.3 * GIB, 24 * GIB, 9.6 * GIB) == "13.3 of 24.0 GiB · 9.6 free"
    assert use_text(13.3 * GIB, 12 * GIB, -1.8 * GIB) == "13.3 GiB of 12.0 GiB · 1.8 GiB short"
    assert use_text(12 * GIB, 12 * GIB, -2000).endswith(" · 2 KiB short"), 'not "0.0 MiB short"'
    assert use_text(14 << 20, 24 * GIB, 0) == "14 MiB of 24.0 GiB · 0 MiB free"
    assert signed_percent_text(0.0124) == "+1.2 %"
    assert signed_percent_text(-0.004) == "−0.4 %"
    assert signed_percent_text(0.0001) == "0.0 %"
    assert [rate_text(n) for n in (6.254, 61.84, 1240.4)] == ["6.25", "61.8", "1240"]
    assert [context_text(n) for n in (512, 4096, 131072, 5000)] == ["512", "4k", "128k", "5000"]


def test_what_was_moved_to_a_device_that_is_off_shows_in_its_row() -> None:
    """It has a part but no asked share; the KV cache of GPUs in host memory counts, too."""
    split = default_settings([GPU, CPU])
    on_gpu = DevicePlan(0, "cuda:0", 1.0, 0.75, MemoryUse(9 * GIB, 0, 0, host_kv=GIB))
    taker = DevicePlan(1, "cpu", 0.0, 0.25, MemoryUse(3 * GIB))
    plan = Plan((on_gpu, taker), "tensor", 2048, "f16", 12 * GIB)
    gpu, cpu = row_figures(
        split,
        FigureInputs(
            devices={"cpu": CPU, "cuda:0": GPU},
            outside={"cpu": 4 * GIB, "cuda:0": 0},
            by_rank=plan_by_rank(split, plan),
            overhead=plan.overhead(),
        ),
    )
    assert (gpu.is_on, gpu.is_taker, gpu.guests) == (True, False, 0)
    assert (cpu.is_on, cpu.is_taker, cpu.guests) == (False, True, GIB)
    assert cpu.free == (32 - 4 - 3 - 1) * GIB
    assert share_text(cpu) == "actual 25.0 %"
    assert gpu.overhead == plan.overhead()["cuda:0"]
    assert gpu.free == 24 * GIB - 9 * GIB - gpu.overhead
    assert kinds_of(cpu) == [("weights", 3 * GIB), ("GPU KV cache", GIB)]
    assert shortages([replace(cpu, free=-GIB)]) == [
        "CPU: 4.0 GiB needed, 3.0 GiB available, 1.0 GiB short."
    ]


def test_a_reserve_leaves_less_and_is_named() -> None:
    """Free memory excludes the reserve."""
    split = default_settings([CPU]).with_reserve("cpu", 20 * GIB)
    (row,) = rows_of(split)
    assert row.free == (32 - 4 - 10 - 20) * GIB
    assert shortages([row]) == [
        "CPU: 10.0 GiB needed, 8.0 GiB available after keeping 20.0 GiB free, 2.0 GiB short."
    ]
    (row,) = rows_of(split.with_reserve("cpu", 30 * GIB))
    assert shortages([row]) == ["CPU: 10.0 GiB needed, none available after keeping 30.0 GiB free."]


@pytest.mark.parametrize(
    ("blocks", "text"),
    [((3,), "block 3"), ((0, 1), "blocks 0-1"), ((0, 1, 2, 7, 9, 10), "blocks 0-2, 7, 9-10")],
)
def test_blocks_are_named_by_their_runs(blocks: tuple[int, ...], text: str) -> None:
    assert blocks_text(blocks) == text


@pytest.mark.parametrize("mode", ["layer", "groups"])
def test_layers_are_told_as_blocks_and_bytes(tmp_path: Path, mode: Mode) -> None:
    """A share of blocks and one of bytes are not the same: the head lies on the last rank."""
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=5, n_head_kv=2)
    info = read_model_info(path)
    split = SplitSession(Planner)
    split.set_devices([CPU])
    split.set_model(info)
    split.change(split.settings.with_cpu_ranks(2).with_mode(mode).with_weights([0.4, 0.6]))
    split.change(split.settings.with_joined(1, False))
    rows = split.picture().rows
    assert [row.blocks for row in rows] == [(0, 1), (2, 3, 4)]
    weights = [row.memory.weights for row in rows]
    parts = [f"{100 * part / sum(weights):.1f}" for part in weights]
    assert [share_text(row) for row in rows] == [
        f"blocks 0-1 · {parts[0]} % of bytes", f"blocks 2-4 · {parts[1]} % of bytes",
    ]  # fmt: skip
    split.change(split.settings.with_mode("tensor"))
    assert share_text(split.picture().rows[0]).startswith("target 40.0 · actual ")
