"""Reads AMD GPUs' names, memory, load and temperature from files of Linux's amdgpu driver.

The files are described in the kernel's documentation, "GPU Power/Thermal Controls and Monitoring"
and "Misc AMDGPU driver information", and in ROCm's libhsakmt (`topology.c`). AMD's library amdsmi
is not used because it adds little, and PyTorch's source warns against loading a second copy next to
the bundled one (ROCm/amdsmi, issue 72).

HIP numbers GPUs as the driver numbers its compute nodes. Tandem has not run on an AMD GPU yet.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from engine.errors import DeviceError, Sentence
from engine.hardware.devices.types import DeviceSnapshot, Memory

SYSFS = Path("/sys")

KFD = Path("/dev/kfd")
"""Device file of the compute driver, which a process must open to use any GPU."""

NAME_FILES = (
    Path("/usr/share/libdrm/amdgpu.ids"), Path("/opt/amdgpu/share/libdrm/amdgpu.ids"),
)  # fmt: skip
"""libdrm's tables of product names by PCI device and revision."""


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """An AMD GPU.

    Attributes:
        uuid: "GPU-" and 16 digits, as in ROCm; "" for cards without a serial number.
        pci_bus: PCI bus id, such as "00000000:03:00.0".
        kfd_id: id in the compute driver.
    """

    name: str
    arch: str
    uuid: str
    pci_bus: str
    kfd_id: int
    folder: Path


def amd_gpus() -> list[AmdGpu]:
    """Return the GPUs that this process may use, in HIP's order; an empty list except on Linux."""
    nodes = SYSFS / "class/kfd/kfd/topology/nodes"
    try:
        numbers = sorted(int(node.name) for node in nodes.iterdir() if node.name.isdigit())
    except OSError:
        return []
    found = (_gpu_of(nodes / str(number)) for number in numbers)
    return [gpu for gpu in found if gpu is not None]


def amd_driver() -> str:
    """Return the version of the amdgpu driver, or of the kernel that contains it."""
    return _text(SYSFS / "module/amdgpu/version") or f"Linux {platform.release()}"


def access_problem() -> str:
    """Return why this process may not compute on AMD GPUs, as a sentence; "" if it may."""
    if not KFD.exists():
        return Sentence(
            "The amdgpu driver does not provide {path}, which is needed to compute on AMD GPUs.",
            path=str(KFD),
        )
    if not os.access(KFD, os.R_OK | os.W_OK):
        return Sentence(
            "This user is not allowed to open {path}; add the user to the render and video groups.",
            path=str(KFD),
        )
    return ""


def amd_memory(gpu: AmdGpu) -> Memory:
    """Return a GPU's memory; for an APU, the part reserved for graphics.

    Raises:
        DeviceError: the driver does not report it.
    """
    total, used = (_number(gpu.folder / f"mem_info_vram_{kind}") for kind in ("total", "used"))
    if total is None or used is None:
        raise DeviceError("The amdgpu driver does not report the GPU's memory.")
    return Memory(total, used, max(0, total - used))


def read_amd(device: str, gpu: AmdGpu, own: Collection[int] = ()) -> DeviceSnapshot:
    """Return the current state of `gpu` under the id `device`; never raise.

    Args:
        own: process ids of this program.
    """
    now = time.monotonic()
    try:
        memory = amd_memory(gpu)
    except DeviceError as error:
        return DeviceSnapshot(device, now, 0, 0, 0, problem=error.message)
    temperature_mc, clock_hz = _sensor(gpu, "temp1_input"), _sensor(gpu, "freq1_input")
    power_uw = _sensor(gpu, "power1_average")
    if power_uw is None:  # a card has one file or the other
        power_uw = _sensor(gpu, "power1_input")
    limit_uw, memory_clock_hz = _sensor(gpu, "power1_cap"), _sensor(gpu, "freq2_input")
    load = _number(gpu.folder / "gpu_busy_percent")
    return DeviceSnapshot(
        device, now, memory.used_bytes, memory.total_bytes, memory.free_bytes,
        load_percent=None if load is None else float(load),
        temperature_c=None if temperature_mc is None else temperature_mc / 1000,
        power_w=None if power_uw is None else power_uw / 1e6,
        own_bytes=_number(SYSFS / f"class/kfd/kfd/proc/{os.getpid()}/vram_{gpu.kfd_id}"),
        clock_mhz=None if clock_hz is None else clock_hz // 1_000_000,
        power_limit_w=None if limit_uw is None else limit_uw / 1e6,
        memory_clock_mhz=None if memory_clock_hz is None else memory_clock_hz // 1_000_000,
        others_bytes=_others_bytes(gpu, own),
    )  # fmt: skip


def _others_bytes(gpu: AmdGpu, own: Collection[int]) -> int | None:
    # the kernel lists all compute processes, but shows other users' numbers only to root
    folder = SYSFS / "class/kfd/kfd/proc"
    try:
        pids = [entry.name for entry in folder.iterdir() if entry.name.isdigit()]
    except OSError:
        return None
    others = [_number(folder / pid / f"vram_{gpu.kfd_id}") for pid in pids if int(pid) not in own]
    known = [n_bytes for n_bytes in others if n_bytes is not None]
    return sum(known) if len(known) == len(others) else None


def _gpu_of(node: Path) -> AmdGpu | None:
    # None for a CPU, or if this process may not read the node
    properties = dict(
        line.split(maxsplit=1) for line in _text(node / "properties").splitlines() if " " in line
    )

    def number(name: str) -> int:
        value = properties.get(name, "0")
        return int(value) if value.isdigit() else 0

    version = number("gfx_target_version")
    if not version or not number("simd_count"):
        return None
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    place = number("location_id")
    address = f"{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
    folder = SYSFS / f"bus/pci/devices/{number('domain'):04x}:{address}"
    arch, own = f"gfx{major}{minor:x}{step:x}", number("unique_id")
    return AmdGpu(
        name=_name(folder) or f"AMD GPU {arch}", arch=arch, uuid=f"GPU-{own:016x}" if own else "",
        pci_bus=f"{number('domain'):08x}:{address}".upper(), kfd_id=_number(node / "gpu_id") or 0,
        folder=folder,
    )  # fmt: skip


def _name(folder: Path) -> str:
    if name := _text(folder / "product_name"):
        return name
    wanted = [_text(folder / part).removeprefix("0x").lower() for part in ("device", "revision")]
    for file in NAME_FILES:
        for line in _text(file).splitlines():
            device, _, rest = line.partition(",")
            revision, _, name = rest.partition(",")
            if [device.strip().lower(), revision.strip().lower()] == wanted:
                return name.strip()
    return ""


def _sensor(gpu: AmdGpu, name: str) -> int | None:
    return next((_number(path) for path in sorted(gpu.folder.glob(f"hwmon/hwmon*/{name}"))), None)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
