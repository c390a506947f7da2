"""The window's measurements in a process of their own: results, the end of the work, failures."""

import sys

import psutil
import pytest

from app.core.translation import use_language
from app.devices.interconnect import measuring
from app.devices.interconnect.measuring import measure_apart
from engine import DeviceInfo, EngineError, MachineFile, list_devices


def cpu() -> list[DeviceInfo]:
    return [device for device in list_devices() if device.kind == "cpu"]


def never() -> bool:
    return False


def test_what_another_process_measures_is_saved_and_said_in_the_windows_language() -> None:
    (device,) = cpu()
    assert MachineFile.of_user().device(device) is None
    said: list[str] = []
    use_language("de")
    try:
        measure_apart([device], said.append, never)
    finally:
        use_language("en")
    assert said == ["cpu wird gemessen …", "Zwischen cpu und cpu wird gemessen …"]
    facts = MachineFile.of_user().device(device)
    assert facts is not None
    assert facts.bytes_per_s > 0


def test_a_stop_ends_the_process() -> None:
    said: list[str] = []
    measure_apart(cpu(), said.append, lambda: True)
    assert said == []
    children = psutil.Process().children()
    assert not any("app.devices.interconnect.measuring" in child.cmdline() for child in children)


BEGIN = 'print(\'{"said": "Measuring cuda:0"}\', flush=True);'


@pytest.mark.parametrize(
    ("code", "said", "seconds"),
    [
        (BEGIN + "import os; os.abort()", "the last step was: Measuring cuda:0", 60.0),
        ("import sys; sys.exit(3)", r"exit status 3\); the last step was: startup", 60.0),
        ("import time; time.sleep(60)", "hung", 0.2),
    ],
    ids=["crash", "exit", "hang"],
)
def test_a_process_that_ends_or_hangs_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, code: str, said: str, seconds: float
) -> None:
    monkeypatch.setattr(measuring, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(measuring, "MAX_S", seconds)
    with pytest.raises(EngineError, match=said):
        measure_apart(cpu(), lambda _: None, never)


def test_a_process_that_cannot_be_started_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "COMMAND", ("/nonexistent/python",))
    with pytest.raises(EngineError, match="Measuring failed: No such file"):
        measure_apart(cpu(), lambda _: None, never)
