"""Which kinds of PyTorch suit a machine, as its drivers tell."""

from __future__ import annotations

from pathlib import Path

import pytest

import engine
from engine.hardware.devices import torch_builds as wheels
from engine.hardware.devices.torch_builds import TorchBuild
from tests.helpers.fake_amd import BUILT_IN, XTX, add_amd, install_amd
from tests.helpers.fake_nvml import FakeDriver, FakeGpu, install, no_gpus

NONE = TorchBuild(is_installed=False, cuda="")


@pytest.fixture(autouse=True)
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("capabilities", "driver_cuda", "expected"),
    [
        ([(8, 9)], 13000, ("cuda13", "cpu")),
        ([(8, 9)], 12040, ("cuda12", "cpu")),
        ([(6, 1)], 13000, ("cuda12", "cpu")),  # Pascal
        ([(8, 9), (6, 1)], 13000, ("cuda12", "cpu")),  # one build for both
        ([(12, 0), (6, 1)], 13000, ("cuda13", "cuda12", "cpu")),  # none is for both
        ([(12, 0)], 12080, ("cpu",)),  # Blackwell with an old driver
        ([(8, 9)], 11040, ("cpu",)),
        ([], 13000, ("cpu",)),
    ],
)
def test_nvidia_cards_and_their_driver_choose(
    monkeypatch: pytest.MonkeyPatch,
    capabilities: list[tuple[int, int]],
    driver_cuda: int,
    expected: tuple[str, ...],
) -> None:
    gpus = [FakeGpu(f"G{n}", f"GPU-{n}", n + 1, 24, one) for n, one in enumerate(capabilities)]
    driver = FakeDriver(gpus)
    driver.cuda = driver_cuda
    install(driver, monkeypatch)
    assert engine.suitable_torch() == expected


def test_without_a_driver_it_is_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    install(no_gpus(), monkeypatch)
    assert engine.suitable_torch() == ("cpu",)


def test_large_amd_cards_want_rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_amd(monkeypatch, tmp_path, [XTX, BUILT_IN], NONE)
    assert engine.suitable_torch() == ("rocm", "cpu")


def test_what_a_processor_has_built_in_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_amd(monkeypatch, tmp_path, [BUILT_IN], NONE)
    assert engine.suitable_torch() == ("cpu",)


def test_nvidia_comes_before_amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(FakeDriver([FakeGpu("G", "GPU-1", 1, 24)]), monkeypatch)
    add_amd(monkeypatch, tmp_path, [XTX], NONE)
    assert engine.suitable_torch() == ("cuda13", "rocm", "cpu")
