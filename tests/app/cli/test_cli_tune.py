"""`tune`: its output before, during and after a search."""

from pathlib import Path

import pytest

from app.cli import tune as module
from engine import KernelTuning
from tests.helpers.command_line import Run, assert_refused
from tests.helpers.fake_nvml import install, no_gpus


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))


def test_the_best_split_is_found_explained_and_saved(run: Run, model: Path) -> None:
    arguments = ("--devices", "cpu,cpu", "--ctx", 64, "--threads", 2, "--split-mode", "tensor")
    outcome = run("tune", model, *arguments, "--json", "--save", "best")
    found = outcome.document
    assert outcome.err.startswith("About ")
    assert outcome.err.count("\n") == 1
    tried = {(tuple(r["devices"]), r["split_mode"]) for r in found["results"]}
    assert tried == {(("cpu",), "tensor"), (("cpu", "cpu"), "tensor")}
    winner = found["winner"]
    assert winner in found["results"]
    assert winner["seconds"] <= 1.5 * min(r["seconds"] for r in found["results"])
    assert winner["decode_ts"] > 0
    assert found["goal"] == {"name": "chat", "n_prompt": 256, "n_gen": 256}
    assert found["command"].startswith("tandem chat ")
    assert found["reason"]
    assert run("tune", model, *arguments, "--json", "--last").document == found
    assert_refused(run("tune", model, "--devices", "cpu", "--last"), "There is no earlier search")
    assert_refused(run("tune", model, *arguments, "--last", "--for", "prompts"), "There is no")
    (plan,) = run("plans", model, "--json").document["plans"]
    assert plan["name"] == "best"
    assert plan["command"] == found["command"]
    assert plan["badge"]["decode_ts"] == pytest.approx(winner["decode_ts"])


def test_one_device_is_a_short_search(run: Run, model: Path) -> None:
    outcome = run("tune", model, "--devices", "cpu", "--for", "prompts", "--budget", 5)
    assert outcome.status == 0
    assert "5 s at most" in outcome.err
    assert "fastest" in outcome.out
    assert "The CPU alone gives" in outcome.out
    assert "Use it with: tandem chat" in outcome.out


def test_an_interrupt_gives_the_best_so_far(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []
    monkeypatch.setattr(module, "_stepped", steps.append)
    monkeypatch.setattr(module.Interrupt, "__call__", lambda _: len(steps) >= 2)
    outcome = run("tune", model, "--devices", "cpu,cpu", "--ctx", 64)
    assert outcome.status == 0
    assert "ended early" in outcome.out
    monkeypatch.setattr(module.Interrupt, "__call__", lambda _: True)
    outcome = run("tune", model, "--devices", "cpu,cpu", "--ctx", 64)
    assert outcome.status == 1
    assert outcome.out == ""


def test_what_cannot_be_searched_is_said(run: Run, model: Path, foreign: Path) -> None:
    assert_refused(run("tune", model, "--budget", "-1"), "time for a search")
    assert_refused(run("tune", foreign, "--devices", "cpu"), "mumble")
    assert_refused(run("tune", model, "--devices", "cuda:9"), "cuda:9")
    assert run("tune", model, "--for", "speed").status == 2


def test_kernels_need_a_gpu(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(no_gpus(), monkeypatch)
    assert_refused(run("tune", model, "--kernels"), "There is no GPU with kernels to tune: No ")


def test_what_kernels_gain_is_shown(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, config = {"n_blocks": 128}, {"num_warps": 4}
    found = [
        KernelTuning("cuda:0", "few", facts, 20e-6, 15e-6, config, 9),
        KernelTuning("cuda:0", "many", {"low": 4}, 1e-3, 1e-3, {"rows": 64}, 5),
    ]
    asked: list[tuple[str, list[str]]] = []

    def tune_kernels(path: str, devices: list[str], **_: object) -> list[KernelTuning]:
        asked.append((path, devices))
        return found

    monkeypatch.setattr("engine.tune_kernels", tune_kernels)
    shown = run("tune", model, "--kernels", "--devices", "cuda:0").out
    assert asked == [(str(model), ["cuda:0"])]
    rows = [line.split() for line in shown.splitlines()]
    assert rows[1] == ["cuda:0", "few", "n_blocks=128", "20.0", "µs", "15.0", "µs", "25.0", "%",
                       "num_warps=4", "9"]  # fmt: skip
    assert shown.endswith("1 of 2 can be faster. They are used from the next load on.\n")
    document = run("tune", model, "--kernels", "--json").document
    assert document["kernels"][0] == {
        "device": "cuda:0", "kernel": "few", "facts": facts, "rule_s": 20e-6, "best_s": 15e-6,
        "config": config, "n_tried": 9,
    }  # fmt: skip
    found.pop(0)
    assert (
        "0 of 1 can be faster. The defaults are unchanged." in run("tune", model, "--kernels").out
    )
