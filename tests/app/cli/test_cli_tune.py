"""`tune`: what it says before, while and after it searches."""

from pathlib import Path

import pytest

from app.cli import tune as module
from tests.helpers.command_line import Run, assert_refused


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
    assert_refused(run("tune", model, "--devices", "cpu", "--last"), "Nothing was searched yet")
    assert_refused(run("tune", model, *arguments, "--last", "--for", "prompts"), "Nothing was")
    (plan,) = run("plans", model, "--json").document["plans"]
    assert plan["name"] == "best"
    assert plan["command"] == found["command"]
    assert plan["badge"]["decode_ts"] == pytest.approx(winner["decode_ts"])


def test_one_device_is_a_short_search(run: Run, model: Path) -> None:
    outcome = run("tune", model, "--devices", "cpu", "--for", "prompts", "--budget", 5)
    assert outcome.status == 0
    assert "at most 5 s" in outcome.err
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
