"""What torch tells of GPUs, with made-up properties."""

import types

import pytest
import torch

from engine.hardware.devices.other_gpus import TorchGpu
from engine.hardware.torch_devices import has_code_for, list_gpus

CUDA = types.SimpleNamespace(
    name="RTX 4090", total_memory=24 << 30, major=8, minor=9, uuid="aaaa-bbbb",
    pci_domain_id=0, pci_bus_id=0x2A, pci_device_id=0,
)  # fmt: skip
HIP = types.SimpleNamespace(
    name="AMD Radeon RX 7900 XTX", total_memory=24 << 30, major=11, minor=0,
    gcnArchName="gfx1100:sramecc-:xnack-",
    uuid=types.SimpleNamespace(bytes=list(b"4457f6c1c0c4f3a8")),
)  # fmt: skip


@pytest.fixture
def one_gpu(monkeypatch):
    def use(properties, hip):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (20 << 30, 24 << 30))

    return use


def test_a_cuda_gpu_is_described(one_gpu):
    one_gpu(CUDA, None)
    (found,) = list_gpus()["gpus"]
    assert TorchGpu(**found) == TorchGpu(
        "RTX 4090", 24 << 30, 20 << 30, "GPU-aaaa-bbbb", "00000000:2A:00.0", "8.9"
    )


def test_a_hip_gpu_has_the_uuid_that_amds_driver_gives_it(one_gpu):
    one_gpu(HIP, "7.2")
    (found,) = list_gpus()["gpus"]
    assert (found["uuid"], found["arch"], found["pci_bus"]) == (
        "GPU-4457f6c1c0c4f3a8", "gfx1100", ""
    )  # fmt: skip
    assert "compute_capability" not in found


def test_a_uuid_of_another_form_is_unknown(one_gpu):
    odd = types.SimpleNamespace(**{**vars(HIP), "uuid": types.SimpleNamespace(bytes=[255] * 16)})
    one_gpu(odd, "7.2")
    assert list_gpus()["gpus"][0]["uuid"] == ""


def test_a_gpu_that_cannot_be_opened_is_listed_with_the_reason(one_gpu, monkeypatch):
    def fail(number):
        raise RuntimeError("CUDA error: device-side assert\nCompile with ...")

    one_gpu(CUDA, None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    (found,) = list_gpus()["gpus"]
    assert found["name"] == "RTX 4090"
    assert found["problem"] == "PyTorch cannot open the GPU (CUDA error: device-side assert)."


def test_torch_without_a_gpu_says_why(monkeypatch):
    def fail():
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert list_gpus() == {"gpus": [], "problem": "Torch not compiled with CUDA enabled"}


@pytest.mark.parametrize(
    ("known", "hip", "arch", "expected"),
    [
        (["sm_75", "sm_80", "sm_86"], None, "8.9", True),
        (["sm_75", "sm_80", "sm_86"], None, "6.1", False),
        (["sm_75", "sm_80", "sm_86"], None, "9.0", False),
        (["sm_80", "sm_90a", "compute_90"], None, "12.0", True),
        (["sm_100", "sm_120"], None, "12.1", True),
        (["sm_90a"], None, "9.0", True),
        (["compute_90a"], None, "12.0", False),
        (["sm_100", "sm_120"], None, "9.0", False),
        ([], None, "3.5", True),
        (["gfx1100", "gfx90a:xnack-"], "7.2", "gfx1100", True),
        (["gfx1100", "gfx90a:xnack-"], "7.2", "gfx90a", True),
        (["gfx1100"], "7.2", "gfx1103", False),
    ],
)
def test_code_for_a_gpu_is_looked_up_in_what_torch_was_built_for(
    monkeypatch, known, hip, arch, expected
):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: known)
    assert has_code_for(arch) == expected
