"""Which build of PyTorch fits a card, and what is said of one that does not."""

import re
from types import SimpleNamespace

import pytest

from engine.hardware.devices import torch_builds as wheels
from engine.hardware.devices.torch_builds import (
    TorchBuild,
    advise_nvidia,
    amd_command,
    choose_wheel,
    runs_on,
)

CPU = TorchBuild(True, "", version="2.15.0+cpu")


def official(cuda: str) -> TorchBuild:
    return TorchBuild(True, cuda, version=f"2.13.0+cu{cuda.replace('.', '')}")


@pytest.fixture(autouse=True)
def x86(monkeypatch):
    monkeypatch.setattr(wheels.platform, "machine", lambda: "AMD64")
    monkeypatch.setattr(wheels, "sys", SimpleNamespace(platform="win32"))


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [
        ("8.9", 13, "13.0"),
        ("12.0", 13, "13.0"),
        ("7.5", 13, "13.0"),
        ("8.9", 12, "12.6"),  # a driver from 525 to 579
        ("12.0", 12, "12.8"),  # Blackwell on such a driver: nothing newer than 2.11
        ("6.1", 13, "12.6"),  # Pascal: nothing newer than 2.14
        ("7.0", 12, "12.6"),
        ("", None, "13.0"),
        ("13.0", 13, "13.0"),  # newer than the table
        ("3.5", 13, None),
        ("8.9", 11, None),
    ],
)
def test_a_card_and_its_driver_choose_the_build(capability, driver, expected):
    found = choose_wheel([capability], driver)
    assert (found.cuda if found else None) == expected


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [("7.5", 13, None), ("9.0", 12, "12.6"), ("12.1", 13, "13.0"), ("11.0", 13, "13.0")],
)
def test_builds_for_arm_have_code_for_other_cards(monkeypatch, capability, driver, expected):
    monkeypatch.setattr(wheels.platform, "machine", lambda: "aarch64")
    found = choose_wheel([capability], driver)
    assert (found.cuda if found else None) == expected


def test_code_runs_on_newer_cards_of_the_same_major_version():
    assert runs_on("8.0", "8.9")
    assert not runs_on("8.6", "8.0")
    assert not runs_on("8.6", "9.0")
    assert runs_on("12.0", "12.1")


@pytest.mark.parametrize(
    ("build", "capability", "driver", "reason", "index"),
    [
        (CPU, "8.9", 13, "this PyTorch build has no CUDA support", "cu130"),
        (CPU, "8.9", 12, "this PyTorch build has no CUDA support", "cu126"),
        (CPU, "6.1", 13, "this PyTorch build has no CUDA support", "cu126"),
        (TorchBuild(False, ""), "8.9", 13, "but PyTorch is not", "cu130"),
        (TorchBuild(True, "", "7.2"), "8.9", 13, "is for AMD GPUs (ROCm)", "cu130"),
        (official("13.0"), "8.9", 12, "update the driver to 580 or newer, or install", "cu126"),
        (official("13.0"), "12.0", 12, "update the driver to 580 or newer, or install", "cu128"),
        (official("13.0"), "6.1", 13, "(CUDA 13.0) has no code for GPUs of compute", "cu126"),
        (official("12.6"), "12.0", 13, "(CUDA 12.6) has no code for GPUs of compute", "cu130"),
        (official("12.6"), "12.0", 12, "(CUDA 12.6) has no code for GPUs of compute", "cu128"),
    ],
)
def test_a_card_that_torch_cannot_use_has_a_command(build, capability, driver, reason, index):
    found = advise_nvidia(build, capability, driver)
    assert reason in found.reason
    assert found.reason.endswith(".")
    assert found.remedy.endswith(f" --index-url https://download.pytorch.org/whl/{index}")
    assert found.remedy.startswith('pip install --force-reinstall "torch>=2.11')


@pytest.mark.parametrize(
    ("build", "capability", "driver"),
    [
        (official("13.0"), "8.9", 13),
        (official("12.6"), "6.1", 12),
        (official("13.2"), "13.0", 13),
        (official("13.0"), "8.9", None),
        (TorchBuild(True, "13.0", version="2.13.0a0+gitabc"), "6.1", 13),  # of its own making
        (TorchBuild(True, "12.9", version="2.12.0"), "6.1", 13),  # not in the table
        (TorchBuild(True, "unknown", version="2.13.0+cu130"), "6.1", 13),
    ],
)
def test_a_build_is_not_judged_without_need(build, capability, driver):
    assert advise_nvidia(build, capability, driver) == wheels.Advice()


@pytest.mark.parametrize(
    ("build", "capability", "driver", "reason", "index"),
    [
        (CPU, "8.9", 11, "update it to 580 or newer.", "cu130"),
        (official("13.0"), "8.9", 11, "update it to 580 or newer.", ""),
        (CPU, "6.1", 11, "update it to 525 or newer.", "cu126"),
        (
            CPU,
            "3.5",
            13,
            "PyTorch 2.11 and later have no code for GPUs of compute capability 3.5",
            "",
        ),
    ],
)
def test_where_no_build_fits_the_driver_or_the_card_is_named(
    build, capability, driver, reason, index
):
    found = advise_nvidia(build, capability, driver)
    assert reason in found.reason
    assert found.remedy.endswith(index)
    assert bool(found.remedy) == bool(index)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], "cu126"),
        (["8.9", "8.6"], "cu126"),
        (["8.9", "12.0"], "cu128"),  # the only one for both on this driver
        (["6.1", "12.0"], "cu126"),  # there is none for all
    ],
)
def test_one_build_for_all_cards_of_the_machine_comes_first(others, expected):
    found = advise_nvidia(CPU, "8.9", 12, others)
    assert found.remedy.endswith(expected)


@pytest.mark.parametrize("wheel", wheels.WHEELS, ids=lambda wheel: wheel.cuda)
def test_builds_are_named_as_pytorchs_indexes_are(wheel):
    digits = wheel.cuda.replace(".", "")
    assert re.fullmatch(
        r'pip install --force-reinstall "torch>=2\.1[0-9](,<2\.1[0-9])?" '
        rf"--index-url https://download\.pytorch\.org/whl/cu{digits}",
        wheel.command,
    )


@pytest.mark.parametrize(
    ("system", "arch", "from_amd", "expected"),
    [
        ("linux", "gfx1100", False, "torch>=2.11 https://download.pytorch.org/whl/rocm7.14"),
        ("linux", "gfx1103", True, "torch[device-gfx1103]>=2.11 https://stable.repo.amd.com"),
        ("win32", "", False, "torch[device-all]>=2.11 https://stable.repo.amd.com"),
    ],
)
def test_amds_cards_have_a_command_for_each_system(monkeypatch, system, arch, from_amd, expected):
    monkeypatch.setattr(wheels, "sys", SimpleNamespace(platform=system))
    requirement, address = expected.split()
    command = amd_command(arch, from_amd=from_amd)
    assert f'"{requirement}" --index-url {address}' in command


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.15.0", True), ("2.13.0+cu130", True), ("2.13.0+rocm7.2", True), ("2.13.0+cpu", True),
        ("2.13.0a0+git123", False), ("2.9.0a0+nv25.9", False), ("", False),
    ],
)  # fmt: skip
def test_pytorchs_own_builds_are_known_by_their_version(version, expected):
    assert TorchBuild(True, "13.0", version=version).is_official == expected
