"""`bench`: the combinations it measures, the fields of each row, and its formats."""

import csv
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from app.cli.bench.tables import product_types
from engine import (
    BenchResult,
    BenchTest,
    DeviceSpeed,
    EngineError,
    Model,
    ProductSpeed,
    read_model_info,
    token_work,
)
from engine.runtime.timeline import GpuTimes, KernelTime
from tests.helpers.command_line import Run, assert_refused

SPEED = DeviceSpeed("cpu", 2, bytes_per_s=4e10, f32_flop_per_s=1e11, bf16_flop_per_s=5e11)
FAST = ("-p", "8", "-n", "3", "-r", "2")


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the machine, which takes a second."""

    def measure(device: str) -> DeviceSpeed:
        if device != "cpu":
            raise EngineError(f"There is no {device}.")
        return SPEED

    monkeypatch.setattr("engine.measure_device", measure)


def names(results: Sequence[dict[str, Any]]) -> list[str]:
    return [str(BenchTest(r["n_prompt"], r["n_gen"], r["n_depth"])) for r in results]


def test_a_line_has_the_fields_of_llama_bench(run: Run, model: Path) -> None:
    outcome = run("bench", model, *FAST, "--pg", "8,3", "-d", "5", "--json", "--threads", 1)
    assert outcome.err.count("\n") == 0
    assert outcome.document["machine"] == [
        {
            "device": "cpu", "n_threads": 2, "bytes_per_s": 4e10, "f32_flop_per_s": 1e11,
            "bf16_flop_per_s": 5e11, "copy_bytes_per_s": None,
            "name": outcome.document["machine"][0]["name"],
        }
    ]  # fmt: skip
    results = outcome.document["results"]
    assert names(results) == ["pp8 @ d5", "tg3 @ d5", "pp8+tg3 @ d5"]
    for line in results:
        assert {
            "model_filename": str(model), "model_size": model.stat().st_size, "devices": ["cpu"],
            "split": [1], "split_mode": "tensor", "type_k": "f16", "type_v": "f16", "n_threads": 1,
            "n_batch": 512,
            "storage": "kernels", "error": None,
        }.items() <= line.items()  # fmt: skip
        assert line["model_type"].startswith("llama ")
        assert line["model_type"].endswith(f"{line['model_n_params'] / 1e6:.2f}M F32")
        assert len(line["samples_ts"]) == 2
        assert line["avg_ts"] == pytest.approx(fmean(line["samples_ts"]))
        assert line["stddev_ts"] == pytest.approx(stdev(line["samples_ts"]))
        assert datetime.fromisoformat(line["test_time"]).utcoffset() is not None
        assert line["load_s"] > 0
        assert line["load_bytes_per_s"] is None or line["load_bytes_per_s"] > 0


def test_what_is_reached_is_a_part_of_what_the_machine_can_do(run: Run, model: Path) -> None:
    arguments = ("-b", "3", "--pg", "8,3", "--devices", "cpu,cpu", "--json")
    prompt, tokens, both = run("bench", model, *FAST, *arguments).document["results"]
    work = token_work(model)
    flop_per_s = (work.n_flop + 1 / 8 * work.n_head_flop) * prompt["avg_ts"]
    assert prompt["flop_per_s"] == pytest.approx(flop_per_s)
    assert prompt["fraction"] == pytest.approx(flop_per_s / 5e11)
    assert tokens["bytes_per_s"] == pytest.approx(work.n_bytes * tokens["avg_ts"])
    assert tokens["fraction"] == pytest.approx(work.n_bytes * tokens["avg_ts"] / 4e10)
    assert prompt["bytes_per_s"] is tokens["flop_per_s"] is both["fraction"] is None
    assert 0 < tokens["overhead_s"] < 3 / min(tokens["samples_ts"])
    assert 0 < tokens["overhead"] <= 1
    assert 0 <= tokens["host_us"] <= 1e6 * tokens["overhead_s"]
    assert prompt["host_us"] is tokens["copy_fraction"] is None
    assert prompt["overhead_s"] is both["overhead_s"] is both["overhead"] is None


def running(n_ranks: int, n_threads: int) -> int:
    """Return the threads of `n_ranks` for `n_threads` requested: equally many, at least one."""
    return n_ranks * max(1, min(n_threads, os.cpu_count() or 1) // n_ranks)


def test_every_setting_is_crossed_with_every_other(run: Run, model: Path) -> None:
    arguments = [
        "--devices", "cpu;cpu,cpu", "--devices", "cpu,cpu,cpu", "--split", "even",
        "--split-mode", "tensor,layer,groups", "--kv-type", "f16,f32", "--threads", "1", "-t", "2",
        "--batch", "4,8",
    ]  # fmt: skip
    document = run("bench", model, "-p", 5, "-n", 1, "-r", 1, *arguments, "--json").document
    results, n_layer = document["results"], read_model_info(model).n_layer
    assert [
        (len(r["devices"]), r["split_mode"], r["type_k"], r["n_threads"], r["n_batch"], name)
        for r, name in zip(results, names(results), strict=True)
    ] == [
        (n_ranks, mode, kv_type, running(n_busy, n_threads), n_batch, name)
        for n_ranks, mode, kv_type, n_threads, n_batch, name in itertools.product(
            (1, 2, 3), ("tensor", "layer", "groups"), ("f16", "f32"), (1, 2), (4, 8), ("pp5", "tg1")
        )
        for n_busy in [min(n_ranks, n_layer) if mode == "layer" else n_ranks]
    ]
    assert all(r["error"] is None for r in results)


@pytest.mark.slow
def test_types_of_keys_and_values_are_crossed(run: Run, model: Path) -> None:
    arguments = ("-p", "4", "-n", "0", "-r", "1", "-ctk", "f16,f32", "-ctv", "bf16,f16", "--json")
    results = run("bench", model, *arguments).document["results"]
    assert [(r["type_k"], r["type_v"]) for r in results] == [
        ("f16", "bf16"), ("f16", "f16"), ("f32", "bf16"), ("f32", "f16")
    ]  # fmt: skip
    assert all(r["error"] is None for r in results)


def test_sizes_and_depths_are_crossed_and_nothing_is_done_twice(run: Run, model: Path) -> None:
    arguments = ("-p", "4,6", "-p", "0,4", "-n", "0", "-pg", "2,1;3,1", "-d", "0,2", "-r", "1")
    results = run("bench", model, *arguments, "--json").document["results"]
    expected = ["pp4", "pp6", "pp2+tg1", "pp3+tg1"]
    assert names(results) == [*expected, *(f"{name} @ d2" for name in expected)]


def test_without_sizes_they_are_those_of_llama_bench(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[BenchTest, int, bool]] = []

    def bench(
        model: Model, test: BenchTest, repetitions: int, *, warm_up: bool, kernels: bool
    ) -> BenchResult:
        assert not kernels
        asked.append((test, repetitions, warm_up))
        return BenchResult(test, (1.0,) * repetitions)

    monkeypatch.setattr(Model, "bench", bench)
    assert run("bench", model).status == 0
    assert run("bench", model, "--no-warmup", "-p", "0").status == 0
    tokens = BenchTest(0, 128)
    assert asked == [(BenchTest(512), 5, True), (tokens, 5, True), (tokens, 5, False)]


def test_what_cannot_be_loaded_is_a_line_and_the_others_go_on(run: Run, model: Path) -> None:
    devices = ("--devices", "cpu", "--devices", "cuda:77", "--devices", "cpu,cpu")
    arguments = (*FAST, *devices, "--split", "3,1;1,0", "--json")
    results = run("bench", model, *arguments).document["results"]
    assert [len(r["devices"]) for r in results] == [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    for line in results[:4]:
        assert line["error"].startswith(
            "The split has 2 numbers, but there are 1 devices. Specify "
        )
    for line in results[:8]:
        assert line["avg_ts"] is line["n_threads"] is line["fraction"] is None
        assert line["samples_ts"] == []
    assert all(r["error"] is None and r["avg_ts"] > 0 for r in results[8:])
    assert [r["split"] for r in results[8::2]] == [[3, 1], [1, 0]]


def test_a_depth_without_room_leaves_the_others_theirs(run: Run, model: Path) -> None:
    huge = 99_999_999_999
    results = run("bench", model, *FAST, "-d", f"0,{huge},2", "--json").document["results"]
    by_name = dict(zip(names(results), results, strict=True))
    assert "needed to load the model" in by_name.pop(f"pp8 @ d{huge}")["error"]
    assert "needed to load the model" in by_name.pop(f"tg3 @ d{huge}")["error"]
    assert list(by_name) == ["pp8", "tg3", "pp8 @ d2", "tg3 @ d2"]
    assert all(line["avg_ts"] > 0 for line in by_name.values())


def test_a_test_that_fails_leaves_the_others_on_the_same_load(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Model.bench

    def bench(model: Model, test: BenchTest, *args: Any, **options: Any) -> BenchResult:
        if test.n_gen:
            raise EngineError("The device is gone.", "Plug it in.")
        return original(model, test, *args, **options)

    monkeypatch.setattr(Model, "bench", bench)
    failed, done = run("bench", model, *FAST, "-d", "0", "--json").document["results"][::-1]
    assert failed["error"] == "The device is gone. Plug it in."
    assert failed["n_threads"] == done["n_threads"] == 1
    assert done["avg_ts"] > 0


def test_when_nothing_can_be_run_the_status_says_so(run: Run, model: Path) -> None:
    outcome = run("bench", model, *FAST, "--split", "3,1")
    assert outcome.status == 1
    assert outcome.out.count("The split has 2 numbers") == 2
    assert outcome.err == "No test could be run. The rows above say why.\n"


def test_an_interrupt_keeps_what_was_measured(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Model.bench

    def bench(model: Model, test: BenchTest, *args: Any, **options: Any) -> BenchResult:
        if test.n_gen:
            raise KeyboardInterrupt
        return original(model, test, *args, **options)

    monkeypatch.setattr(Model, "bench", bench)
    outcome = run("bench", model, *FAST, "--devices", "cpu,cpu")
    assert outcome.status == 130
    assert " pp8 " in outcome.out
    assert " tg3 " not in outcome.out


def test_people_get_a_table(run: Run, model: Path) -> None:
    outcome = run("bench", model, *FAST, "--devices", "cpu;cpu,cpu", "--split", "3,1")
    assert outcome.status == 0
    title, machine, empty, header, *rows = outcome.out.splitlines()
    assert title.startswith("llama ")
    assert title.endswith(", tiny llama")
    assert machine.startswith("cpu (")
    assert machine.endswith(
        "2 threads: reads 40 GB/s, multiplies 100 GFLOP/s in F32, 500 GFLOP/s in BF16"
    )
    assert (empty, len(rows)) == ("", 4)
    assert header.split() == [
        "DEVICES", "SPLIT", "MODE", "KV", "THREADS", "BATCH", "TEST", "T/S", "OVERHEAD", "HOST",
        "REACHED",
    ]  # fmt: skip
    assert rows[0].endswith("The split has 2 numbers, but there are 1 devices.")
    devices, split, mode, kv, threads, batch, test, *rest = rows[3].split()
    assert (devices, split, mode, kv, threads, batch) == (
        "cpu,cpu", "3,1", "tensor", "f16", "2", "512",
    )  # fmt: skip
    assert (test, rest[1], rest[4], rest[6], rest[8]) == ("tg3", "±", "ms", "%)", "µs")
    assert rest[10:] == ["GB/s", rest[11], "%)"]


def test_csv_has_a_row_for_each_line(run: Run, model: Path) -> None:
    arguments = (*FAST, "--devices", "cpu;cpu,cpu", "--split", "3,1")
    outcome = run("bench", model, *arguments, "--csv")
    assert outcome.err.startswith("cpu (")
    rows = list(csv.DictReader(outcome.out.splitlines()))
    fields = run("bench", model, *arguments, "--json").document["results"][0]
    assert list(rows[0]) == [name for name in fields if name != "samples_ts"]
    assert [(r["devices"], r["split"], r["n_prompt"], r["n_gen"]) for r in rows] == [
        ("cpu", "3,1", "8", "0"),
        ("cpu", "3,1", "0", "3"),
        ("cpu,cpu", "3,1", "8", "0"),
        ("cpu,cpu", "3,1", "0", "3"),
    ]
    assert [bool(r["error"]) for r in rows] == [True, True, False, False]
    assert [bool(r["avg_ts"]) for r in rows] == [False, False, True, True]


def test_the_machine_is_measured(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("engine.runtime.measuring.machine_speed.READ_BYTES", 1 << 20)
    monkeypatch.setattr("engine.runtime.measuring.machine_speed.MATMUL_SIZES", {"cpu": (8, 64, 64)})
    monkeypatch.setattr("engine.runtime.measuring.machine_speed.MIN_SECONDS", 0.001)
    (machine,) = run("bench", model, *FAST, "--json").document["machine"]
    assert machine["name"]
    assert machine["bytes_per_s"] > 1e7


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--threads", "0"), "at least 1, not 0"),
        (("--batch", "-1"), "at least 1, not -1"),
        (("--split", "many"), "'many' is not a list of numbers"),
        (("--devices", "cpu;tpu"), "no device 'tpu'"),
        (("--override", "ffn"), "'ffn' is not REGEX=DEVICE"),
        (("--groups", "2,x"), "'2,x' are not a list of integers"),
        (("--split-mode", "groups", "--groups", "0,1"), "at least 1, not 0"),
        (("--n-cpu-moe", "-1"), "at least 0, not -1"),
        (("--reserve", "cpu"), "'cpu' is not DEVICE=MIB"),
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-n", "-1"), "negative number of tokens"),
        (("-d", "-1"), "negative number of tokens"),
        (("--pg", "0,0"), "needs tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_before_anything_is_measured(
    run: Run, model: Path, options: Sequence[str], problem: str
) -> None:
    assert_refused(run("bench", model, *options), problem)


@pytest.mark.parametrize(
    "options",
    [
        ("-p", "many"), ("-p", ""), ("-n", "1;2"), ("--pg", "5"), ("--pg", "5,1,2"), ("-r", "0"),
        ("-r", "-1"), ("--kv-type", "q3"), ("--split-mode", "row"), ("--json", "--csv"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_has_a_status_of_its_own(run: Run, model: Path, options: Sequence[str]) -> None:
    outcome = run("bench", model, *options)
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("usage: tandem bench")


def test_files_that_are_no_models_are_one_line(
    run: Run, folder: Path, vocabulary: Path, foreign: Path
) -> None:
    assert_refused(run("bench", folder / "absent.gguf", "--json"), "There is no file")
    assert_refused(run("bench", vocabulary), "contains no model weights")
    assert_refused(run("bench", foreign, "--csv"), "architecture 'mumble'")


def test_modes_are_crossed_and_shown(run: Run, model: Path) -> None:
    """Groups that do not fit the devices become a row that says so; other modes have one row."""
    arguments = (
        "--devices", "cpu,cpu,cpu", "--split-mode", "tensor,groups", "--groups", "2,1;auto;2,2",
        "--n-cpu-blocks", "0,1", "--reserve", "cpu=1", "-p", "0", "-n", "1", "-r", "1",
    )  # fmt: skip
    results = run("bench", model, *arguments, "--json").document["results"]
    seen = [(r["split_mode"], r["groups"], r["n_cpu_blocks"], bool(r["error"])) for r in results]
    assert seen == [
        ("tensor", [], 0, False), ("tensor", [], 1, False),
        ("groups", [2, 1], 0, False), ("groups", [2, 1], 1, False),
        ("groups", [2, 1], 0, False), ("groups", [2, 1], 1, False),
        ("groups", [2, 2], 0, True), ("groups", [2, 2], 1, True),
    ]  # fmt: skip
    out = run("bench", model, *arguments).out
    assert "groups 2,1; 1 blocks on CPU" in out
    assert "The groups 2,2 contain 4 ranks, but there are 3 devices." in out
    assert "2,1" in run("bench", model, *arguments, "--csv").out


def test_ways_between_gpus_are_crossed_and_shown(run: Run, model: Path) -> None:
    """They make no difference to ranks on the CPU."""
    arguments = "-p", "0", "-n", "1", "-r", "1", "--devices", "cpu", "--p2p"
    results = run("bench", model, *arguments, "auto,off", "--json").document["results"]
    assert [result["p2p"] for result in results] == ["auto", "off"]
    assert "P2P off" in run("bench", model, *arguments, "off").out


def test_a_timeline_says_where_each_rank_spends_a_token(run: Run, model: Path) -> None:
    arguments = (*FAST, "--devices", "cpu,cpu", "--split", "3,1", "--timeline")
    prompt, tokens = run("bench", model, *arguments, "--json").document["results"]
    assert prompt["timeline"] == []
    assert [rank["rank"] for rank in tokens["timeline"]] == [0, 1]
    for rank in tokens["timeline"]:
        assert rank["device"] == "cpu"
        assert rank["token_s"] == pytest.approx(fmean(3 / ts for ts in tokens["samples_ts"]) / 3)
        parts = rank["computed"], rank["waited"], rank["python"]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(1)
        assert rank["computed_s"] == pytest.approx(rank["computed"] * rank["token_s"])
    assert max(rank["waited"] for rank in tokens["timeline"]) > 0
    without = run("bench", model, *FAST, "--json").document["results"]
    assert all("timeline" not in line for line in without)
    rows = run("bench", model, *arguments).out.split("SPLIT  TEST")[1].splitlines()
    assert rows[0].split() == ["RANK", "DEVICE", "TOKEN", "COMPUTES", "WAITS", "PYTHON"]
    assert [row.split()[:4] for row in rows[1:]] == [["3,1", "tg3", n, "cpu"] for n in ("0", "1")]
    assert "timeline" not in run("bench", model, *FAST, "--timeline", "--csv").out


def test_what_gpus_run_is_listed(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [KernelTime("cuda:0", f"kernel{n}", 2, 1e-4 / (n + 1)) for n in range(20)]
    times = GpuTimes(tuple(kernels), {"cuda:0": 4e-4})

    def bench(model: Model, test: BenchTest, *_: object, **asked: object) -> BenchResult:
        assert asked["kernels"]
        is_tokens = test.n_gen > 0
        return BenchResult(
            test, (test.n_gen * 1e-3 or 1.0,), host_s=25e-6 if is_tokens else None,
            gpu=times if is_tokens else None,
        )  # fmt: skip

    monkeypatch.setattr(Model, "bench", bench)
    gpu = DeviceSpeed("cpu", 0, 4e10, 1e11, 5e11, copy_bytes_per_s=8e10)
    monkeypatch.setattr("engine.measure_device", lambda device: gpu)
    prompt, tokens = run("bench", model, *FAST, "--kernels", "--json").document["results"]
    assert prompt["gpu"] is None
    assert tokens["host_us"] == pytest.approx(25)
    assert tokens["copy_fraction"] == pytest.approx(tokens["fraction"] / 2)
    assert tokens["gpu"]["busy_s"] == {"cuda:0": 4e-4}
    assert tokens["gpu"]["kernels"][0] == {
        "device": "cuda:0", "name": "kernel0", "count": 2, "seconds": 1e-4,
    }  # fmt: skip
    shown = run("bench", model, *FAST, "--kernels").out
    assert "copies 80 GB/s" in shown
    assert "% of copying)" in shown
    assert "25 µs" in shown
    assert "tg3, 1000.0 µs per token" in shown
    assert [f"kernel{n}" in shown for n in (0, 15, 16)] == [True, True, False]
    assert "4 others" in shown
    assert "40.0 %" in shown, "what the GPU was busy"


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Replace the measurement of products, which takes seconds; return what was asked for."""
    asked: list[tuple[object, ...]] = []

    def measure(
        kinds: Sequence[str], n_threads: int, *, fast_prompts: bool
    ) -> Iterator[ProductSpeed]:
        asked.append((tuple(kinds), n_threads, fast_prompts))
        for kind in kinds or ["Q4_K"]:
            yield ProductSpeed(kind, 4.625, n_threads, "avx2", 2e10, 3e10, 1e11, 2.5e11, "INT8")

    monkeypatch.setattr("engine.measure_products", measure)
    return asked


def test_products_on_the_cpu_have_a_table(
    run: Run, model: Path, products: list[tuple[object, ...]]
) -> None:
    shown = run("bench", model, *FAST, "--kernels", "--threads", 1).out
    title, headings, *lines = shown[shown.index("Matrix products") :].splitlines()
    assert title == "Matrix products on the CPU; threads: 1, instruction set: avx2"
    assert headings.split() == [
        "TYPE", "BITS", "1", "TOKEN", "A", "SUM", "8", "TOKENS", "512", "TOKENS", "512", "IN",
    ]  # fmt: skip
    fields = ["4.62", "20.0", "GB/s", "30.0", "GB/s", "100.0", "GOP/s", "250.0", "GOP/s", "INT8"]
    assert [line.split() for line in lines] == [["F32", *fields]]
    assert products == [(("F32",), 1, False)]


def test_types_of_matrices_are_measured_and_those_of_vectors_are_not(model: Path) -> None:
    types = (("F32", 9), ("Q4_K", 5), ("Q6_K", 2), ("I32", 1))
    info = replace(read_model_info(model), tensor_types=types)
    assert product_types(None, info) == ["Q4_K", "Q6_K"]


def test_types_of_products_can_be_chosen(
    run: Run, model: Path, products: list[tuple[object, ...]]
) -> None:
    how = ("--kernels", "--fast-prompts", "--threads", 1, "--json")
    document = run("bench", model, *FAST, *how, "--kernel-types", "q6_k,F32").document
    assert document["results"][1]["gpu"] is None
    assert document["cpu_products"][0] == {
        "kind": "Q6_K", "bits": 4.625, "n_threads": 1, "instruction_set": "avx2",
        "bytes_per_s": 2e10, "read_bytes_per_s": 3e10, "few_op_per_s": 1e11,
        "many_op_per_s": 2.5e11, "arithmetic": "INT8",
    }  # fmt: skip
    run("bench", model, *FAST, *how, "--kernel-types", "all")
    assert products == [(("Q6_K", "F32"), 1, True), ((), 1, True)]
    wrong = run("bench", model, *FAST, "--kernels", "--kernel-types", "Q4_K,Q9_X")
    assert_refused(wrong, "There are no CPU kernels for 'Q9_X'.")
    assert "cpu_products" not in run("bench", model, *FAST, "--json").document
