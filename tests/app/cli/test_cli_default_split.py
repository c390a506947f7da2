"""The split that commands choose if no option does."""

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.cli.server.serve import PARALLEL, add_serve
from app.cli.split.default_split import with_comfortable_context
from engine import Forecaster, LoadParams, Planner, parse_rig
from tests.helpers.command_line import Run
from tests.helpers.tiny_gguf import tiny_gguf

SPLIT_OPTIONS = (
    ("--devices", "cpu"), ("--split-mode", "layer"), ("--n-cpu-blocks", "1"), ("--kv-on-host",),
    ("--override", "ffn=cpu"),
)  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pretend that this machine has these GPUs."""

    def become(rig: str) -> None:
        monkeypatch.setattr(Forecaster, "of_machine", lambda: Forecaster.of_rig(parse_rig(rig)))
        monkeypatch.setattr("engine.list_devices", lambda: parse_rig(rig).devices)

    return become


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[LoadParams]:
    """Record the requested load, and load on the CPU instead."""
    asked: list[LoadParams] = []
    from engine import Model

    def load(params: LoadParams, on_progress: object = None) -> Model:
        asked.append(params)
        return Model(replace(params, devices=("cpu",), split=None), on_progress=on_progress)

    monkeypatch.setattr("engine.Model", load)
    return asked


def test_a_plan_that_nobody_asked_for_is_the_best_one(
    run: Run, model: Path, machine: Callable[[str], None]
) -> None:
    machine("3060,2x5090@shm")
    document = run("plan", model, "--json").document
    choice = document["choice"]
    assert [device["device"] for device in document["devices"]] == ["cuda:1"]
    assert choice["devices"] == ["cuda:1"]
    assert choice["reason"].startswith("GPU 1 alone: ")
    assert (choice["split_mode"], choice["split"], choice["n_cpu_blocks"]) == ("tensor", None, 0)
    fastest = choice["alternatives"][0]
    assert fastest["devices"] == ["cuda:1"]
    assert fastest["decode_ts"] == document["speed"]["decode"]["tokens_per_s"]
    assert any(len(one["devices"]) > 1 for one in choice["alternatives"])
    assert f"Default split: {choice['reason']}" in run("plan", model).out


def test_a_rig_is_planned_whole_and_told_what_would_be_better(run: Run, model: Path) -> None:
    document = run("plan", model, "--simulate", "2x4090@shm", "--json").document
    assert [device["device"] for device in document["devices"]] == ["cuda:0", "cuda:1"]
    assert document["choice"]["devices"] == ["cuda:0"]


@pytest.mark.parametrize("options", SPLIT_OPTIONS)
def test_what_somebody_chose_is_left_alone(
    run: Run, model: Path, machine: Callable[[str], None], options: tuple[str, ...]
) -> None:
    machine("2x4090")
    document = run("plan", model, *options, "--json").document
    assert document["choice"] is None
    assert [device["device"] for device in document["devices"]] == ["cpu"]
    assert "If nobody" not in run("plan", model, *options).out


def test_commands_that_compute_begin_with_the_same(
    run: Run, model: Path, machine: Callable[[str], None], loaded: list[LoadParams]
) -> None:
    machine("3060,2x5090@shm")
    answer = run("generate", model, "-p", "Hi", "-n", "1", "--ctx", "64", "--raw")
    assert answer.status == 0
    assert "GPU 1 alone: " in answer.err
    assert "GPU 1" not in answer.out
    bench = run("bench", model, "-p", "4", "-n", "1", "-r", "1", "--json")
    assert bench.status == 0
    assert [params.devices for params in loaded] == [("cuda:1",), ("cuda:1",)]
    assert loaded[0].n_ctx == 64
    run("generate", model, "-p", "Hi", "-n", "1", "--raw", "--devices", "cpu,cpu")
    assert loaded[-1].devices == ("cpu", "cpu")


def test_a_machine_without_a_gpu_has_nothing_to_choose_from(
    run: Run, model: Path, machine: Callable[[str], None]
) -> None:
    machine("7950x")
    answer = run("generate", model, "-p", "Hi", "-n", "1", "--raw")
    assert answer.status == 0
    assert "CPU" not in answer.err
    assert run("plan", model, "--json").document["choice"]["devices"] == ["cpu"]


def test_a_server_takes_the_context_that_memory_comfortably_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most agents' first message has more than 2048 tokens; requests share the cache."""
    path = str(tiny_gguf(tmp_path / "m.gguf", n_ctx=32768))
    params = LoadParams(path, parallel=PARALLEL)
    parser = argparse.ArgumentParser()
    add_serve(parser)
    with closing(Planner(path)) as planner:
        sizes = {
            n: planner.plan(replace(params, n_ctx=n * 1024, parallel=1)).bytes_by_device()["cpu"]
            for n in (2, 16, 32, 64)
        }

    def chosen(n_bytes: float, *options: str) -> tuple[int | None, int]:
        machine = SimpleNamespace(free_bytes={"cpu": int(n_bytes / 0.75)})
        monkeypatch.setattr(Forecaster, "of_machine", lambda: machine)
        found = with_comfortable_context(parser.parse_args([path, *options]), params)
        return found.n_ctx, found.parallel

    assert chosen(1e12) == (32768, PARALLEL)
    assert chosen(sizes[64] + 1000) == (32768, 2), "a long context is better than many"
    assert chosen(sizes[32] + 1000) == (32768, 1)
    assert chosen(sizes[16] + 1000) == (16384, 1)
    assert chosen(sizes[2]) == (None, PARALLEL), "as without the choice"
    assert chosen(1e12, "--ctx", "100") == (None, PARALLEL), "it comes with the options"
    assert chosen(sizes[64] + 1000, "--parallel", "4")[1] == PARALLEL
    assert chosen(sizes[64] + 1000, "--parallel", "4")[0] in range(14000, 20000), "room for four"
