"""First trial of a card in a child process: what it does not survive is a verdict, and is kept."""

import io
import json
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import psutil
import pytest
import torch

from engine.backends.gpu import self_test
from engine.backends.gpu.launch import own_launcher as launcher_choice
from engine.errors import OutOfDeviceMemory
from engine.hardware import backend_choice
from engine.hardware.card_records import WHOLE_CARD, CardRecords, CardVerdict, card_key
from engine.hardware.card_records import card_problems as problems_on_disk
from engine.hardware.devices.catalog import require_devices
from engine.hardware.devices.types import DeviceInfo
from engine.runtime import kernel_proof
from engine.runtime.kernel_proof import only_shown, prove_cards, prove_kernels, try_card
from tests.helpers.dead_card import fault
from tests.helpers.fake_nvml import FakeDriver, install, three_gpus

GPU = DeviceInfo("cuda:1", "cuda", "RTX 3060", 12 << 30, 11 << 30, uuid="GPU-bbbb", driver="580")
TODAY = date.today().isoformat()


def tried(behaviour: str, folder: Path) -> CardVerdict | None:
    """Try a card with a child that behaves in some way; check that it saw the card and is gone."""
    command = sys.executable, "-m", "tests.helpers.fake_card_child", behaviour, str(folder)
    found = try_card(GPU, command=command, start_s=5, step_s=1)
    (file,) = folder.iterdir()
    assert file.read_text() == "GPU-bbbb", "it sees no other GPU"
    assert not psutil.pid_exists(int(file.name)), "it is ended"
    return found


@pytest.mark.parametrize(
    ("behaviour", "verdict", "why"),
    [
        ("pass", "passed", ""),
        ("wrong", "wrong", "a norm came out wrong"),
        ("fault", "crashed", "RuntimeError: CUDA error"),
        ("hang", "hung", "a test program was still testing products after 1 s"),
        ("crash", "crashed", "a test program stopped while testing products (exit status "),
    ],
)
def test_what_a_child_finds_is_the_verdict(
    behaviour: str, verdict: str, why: str, tmp_path: Path
) -> None:
    begun = time.perf_counter()
    found = tried(behaviour, tmp_path)
    assert found is not None
    assert found.outcome == verdict
    assert TODAY <= found.date <= date.today().isoformat()  # a run may go on past midnight
    assert found.why.startswith(why)
    assert bool(found.why) == bool(why)
    assert time.perf_counter() - begun < 20


@pytest.mark.parametrize("behaviour", ["fail", "mute", "refuse", "leave"])
def test_a_child_that_does_not_test_says_nothing(behaviour: str, tmp_path: Path) -> None:
    assert tried(behaviour, tmp_path) is None


def test_a_command_that_is_not_there_says_nothing() -> None:
    assert try_card(GPU, command=("/no/such/program",)) is None


def test_the_real_program_is_found_and_says_why_it_cannot_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert try_card(GPU) is None  # it sees no such GPU, wherever this test runs
    assert "kernels could not be tested:" in caplog.text
    assert "No module named" not in caplog.text


def test_amd_gpus_are_chosen_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    both = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    assert only_shown(GPU) == dict.fromkeys(both, "1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3, 5")
    assert only_shown(GPU) == dict.fromkeys(both, "5")


def said(device: str = "cpu") -> list[dict[str, object]]:
    """Return the replies of the child's program, run in this process."""
    replies = io.StringIO()
    self_test.run(io.StringIO(json.dumps({"device": device}) + "\n"), replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


def test_the_program_names_each_step_and_says_what_it_found() -> None:
    steps = [self_test.OPENING, *self_test.CHECKS]
    assert said() == [*({"begin": step} for step in steps), {"problem": "", "has_fault": False}]


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (fault(), {"problem": "AcceleratorError: CUDA error: device-side assert triggered",
                   "has_fault": True}),
        (ValueError("no such\nlayout"), {"problem": "ValueError: no such", "has_fault": False}),
        (torch.OutOfMemoryError("CUDA out of memory"),
         {"refused": "OutOfMemoryError: CUDA out of memory"}),
    ],
    ids=repr,
)  # fmt: skip
def test_the_program_tells_faults_from_a_lack_of_memory(
    error: Exception, last: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(self_test, "CHECKS", {})
    monkeypatch.setattr(self_test, "CHECKS", {"norms": fail, "products": fail})
    assert said()[1:] == [{"begin": "norms"}, last]


# what follows goes through `prove_kernels`, with a driver and verdicts that are made up


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    """Install three GPUs, on which Triton's launcher starts."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    monkeypatch.setattr(backend_choice, "_refused", {})
    monkeypatch.setattr(launcher_choice, "prepare", lambda: "triton")
    return install(three_gpus(), monkeypatch)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the GPUs that were tested: "child" and "here"; those in a child crash it at will."""
    found: dict[str, list[str]] = {"child": [], "here": []}
    monkeypatch.setattr(kernel_proof, "try_card", noted(found["child"], CardVerdict("passed")))
    monkeypatch.setattr(self_test, "problem_of", lambda device: found["here"].append(str(device)))
    return found


def noted(
    called: list[str], verdict: CardVerdict | None
) -> Callable[[DeviceInfo], CardVerdict | None]:
    def test(info: DeviceInfo) -> CardVerdict | None:
        called.append(info.id)
        return verdict

    return test


def test_a_card_is_tested_once_and_in_a_child_alone(
    driver: FakeDriver, asked: dict[str, list[str]]
) -> None:
    for _ in range(2):
        assert prove_kernels(["cpu", "cuda:0", "cuda:0"]).current == ()
    assert asked == {"child": ["cuda:0"], "here": []}
    driver.cuda = 13010
    driver.gpus[1].name = "another card"
    assert prove_kernels(["cuda:0"]).current == ()
    assert asked == {"child": ["cuda:0", "cuda:0"], "here": []}


def test_the_cpu_and_what_is_interpreted_there_start_no_child(
    driver: FakeDriver, asked: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in ("graph", "interpreter", "reference"):
        monkeypatch.setenv(backend_choice.VARIABLE, backend)
        prove_kernels(["cpu", "cpu"])
    prove_kernels(["cuda:0"])  # the reference needs no kernels
    assert asked == {"child": [], "here": []}


def test_a_card_that_crashes_its_child_computes_without_kernels_from_then_on(
    driver: FakeDriver, asked: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = CardVerdict("crashed", "a test program stopped while testing norms", "2026-03-01")
    monkeypatch.setattr(kernel_proof, "try_card", noted(asked["child"], crashed))
    (found,) = prove_kernels(["cuda:2"]).current
    assert (found.kind, found.devices) == ("kernels", ("cuda:2",))
    assert found.why == (
        "a test program stopped while testing norms, tested on 2026-03-01; "
        "'tandem devices --measure' repeats the test"
    )
    assert backend_choice.kernels_for("cuda:2") == ""
    monkeypatch.setattr(backend_choice, "_refused", {})  # as in the next process
    assert prove_kernels(["cuda:2"]).current == (found,)
    assert asked == {"child": ["cuda:2"], "here": []}
    assert problems_on_disk(require_devices(["cpu", "cuda:1", "cuda:2"])) == {"cuda:2": found.why}


def test_a_card_whose_child_does_not_start_is_tested_in_this_process(
    driver: FakeDriver, asked: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_proof, "try_card", noted(asked["child"], None))
    assert prove_kernels(["cuda:0"]).current == ()
    assert asked == {"child": ["cuda:0"], "here": ["cuda:0"]}
    monkeypatch.setattr(self_test, "problem_of", lambda device: "it computes nonsense")
    (found,) = prove_kernels(["cuda:0"]).current
    assert found.why == "it computes nonsense"
    assert not list(CardRecords.of_user()._cards), "that is not kept"


def test_a_full_memory_is_no_verdict(
    driver: FakeDriver, asked: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(device: torch.device) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernel_proof, "try_card", noted(asked["child"], None))
    monkeypatch.setattr(self_test, "problem_of", full)
    monkeypatch.setattr(kernel_proof, "free_bytes", lambda names: dict.fromkeys(names, 1 << 30))
    with pytest.raises(OutOfDeviceMemory, match=r"cuda:0 has 1\.00 GiB free but .* test its ker"):
        prove_kernels(["cuda:0"])
    assert backend_choice.kernels_for("cuda:0") == "gpu"


def test_the_test_in_this_process_does_not_take_a_fault_for_wrong_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(device: torch.device) -> None:
        raise fault()

    monkeypatch.setattr(self_test, "CHECKS", {"norms": fail})
    self_test.problem_of.cache_clear()
    with pytest.raises(torch.AcceleratorError):
        self_test.problem_of(torch.device("cpu"))


def test_a_failed_card_can_be_tested_again(
    driver: FakeDriver, asked: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    infos, records = (require_devices(["cuda:0", "cuda:1", "cpu"]), CardRecords.of_user())
    for info in infos[:2]:
        records.keep(card_key(info), WHOLE_CARD, CardVerdict("hung", "it hung", "2026-03-01"))
    assert prove_kernels(["cuda:0", "cuda:1"]).current
    hung = CardVerdict("hung", "it hung again", "2026-03-02")
    monkeypatch.setattr(
        kernel_proof, "try_card",
        lambda info: noted(asked["child"], CardVerdict("passed") if info.id == "cuda:0" else hung)(
            info
        ),
    )  # fmt: skip
    again = "'tandem devices --measure' repeats the test"
    assert prove_cards(infos) == {"cuda:1": f"it hung again, tested on 2026-03-02; {again}"}
    assert asked["child"] == ["cuda:0", "cuda:1"]
    assert backend_choice.kernels_for("cuda:0") == "gpu"
    assert backend_choice.kernels_for("cuda:1") == ""
