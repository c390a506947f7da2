"""Sentences on computing with GPUs, with a made-up NVIDIA driver."""

import pytest

from engine.errors import EngineError
from engine.hardware import backend_choice as gpu_path
from engine.hardware.backend_choice import find_gpu_path
from engine.hardware.devices.catalog import list_devices
from engine.hardware.devices.torch_builds import TorchBuild
from tests.helpers.fake_nvml import FakeDriver, install, no_gpus, three_gpus, use_build

CUDA, CPU_ONLY = TorchBuild(True, "12.8"), TorchBuild(True, "")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install everything that GPUs need, and unset all variables."""
    for name in ("TANDEM_BACKEND", "TANDEM_LAUNCHER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_path, "triton_version", lambda: "3.7.1")
    monkeypatch.setattr(gpu_path, "launcher_problem", lambda: "")
    monkeypatch.setattr(gpu_path, "triton_package", lambda: "triton")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = install(three_gpus(), monkeypatch)
    use_build(monkeypatch, CUDA)
    return driver


def sentence() -> str:
    return find_gpu_path(list_devices()).sentence


def test_a_gpu_with_everything(gpus: FakeDriver) -> None:
    found = find_gpu_path(list_devices())
    assert found.sentence == (
        "GPUs compute with Tandem's kernels, compiled and launched by Triton 3.7.1."
    )
    assert (found.has_gpu, found.arithmetic, found.launcher) == (True, "kernels", "triton")
    assert (found.triton, found.torch_cuda, found.missing) == ("3.7.1", "12.8", ())


def test_a_gpu_without_a_compiler(gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_path, "launcher_problem", lambda: "there is no C compiler")
    found = find_gpu_path(list_devices())
    assert found.sentence == (
        "GPUs compute with Tandem's kernels, compiled by Triton 3.7.1 and launched by Tandem "
        "itself because there is no C compiler."
    )
    assert (found.launcher, found.launcher_problem) == ("own", "there is no C compiler")


def test_what_variables_ask_for(gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_LAUNCHER", "own")
    assert sentence().endswith("and launched by Tandem itself.")
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    assert "as set by TANDEM_BACKEND=reference" in sentence()
    assert find_gpu_path(list_devices()).arithmetic == "reference"
    monkeypatch.setenv("TANDEM_BACKEND", "magic")
    with pytest.raises(EngineError, match="magic"):
        sentence()


def test_a_gpu_without_triton(gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_path, "triton_version", lambda: "")
    found = find_gpu_path(list_devices())
    assert "because Triton is missing: pip install triton." in found.sentence
    assert (found.arithmetic, found.launcher) == ("reference", "")
    assert found.missing == ("Triton (pip install triton)",)


def test_a_gpu_that_torch_cannot_use(gpus: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    use_build(monkeypatch, CPU_ONLY)
    assert "install a CUDA build of torch" in sentence()
    assert "For GPUs" not in sentence()
    monkeypatch.setattr(gpu_path, "triton_version", lambda: "")
    assert sentence().endswith("GPUs also need Triton (pip install triton).")
    assert not find_gpu_path(list_devices()).has_gpu


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(no_gpus(), monkeypatch)
    use_build(monkeypatch, CUDA)
    assert sentence() == "No NVIDIA driver was found; Tandem runs on the CPU."
    use_build(monkeypatch, CPU_ONLY)
    monkeypatch.setattr(gpu_path, "triton_version", lambda: "")
    found = find_gpu_path(list_devices())
    assert found.sentence == (
        "No NVIDIA driver was found; Tandem runs on the CPU. GPUs also need a PyTorch build with "
        "CUDA and Triton (pip install triton)."
    )
    assert found.missing == (
        "a GPU with its NVIDIA driver",
        "a PyTorch build with CUDA",
        "Triton (pip install triton)",
    )


def test_the_version_of_triton_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    versions = {"triton-windows": "3.8.0.post29"}

    def version(package: str) -> str:
        if package not in versions:
            raise gpu_path.metadata.PackageNotFoundError
        return versions[package]

    monkeypatch.setattr(gpu_path.metadata, "version", version)
    monkeypatch.setattr(gpu_path.importlib.util, "find_spec", lambda name: object())
    assert gpu_path.triton_version() == "3.8.0.post29"
    versions.clear()
    assert gpu_path.triton_version() == "of an unknown version"
    monkeypatch.setattr(gpu_path.importlib.util, "find_spec", lambda name: None)
    assert gpu_path.triton_version() == ""
    monkeypatch.setattr(gpu_path.sys, "platform", "win32")
    assert gpu_path.triton_package() == "triton-windows"
