"""Lists the devices of this machine under torch's ids, and says whether torch can use them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from engine.devices.host import cpu_info
from engine.devices.nvml import Gpu, Memory, Nvml
from engine.devices.stopped import stopped_gpus
from engine.devices.torch_build import find_torch_build
from engine.devices.types import DeviceInfo
from engine.devices.visibility import VISIBLE, order_problem, visible, visible_problem
from engine.errors import DeviceError, DeviceStopped

__all__ = ["cuda_status", "hidden_gpus", "list_devices", "numbered_gpus"]

log = logging.getLogger(__name__)

NO_MEMORY = Memory(0, 0, 0)


def list_devices() -> list[DeviceInfo]:
    """Return all devices: GPUs by number, then the CPU; without GPUs hidden by the environment.

    The numbers are torch's: PCI order, or the order of CUDA_VISIBLE_DEVICES where that is set.
    """
    return [*_list_gpus(), cpu_info()]


def cuda_status() -> str:
    """Return why no GPU can be used, as a sentence; "" if one can."""
    try:
        with Nvml() as nvml:
            all_gpus = nvml.gpus()
            problem = order_problem(len(all_gpus)) or _build_problem(nvml.cuda_major())
    except DeviceError as error:
        return str(error)
    if not all_gpus:
        return "An NVIDIA driver is here but no GPU; Tandem runs on the CPU."
    gpus = list(_numbered(all_gpus).values())
    if not gpus:
        hidden = f"{VISIBLE} is '{os.environ.get(VISIBLE, '')}' and hides all GPUs."
        return f"{_hidden(all_gpus) or hidden} Tandem runs on the CPU."
    all_fail = all(gpu.problem for gpu in gpus)
    return problem or (gpus[0].problem if all_fail else "")


def hidden_gpus() -> str:
    """Return what is wrong with CUDA_VISIBLE_DEVICES, as a sentence; "" if nothing is."""
    try:
        with Nvml() as nvml:
            return _hidden(nvml.gpus())
    except DeviceError:
        return ""


def _hidden(gpus: Sequence[Gpu]) -> str:
    return visible_problem([gpu.uuid for gpu in gpus], os.environ.get(VISIBLE))


def numbered_gpus(nvml: Nvml) -> dict[str, Gpu]:
    """Return the GPUs that CUDA shows to this process, by id.

    Raises:
        DeviceError: the driver does not answer.
    """
    return _numbered(nvml.gpus())


def _numbered(gpus: Sequence[Gpu]) -> dict[str, Gpu]:
    """Return by id those of `gpus`, all GPUs in PCI order, that CUDA shows."""
    order = visible([gpu.uuid for gpu in gpus], os.environ.get(VISIBLE))
    return {f"cuda:{number}": gpus[index] for number, index in enumerate(order)}


def _list_gpus() -> list[DeviceInfo]:
    try:
        with Nvml() as nvml:
            gpus, driver = nvml.gpus(), nvml.driver_version()
            problem = order_problem(len(gpus)) or _build_problem(nvml.cuda_major())
            return [
                _describe(nvml, device, gpu, driver, problem)
                for device, gpu in _numbered(gpus).items()
            ]
    except DeviceError as error:
        log.info("no GPU is listed: %s", error)
        return []


def _describe(nvml: Nvml, device: str, gpu: Gpu, driver: str, problem: str) -> DeviceInfo:
    try:
        memory = nvml.memory(gpu)
    except DeviceError as error:
        memory, problem = NO_MEMORY, str(error)
    if device in stopped_gpus():
        stopped = DeviceStopped(device, stopped_gpus()[device])
        problem = f"{stopped} {stopped.hint}"
    return DeviceInfo(
        id=device,
        kind="cuda",
        name=gpu.name,
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        uuid=gpu.uuid,
        pci_bus=gpu.pci_bus,
        compute_capability=gpu.compute_capability,
        driver=driver,
        usable=not problem,
        reason=problem,
    )


def _build_problem(driver_cuda: int | None) -> str:
    """Return why the installed PyTorch cannot use the driver, or ""."""
    build = find_torch_build()
    if not build.is_installed:
        return "An NVIDIA driver is here but PyTorch is not installed; install torch to run models."
    if not build.cuda:
        return (
            "An NVIDIA driver is here but this PyTorch build has no CUDA support; "
            "install a CUDA build of torch to use the GPUs."
        )
    # a driver runs every CUDA of its major version, even a newer one
    if driver_cuda and build.cuda_major and driver_cuda < build.cuda_major:
        return (
            f"The NVIDIA driver runs CUDA {driver_cuda} but this PyTorch build needs CUDA "
            f"{build.cuda}; update the driver."
        )
    return ""
