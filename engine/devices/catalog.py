"""Which devices are here, under the ids that torch gives them, and whether torch can use them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from engine.devices.host import cpu_info
from engine.devices.nvml import Gpu, Memory, Nvml
from engine.devices.torch_build import find_torch_build
from engine.devices.types import DeviceInfo
from engine.errors import DeviceError

__all__ = ["cuda_status", "list_devices", "numbered_gpus", "visible"]

log = logging.getLogger(__name__)

NO_MEMORY = Memory(0, 0, 0)


def list_devices() -> list[DeviceInfo]:
    """All devices: GPUs by number, the CPU last. GPUs hidden by CUDA_VISIBLE_DEVICES are left out.

    The numbers are those of torch: PCI order, or the order of CUDA_VISIBLE_DEVICES where it is set.
    """
    return [*_list_gpus(), cpu_info()]


def cuda_status() -> str:
    """Why no GPU can be used, as a sentence; "" when one can."""
    try:
        with Nvml() as nvml:
            n_gpus, gpus = len(nvml.gpus()), list(numbered_gpus(nvml).values())
            build_problem = _build_problem(nvml.cuda_major())
    except DeviceError as error:
        return str(error)
    if not n_gpus:
        return "An NVIDIA driver is here but no GPU; Tandem runs on the CPU."
    if not gpus:
        return (
            f"CUDA_VISIBLE_DEVICES is '{os.environ.get('CUDA_VISIBLE_DEVICES', '')}' and hides "
            "all GPUs; Tandem runs on the CPU."
        )
    all_fail = all(gpu.problem for gpu in gpus)
    return build_problem or (gpus[0].problem if all_fail else "")


def numbered_gpus(nvml: Nvml) -> dict[str, Gpu]:
    """The GPUs that CUDA shows to this process, by id.

    Raises:
        DeviceError: the driver does not answer.
    """
    gpus = nvml.gpus()
    order = visible([gpu.uuid for gpu in gpus], os.environ.get("CUDA_VISIBLE_DEVICES"))
    return {f"cuda:{number}": gpus[index] for number, index in enumerate(order)}


def visible(uuids: Sequence[str], value: str | None) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows, in its order, as indices into `uuids`.

    CUDA's rules: entries are numbers or beginnings of UUIDs; the first that fits no GPU, or more
    than one, ends the list; naming a GPU twice hides all.

    Args:
        uuids: of all GPUs in PCI order.
        value: of the variable; None where it is not set.
    """
    if value is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for entry in value.split(","):
        index = _find_gpu(uuids, entry.strip())
        if index is None:
            break
        if index in shown:
            return []
        shown.append(index)
    return shown


def _find_gpu(uuids: Sequence[str], entry: str) -> int | None:
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.startswith("GPU-"):
        return None
    found = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _list_gpus() -> list[DeviceInfo]:
    try:
        with Nvml() as nvml:
            build_problem, driver = _build_problem(nvml.cuda_major()), nvml.driver_version()
            return [
                _describe(nvml, device, gpu, driver, build_problem)
                for device, gpu in numbered_gpus(nvml).items()
            ]
    except DeviceError as error:
        log.info("no GPU is listed: %s", error)
        return []


def _describe(nvml: Nvml, device: str, gpu: Gpu, driver: str, build_problem: str) -> DeviceInfo:
    try:
        memory, problem = nvml.memory(gpu), build_problem
    except DeviceError as error:
        memory, problem = NO_MEMORY, str(error)
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
    """Why the installed PyTorch cannot use the driver, or ""."""
    build = find_torch_build()
    if not build.is_installed:
        return "An NVIDIA driver is here but PyTorch is not installed; install torch to run models."
    if not build.cuda:
        return (
            "An NVIDIA driver is here but this PyTorch build has no CUDA support; "
            "install a CUDA build of torch to use the GPUs."
        )
    # a driver runs every CUDA of its own major version, also a newer one
    if driver_cuda and build.cuda_major and driver_cuda < build.cuda_major:
        return (
            f"The NVIDIA driver runs CUDA {driver_cuda} but this PyTorch build needs CUDA "
            f"{build.cuda}; update the driver."
        )
    return ""
