"""Files of Linux's amdgpu driver for GPUs that are not here."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.hardware.devices.torch_builds import TorchBuild
from tests.helpers.fake_nvml import GIB, install, no_gpus, use_build

HIP = TorchBuild(is_installed=True, cuda="", hip="7.2.53211", version="2.13.0+rocm7.2")
IDS = "1.0.0\n744C,\tC8,\tAMD Radeon RX 7900 XTX\n7550,\tC0,\tAMD Radeon RX 9070 XT\n"


@dataclass
class FakeAmd:
    """An AMD GPU: what its files say."""

    device: str
    revision: str
    version: int
    unique_id: int
    bus: int
    gib: int
    sensors: tuple[tuple[str, int], ...] = (
        ("temp1_input", 54000), ("power1_average", 203_500_000), ("freq1_input", 2_410_000_000),
        ("freq2_input", 1_249_000_000), ("power1_cap", 339_000_000),
    )  # fmt: skip


XTX = FakeAmd("0x744c", "0xc8", 110000, 0x4457F6C1C0C4F3A8, bus=0x83, gib=24)
RX9070 = FakeAmd(
    "0x7550", "0xc0", 120001, 0x00DECAF0C0FFEE00, bus=0x03, gib=16,
    sensors=(("temp1_input", 41000), ("power1_input", 31_000_000)),
)  # fmt: skip
BUILT_IN = FakeAmd("0x164e", "0xc1", 100306, 0, bus=0x1A, gib=1, sensors=())


def install_amd(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpus: list[FakeAmd], build: TorchBuild = HIP
) -> Path:
    """Install GPUs in the order of the compute driver, without any of NVIDIA's; return /sys."""
    install(no_gpus(), monkeypatch)
    return add_amd(monkeypatch, folder, gpus, build)


def add_amd(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpus: list[FakeAmd], build: TorchBuild
) -> Path:
    """Install GPUs beside what is installed; return the folder that stands for /sys."""
    use_build(monkeypatch, build)
    sysfs, kfd, ids = folder / "sys", folder / "kfd", folder / "amdgpu.ids"
    kfd.touch()
    ids.write_text(IDS)
    monkeypatch.setattr("engine.hardware.devices.amd.SYSFS", sysfs)
    monkeypatch.setattr("engine.hardware.devices.amd.KFD", kfd)
    monkeypatch.setattr("engine.hardware.devices.amd.NAME_FILES", (ids,))
    write(sysfs / "module/amdgpu/version", "6.12.12")
    nodes = sysfs / "class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\n")
    for number, gpu in enumerate(gpus, 1):
        write_gpu(sysfs, nodes / str(number), gpu)
    return sysfs


def write_gpu(sysfs: Path, node: Path, gpu: FakeAmd) -> None:
    write(
        node / "properties",
        f"cpu_cores_count 0\nsimd_count 192\nlocation_id {gpu.bus << 8}\ndomain 0\n"
        f"gfx_target_version {gpu.version}\nunique_id {gpu.unique_id}\n",
    )
    write(node / "gpu_id", str(1000 + gpu.bus))
    files = folder_of(sysfs, gpu)
    write(files / "device", gpu.device)
    write(files / "revision", gpu.revision)
    write(files / "mem_info_vram_total", str(gpu.gib * GIB))
    write(files / "mem_info_vram_used", str(GIB // 2))
    write(files / "gpu_busy_percent", "37")
    for name, value in gpu.sensors:
        write(files / "hwmon/hwmon4" / name, str(value))


def folder_of(sysfs: Path, gpu: FakeAmd) -> Path:
    """Return the folder with the driver's files on a GPU."""
    return sysfs / f"bus/pci/devices/0000:{gpu.bus:02x}:00.0"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
