"""Trials in a child process: those it survives, those it does not, and that it is killed."""

import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import psutil
import pytest

from engine.runtime.interconnect.child import StepResult, TrialStep, try_steps

GPUS = {"cuda:0": "GPU-a", "cuda:3": "GPU-b"}
PAIR = ("cuda:0", "cuda:3")
STEPS = [
    TrialStep(PAIR, means, place)  # type: ignore[arg-type]
    for place, means in product(("host", "peer"), ("stores", "copies"))
]


def outcome(
    behaviour: str,
    where: str,
    folder: Path,
    steps: Sequence[TrialStep] = STEPS,
    step_s: float = 1.0,
) -> tuple[list[StepResult], int]:
    """Run trials; return the results, and the number of processes that it took."""
    command = sys.executable, "-m", "tests.helpers.fake_link_child", behaviour, where, str(folder)
    found = try_steps(steps, GPUS, command=command, start_s=10, step_s=step_s)
    for file in folder.iterdir():
        assert file.read_text() == "GPU-a,GPU-b", "it sees no other GPU"
        assert not psutil.pid_exists(int(file.name)), "it is ended"
    return found, len(list(folder.iterdir()))


def verdicts(found: Sequence[StepResult]) -> dict[str, str]:
    for tried in found:
        assert tried.there == tried.back
    return {f"{t.step.means}/{t.step.place}": t.there.verdict for t in found}


def test_one_process_tries_all(tmp_path: Path) -> None:
    found, n = outcome("pass", "", tmp_path)
    assert verdicts(found) == dict.fromkeys(
        ("stores/host", "copies/host", "stores/peer", "copies/peer"), "passed"
    )
    assert found[0].there.seconds == {1024: 1e-5}
    assert n == 1


@pytest.mark.parametrize(
    ("behaviour", "verdict", "why"),
    [("hang", "hung", "for 1 s"), ("crash", "crashed", "exit status "),
     ("leave", "crashed", "exit status 5")],
)  # fmt: skip
def test_what_it_does_not_live_through_is_named(
    behaviour: str, verdict: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = time.perf_counter()
    with caplog.at_level("WARNING"):
        found, n = outcome(behaviour, "stores/peer", tmp_path)
    assert "its output: something for people" in caplog.text
    assert verdicts(found) == {
        "stores/host": "passed", "copies/host": "passed", "stores/peer": verdict
    }  # fmt: skip
    assert found[-1].there.why.startswith(why)
    assert n == 1, "the same place is not tried by other means"
    assert time.perf_counter() - begun < 20


def test_other_pairs_are_tried_after_a_crash(tmp_path: Path) -> None:
    other = TrialStep(("cuda:3", "cuda:0"), "copies", "peer")
    found, n = outcome("crash", "stores/host", tmp_path, [*STEPS, other])
    assert n == 2
    assert [(t.step, t.there.verdict) for t in found] == [
        (STEPS[0], "crashed"), (STEPS[2], "passed"), (STEPS[3], "passed"), (other, "passed")
    ]  # fmt: skip


@pytest.mark.parametrize("behaviour", ["fail", "mute"])
def test_a_process_that_does_not_begin_proves_nothing(behaviour: str, tmp_path: Path) -> None:
    command = sys.executable, "-m", "tests.helpers.fake_link_child", behaviour, "", str(tmp_path)
    assert try_steps(STEPS, GPUS, command=command, start_s=1.5, step_s=1) == []


def test_the_real_one_is_found_from_any_folder_and_needs_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported by mistake')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    gpus = {"cuda:0": "GPU-not-here-1", "cuda:1": "GPU-not-here-2"}
    steps = [TrialStep(("cuda:0", "cuda:1"), "copies", "host")]
    with caplog.at_level("WARNING"):
        assert try_steps(steps, gpus) == []
    assert "mistake" not in caplog.text
    assert "No module named" not in caplog.text
    assert "GpuBench" in caplog.text or "CUDA" in caplog.text, caplog.text


def test_a_command_that_is_not_there_proves_nothing() -> None:
    assert try_steps(STEPS, GPUS, command=("/no/such/program",)) == []
