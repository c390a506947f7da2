"""GPUs that only torch knows: NVML is missing, or AMD's driver has no files."""

import json
import sys
import textwrap
import threading

import pytest

from engine.hardware.devices import other_gpus as torch_gpus
from engine.hardware.devices.catalog import cuda_status, list_devices
from engine.hardware.devices.monitor import DeviceMonitor
from engine.hardware.devices.torch_builds import TorchBuild
from tests.helpers.fake_nvml import GIB, install, no_gpus, three_gpus, use_build

HIP = TorchBuild(True, "", "7.2", "2.13.0+rocm7.2")
JETSON = {
    "name": "Orin", "total_bytes": 30 * GIB, "free_bytes": 20 * GIB, "uuid": "GPU-cafe",
    "compute_capability": "8.7",
}  # fmt: skip
RADEON = {
    "name": "AMD Radeon RX 7900 XTX", "total_bytes": 24 * GIB, "free_bytes": 23 * GIB,
    "arch": "gfx1100",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_driver_library(monkeypatch, tmp_path):
    install(no_gpus(), monkeypatch)
    monkeypatch.setattr(torch_gpus, "_question", None)
    (tmp_path / "nvidiactl").touch()
    for files in ("CUDA_FILES", "HIP_FILES"):
        monkeypatch.setattr(torch_gpus, files, (tmp_path / "nvidiactl",))


def torch_answers(monkeypatch, gpus, problem="", *, before=""):
    """Have the child print this answer."""
    answer = json.dumps({"gpus": gpus, "problem": problem})
    program = f"{textwrap.dedent(before)}\nprint('a warning')\nprint({answer!r})"
    monkeypatch.setattr(torch_gpus, "COMMAND", (sys.executable, "-c", program))


def test_without_nvml_torch_tells_the_gpus(monkeypatch):
    torch_answers(monkeypatch, [JETSON])
    gpu, cpu = list_devices()
    assert (gpu.id, gpu.name, gpu.compute_capability) == ("cuda:0", "Orin", "8.7")
    assert (gpu.total_bytes, gpu.free_bytes, gpu.uuid) == (30 * GIB, 20 * GIB, "GPU-cafe")
    assert gpu.usable
    assert gpu.note == ""
    assert cpu.id == "cpu"
    assert cuda_status() == ""


def test_amd_under_windows_and_wsl_is_told_by_torch(monkeypatch):
    use_build(monkeypatch, HIP)
    torch_answers(monkeypatch, [RADEON])
    gpu = list_devices()[0]
    assert (gpu.id, gpu.arch, gpu.usable) == ("cuda:0", "gfx1100", True)
    assert gpu.note == "Tandem has not been run on AMD GPUs yet."


def test_a_gpu_that_torch_cannot_open_is_listed_with_the_reason(monkeypatch):
    broken = {"name": "GPU", "total_bytes": 0, "free_bytes": 0, "problem": "PyTorch cannot open."}
    torch_answers(monkeypatch, [broken, JETSON])
    assert [(d.id, d.usable) for d in list_devices()[:2]] == [("cuda:0", False), ("cuda:1", True)]


def test_torch_is_asked_once(monkeypatch, tmp_path):
    torch_answers(monkeypatch, [JETSON], before=f"open({str(tmp_path / 'n')!r}, 'a').write('x')")
    for _ in range(3):
        assert len(list_devices()) == 2
    assert (tmp_path / "n").read_text() == "x"


def test_who_does_not_wait_gets_the_gpus_later(monkeypatch, tmp_path):
    """As the window's start; the answer is there for the next caller."""
    gate = tmp_path / "gate"
    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    torch_answers(monkeypatch, [JETSON], before=wait)
    assert [d.id for d in list_devices(wait=False)] == ["cpu"]
    with DeviceMonitor() as monitor:
        assert monitor.devices == ("cpu",)
    gate.touch()
    assert [d.id for d in list_devices()] == ["cuda:0", "cpu"]
    assert [d.id for d in list_devices(wait=False)] == ["cuda:0", "cpu"]


@pytest.mark.parametrize(
    "program",
    ["raise SystemExit(3)", "print('no JSON')", "print('[]')", "print('{\"gpus\": 3}')", ""],
)
def test_a_child_that_fails_means_no_gpu(monkeypatch, program):
    monkeypatch.setattr(torch_gpus, "COMMAND", (sys.executable, "-c", program))
    assert [d.id for d in list_devices()] == ["cpu"]
    assert cuda_status() == "No NVIDIA driver was found; Tandem runs on the CPU."


def test_a_child_that_falls_silent_is_ended(monkeypatch):
    monkeypatch.setattr(torch_gpus, "ANSWER_S", 0.2)
    torch_answers(monkeypatch, [JETSON], before="import time; time.sleep(60)")
    assert [d.id for d in list_devices()] == ["cpu"]


def nobody_asks(monkeypatch):
    def start(self):
        pytest.fail("torch was asked")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_nobody_is_asked_where_no_file_of_a_driver_is(monkeypatch):
    monkeypatch.setattr(torch_gpus, "CUDA_FILES", ())
    nobody_asks(monkeypatch)
    assert [d.id for d in list_devices()] == ["cpu"]


def test_a_build_without_gpus_is_not_asked(monkeypatch):
    use_build(monkeypatch, TorchBuild(True, "", version="2.15.0+cpu"))
    nobody_asks(monkeypatch)
    assert [d.id for d in list_devices()] == ["cpu"]


def test_a_driver_library_that_answers_is_enough(monkeypatch):
    files = torch_gpus.CUDA_FILES
    install(three_gpus(), monkeypatch)
    monkeypatch.setattr(torch_gpus, "CUDA_FILES", files)
    nobody_asks(monkeypatch)
    assert len(list_devices()) == 4


def test_the_monitor_says_that_the_state_is_not_known(monkeypatch):
    torch_answers(monkeypatch, [JETSON])
    with DeviceMonitor(["cuda:0"]) as monitor:
        (got,) = monitor.snapshot()
    assert (got.device, got.total_bytes) == ("cuda:0", 0)
    assert "no driver library reports them" in got.problem


def test_the_real_child_says_why_there_is_no_gpu():
    """This machine's torch, in a child as it is."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert torch_gpus._gpus_of_child() == ()
