"""AMD's GPUs in the list and the monitor, with made-up files of Linux's driver."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import NoDevice
from engine.hardware.devices import amd as amd_module
from engine.hardware.devices.catalog import cuda_status, hidden_gpus, list_devices
from engine.hardware.devices.monitor import DeviceMonitor
from engine.hardware.devices.other_gpus import Adapter
from engine.hardware.devices.torch_builds import TorchBuild
from engine.hardware.devices.types import DeviceInfo
from tests.helpers.fake_amd import (
    BUILT_IN,
    HIP,
    RX9070,
    XTX,
    FakeAmd,
    add_amd,
    folder_of,
    install_amd,
    write,
)
from tests.helpers.fake_nvml import GIB, install, no_gpus, three_gpus, use_build

CPU_BUILD = TorchBuild(True, "", version="2.15.0+cpu")
CUDA_BUILD = TorchBuild(True, "13.2", version="2.15.0")


def gpus() -> list[DeviceInfo]:
    return [info for info in list_devices() if info.kind == "cuda"]


def names() -> list[tuple[str, str]]:
    return [(info.id, info.name) for info in gpus()]


def test_an_amd_gpu_is_described_whole(monkeypatch, tmp_path):
    install_amd(monkeypatch, tmp_path, [XTX])
    assert gpus() == [
        DeviceInfo(
            id="cuda:0",
            kind="cuda",
            name="AMD Radeon RX 7900 XTX",
            total_bytes=24 * GIB,
            free_bytes=24 * GIB - GIB // 2,
            uuid="GPU-4457f6c1c0c4f3a8",
            pci_bus="00000000:83:00.0",
            driver="6.12.12",
            arch="gfx1100",
            note="Tandem has not been run on AMD GPUs yet.",
        )
    ]
    assert cuda_status() == ""


def test_gpus_are_numbered_as_the_compute_driver_numbers_them(monkeypatch, tmp_path):
    """Unlike NVIDIA's, which are in the order of the PCI bus."""
    install_amd(monkeypatch, tmp_path, [XTX, RX9070])
    assert names() == [("cuda:0", "AMD Radeon RX 7900 XTX"), ("cuda:1", "AMD Radeon RX 9070 XT")]
    assert [info.arch for info in gpus()] == ["gfx1100", "gfx1201"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [(90010, "gfx90a"), (90402, "gfx942"), (90006, "gfx906"), (110501, "gfx1151")],
)
def test_the_instruction_set_has_amds_name(monkeypatch, tmp_path, version, expected):
    install_amd(monkeypatch, tmp_path, [FakeAmd("0x1", "0x1", version, 1, 5, 64)])
    assert [info.arch for info in gpus()] == [expected]
    assert gpus()[0].name == f"AMD GPU {expected}", "it is in no table of names"


def test_a_name_on_the_card_itself_comes_first(monkeypatch, tmp_path):
    sysfs = install_amd(monkeypatch, tmp_path, [XTX])
    write(folder_of(sysfs, XTX) / "product_name", "AMD Instinct MI210")
    assert names() == [("cuda:0", "AMD Instinct MI210")]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "1,0"}, ["gfx1201", "gfx1100"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["gfx1201"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, ["gfx1201"]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, ["gfx1201"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00decaf0c0ffee00,0"}, ["gfx1201", "gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}, ["gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_the_variables_of_rocm_pick_and_order_the_gpus(monkeypatch, tmp_path, variables, expected):
    install_amd(monkeypatch, tmp_path, [XTX, RX9070])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [info.arch for info in gpus()] == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ""),
        (
            {"HIP_VISIBLE_DEVICES": "1"},
            "HIP_VISIBLE_DEVICES is '1' and hides AMD Radeon RX 7900 XTX.",
        ),
        ({"ROCR_VISIBLE_DEVICES": "0,7"}, "ROCR_VISIBLE_DEVICES is '0,7': there is no GPU 7"),
        (
            {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"},
            "HIP_VISIBLE_DEVICES is '1': there is no GPU 1, as only 1 is present",
        ),
    ],
)
def test_hidden_gpus_are_told(monkeypatch, tmp_path, variables, expected):
    install_amd(monkeypatch, tmp_path, [XTX, RX9070])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hidden_gpus().startswith(expected)
    assert bool(hidden_gpus()) == bool(expected)


def test_the_status_names_the_variable_that_hides_all(monkeypatch, tmp_path):
    install_amd(monkeypatch, tmp_path, [XTX])
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert cuda_status() == "HIP_VISIBLE_DEVICES is '' and hides all GPUs. Tandem runs on the CPU."


# --- cards that torch cannot use


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (CPU_BUILD, "This PyTorch build has no GPU support; install a ROCm build of torch"),
        (CUDA_BUILD, "This PyTorch build is for NVIDIA GPUs (CUDA); install a ROCm build"),
        (TorchBuild(False, ""), "There is an AMD GPU, but PyTorch is not installed"),
    ],
)
def test_another_build_is_explained_with_a_command(monkeypatch, tmp_path, build, reason):
    monkeypatch.setattr(
        "engine.hardware.devices.torch_builds.sys", SimpleNamespace(platform="linux")
    )
    install_amd(monkeypatch, tmp_path, [XTX], build)
    (info,) = gpus()
    assert not info.usable
    assert info.reason.startswith(reason)
    assert info.note == ""
    assert info.remedy == (
        'pip install --force-reinstall "torch>=2.11" '
        "--index-url https://download.pytorch.org/whl/rocm7.14"
    )
    assert cuda_status() == info.reason


def test_what_a_processor_has_built_in_is_not_mentioned(monkeypatch, tmp_path):
    install_amd(monkeypatch, tmp_path, [BUILT_IN], CPU_BUILD)
    assert gpus() == []
    use_build(monkeypatch, HIP)
    assert [info.arch for info in gpus()] == ["gfx1036"], "torch may use it"


def test_cards_of_both_makers_are_listed_and_torchs_come_first(monkeypatch, tmp_path):
    install(three_gpus(), monkeypatch)
    add_amd(monkeypatch, tmp_path, [XTX], CUDA_BUILD)
    assert [(info.id, info.usable) for info in gpus()] == [
        ("cuda:0", True), ("cuda:1", True), ("cuda:2", True), ("cuda:3", False),
    ]  # fmt: skip
    assert gpus()[3].name == "AMD Radeon RX 7900 XTX"
    use_build(monkeypatch, HIP)
    assert [(info.name, info.usable) for info in gpus()][:2] == [
        ("AMD Radeon RX 7900 XTX", True), ("RTX 3060", False),
    ]  # fmt: skip
    assert "is for AMD GPUs (ROCm); install a CUDA build" in gpus()[1].reason
    assert gpus()[1].remedy.endswith("/whl/cu130")


def test_a_user_who_may_not_compute_is_told_the_groups(monkeypatch, tmp_path):
    install_amd(monkeypatch, tmp_path, [XTX])
    monkeypatch.setattr(amd_module.os, "access", lambda path, mode: False)
    (info,) = gpus()
    assert "is not allowed to open" in info.reason
    assert info.remedy == "sudo usermod -aG render,video $USER"


def test_a_kernel_without_the_compute_driver_is_told(monkeypatch, tmp_path):
    install_amd(monkeypatch, tmp_path, [XTX])
    monkeypatch.setattr(amd_module, "KFD", tmp_path / "absent")
    (info,) = gpus()
    assert "The amdgpu driver does not provide " in info.reason
    assert (info.usable, info.remedy) == (False, "")


def test_a_card_whose_memory_is_not_told_is_not_usable(monkeypatch, tmp_path):
    sysfs = install_amd(monkeypatch, tmp_path, [XTX])
    (folder_of(sysfs, XTX) / "mem_info_vram_total").write_text("garbage\n")
    (info,) = gpus()
    assert (info.usable, info.total_bytes) == (False, 0)
    assert "does not report the GPU's memory" in info.reason


def test_files_that_a_container_may_not_read_are_no_gpus(monkeypatch, tmp_path):
    sysfs = install_amd(monkeypatch, tmp_path, [XTX, RX9070])
    (sysfs / "class/kfd/kfd/topology/nodes/1/properties").write_text("")
    assert [info.arch for info in gpus()] == ["gfx1201"]


def test_on_windows_the_registry_tells_of_amd_and_the_command_is_amds(monkeypatch):
    install(no_gpus(), monkeypatch)
    use_build(monkeypatch, CPU_BUILD)
    card = Adapter("amd", "AMD Radeon RX 7900 XTX", 24 * GIB)
    monkeypatch.setattr(
        "engine.hardware.devices.catalog.find_adapters", lambda: [Adapter("intel"), card]
    )
    monkeypatch.setattr(
        "engine.hardware.devices.torch_builds.sys", SimpleNamespace(platform="win32")
    )
    (info,) = gpus()
    assert (info.name, info.total_bytes, info.usable) == (card.name, 24 * GIB, False)
    assert info.remedy == (
        'pip install --force-reinstall "torch[device-all]>=2.11" '
        "--index-url https://stable.repo.amd.com/rocm/whl-next/"
    )
    with DeviceMonitor() as monitor:
        assert monitor.devices == ("cpu",)


# --- the monitor


def test_a_snapshot_carries_the_figures_of_the_kernels_files(monkeypatch, tmp_path):
    sysfs = install_amd(monkeypatch, tmp_path, [XTX, RX9070])
    write(sysfs / f"class/kfd/kfd/proc/{os.getpid()}/vram_{1000 + XTX.bus}", str(3 * GIB))
    with DeviceMonitor() as monitor:
        xtx, rx9070, _ = monitor.snapshot()
    assert (xtx.device, xtx.total_bytes, xtx.used_bytes) == ("cuda:0", 24 * GIB, GIB // 2)
    assert (xtx.load_percent, xtx.temperature_c, xtx.power_w) == (37.0, 54.0, 203.5)
    assert (xtx.own_bytes, xtx.clock_mhz, xtx.problem) == (3 * GIB, 2410, "")
    assert (xtx.power_limit_w, xtx.memory_clock_mhz, xtx.others_bytes) == (339.0, 1249, 0)
    assert (rx9070.power_w, rx9070.clock_mhz, rx9070.own_bytes) == (31.0, None, None)
    assert (rx9070.power_limit_w, rx9070.memory_clock_mhz) == (None, None)


def test_memory_of_other_programs_is_told_only_where_all_of_it_is(monkeypatch, tmp_path):
    sysfs = install_amd(monkeypatch, tmp_path, [XTX])
    programs = sysfs / "class/kfd/kfd/proc"
    with DeviceMonitor(["cuda:0"]) as monitor:
        assert monitor.snapshot()[0].others_bytes is None  # a kernel that lists no programs
        write(programs / f"{os.getpid()}/vram_{1000 + XTX.bus}", str(3 * GIB))
        write(programs / f"1/vram_{1000 + XTX.bus}", str(2 * GIB))
        assert monitor.snapshot()[0].others_bytes == 2 * GIB
        write(programs / "77/pasid", "32769")  # of another user: its figures may not be read
        assert monitor.snapshot()[0].others_bytes is None


def test_a_card_that_stops_answering_has_a_problem_and_comes_back(monkeypatch, tmp_path):
    sysfs = install_amd(monkeypatch, tmp_path, [XTX])
    file = folder_of(sysfs, XTX) / "mem_info_vram_used"
    with DeviceMonitor(["cuda:0"]) as monitor:
        text = file.read_text()
        file.unlink()
        assert "does not report the GPU's memory" in monitor.snapshot()[0].problem
        file.write_text(text)
        assert monitor.snapshot()[0].problem == ""


def test_watching_a_card_that_is_not_here_names_those_that_are(monkeypatch, tmp_path):
    install_amd(monkeypatch, tmp_path, [XTX])
    with pytest.raises(NoDevice, match="this machine has cuda:0, cpu"):
        DeviceMonitor(["cuda:3"])


def test_without_the_kernels_files_there_is_no_gpu(monkeypatch, tmp_path):
    install_amd(monkeypatch, tmp_path, [XTX])
    monkeypatch.setattr(amd_module, "SYSFS", Path("/nowhere"))
    assert gpus() == []
    assert cuda_status().startswith("No AMD GPU was found that this PyTorch build can use")
