"""torch's devices and their memory."""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import psutil
import torch

import engine.hardware.environment  # noqa: F401 - sets what torch reads when it is imported
from engine.errors import NoDevice, Sentence
from engine.hardware.cuda_api import OUT_OF_MEMORY, CudaCallError, is_overhead, overhead_bytes
from engine.hardware.devices.catalog import cuda_status, list_devices, require_devices
from engine.hardware.devices.monitor import DeviceMonitor
from engine.hardware.devices.torch_builds import (
    amd_command,
    choose_wheel,
    find_torch_build,
    runs_on,
)
from engine.hardware.devices.types import DeviceInfo
from engine.hardware.devices.visibility import ORDER, PCI_ORDER, stopped_gpus
from engine.hardware.faults import explain_faults
from engine.util.programs import tie_to_parent

HIP_UUID = re.compile(r"[0-9a-f]{16}")


def uuid_of(properties: Any) -> str:
    """Return the UUID that the driver's own tools show, such as "GPU-…"; "" if unknown.

    HIP returns 16 characters instead of 16 bytes. MIG instances have a different kind of UUID.
    """
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return ""
    if not torch.version.hip:
        return f"GPU-{uuid}"
    text = bytes(uuid.bytes).decode("ascii", errors="replace").lower()
    return f"GPU-{text}" if HIP_UUID.fullmatch(text) else ""


def pci_bus_of(properties: Any) -> str:
    """Return the PCI bus id, such as "00000000:01:00.0"; "" if unknown."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, device = (getattr(properties, name, None) for name in names)
    if domain is None or bus is None or device is None:
        return ""
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def arch_of(properties: Any) -> str:
    """Return a GPU's compute capability, such as "8.9", or AMD's name for it, such as "gfx1100"."""
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"{properties.major}.{properties.minor}"


def has_code_for(arch: str) -> bool:
    """Return whether the installed torch has code for GPUs of this kind; see `arch_of`.

    Code for the same major version counts; so does PTX, which the driver compiles for newer GPUs.
    """
    known = [name.partition(":")[0] for name in torch.cuda.get_arch_list()]
    if not known:
        return True
    if torch.version.hip:
        return any(name == arch or "generic" in name for name in known)
    for name in known:
        kind, _, number = name.partition("_")
        digits, is_exact = number.rstrip("af"), number.endswith("a")  # "a" is for one GPU only
        if not digits.isdigit():
            continue
        have = f"{digits[:-1]}.{digits[-1]}"
        is_ptx = kind == "compute" and digits == number and float(have) <= float(arch)
        if is_ptx or have == arch or (not is_exact and runs_on(have, arch)):
            return True
    return False


def why_none() -> str:
    """Return why torch finds no GPU, as the end of a sentence; "" if it finds some."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    return ""


def list_gpus() -> dict[str, Any]:
    """Return the GPUs that torch finds, as arguments for `TorchGpu`, or why it finds none."""
    problem = why_none()
    count = 0 if problem else torch.cuda.device_count()
    return {"gpus": [_describe(number) for number in range(count)], "problem": problem}


def _describe(number: int) -> dict[str, Any]:
    found: dict[str, Any] = {"name": "GPU", "total_bytes": 0, "free_bytes": 0}
    try:
        properties = torch.cuda.get_device_properties(number)
        kind = "arch" if torch.version.hip else "compute_capability"
        found |= {
            "name": properties.name, "total_bytes": properties.total_memory,
            "uuid": uuid_of(properties), "pci_bus": pci_bus_of(properties),
            kind: arch_of(properties),
        }  # fmt: skip
        found["free_bytes"] = torch.cuda.mem_get_info(number)[0]
    except RuntimeError as error:
        found["problem"] = Sentence(
            "PyTorch cannot open the GPU ({problem}).", problem=_first_line(error)
        )
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def main() -> None:
    """Print the list on the last line of the output."""
    tie_to_parent()  # a hanging driver would keep it from noticing that the parent has exited
    with contextlib.suppress(BrokenPipeError):
        print("\n" + json.dumps(list_gpus()), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()


RANK_PRIORITY = -1
"""Priority of the ranks' CUDA streams; other streams have the lower priority 0."""

_hanging: set[torch.device] = set()
"""GPUs with hanging work; waiting for them would hang as well."""

OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip


def torch_device(name: str) -> torch.device:
    """Return the torch device for "cpu" or "cuda:N", which names AMD's GPUs as well.

    Raises:
        NoDevice: it does not exist on this machine, torch uses its number for another GPU, or the
            installed torch has no code for it.
        DeviceStopped: it has stopped working in this process.
    """
    if name == "cpu":
        return torch.device("cpu")
    devices = list_devices()
    require_devices([name], devices)
    if not torch.cuda.is_available():
        problem = Sentence("PyTorch sees no GPU: {problem}", problem=why_none())
        raise NoDevice(name, cuda_status() or problem)
    device = torch.device(name)
    with explain_faults([device]):
        properties = torch.cuda.get_device_properties(name)
        _check_number(name, properties, devices)
        _check_code(name, properties)
    return device


def _check_number(name: str, properties: Any, devices: Sequence[DeviceInfo]) -> None:
    # Numbers differ if CUDA was started before the order of GPUs was set, or with other variables.
    # The UUID decides or, if torch reports none that the driver lists, the place on the PCI bus.
    uuid, bus = uuid_of(properties), pci_bus_of(properties)
    by_uuid = [d.id for d in devices if uuid and d.uuid == uuid]
    matching = by_uuid or [d.id for d in devices if bus and d.pci_bus == bus]
    if matching and matching[0] != name:
        raise NoDevice(
            name,
            Sentence(
                "HIP was started with GPUs in another order, in which {name} is the driver's"
                " {other}; restart with the same variables as now"
                if torch.version.hip
                else "CUDA was started with GPUs in another order, in which {name} is the driver's"
                " {other}; restart with {order}",
                name=name, other=matching[0], order=f"{ORDER}={PCI_ORDER}",
            ),
        )  # fmt: skip


def _check_code(name: str, properties: Any) -> None:
    if not torch.cuda.get_arch_list() or has_code_for(arch_of(properties)):
        return
    arch = arch_of(properties)
    if torch.version.hip:
        remedy = amd_command(arch, from_amd=True)
        reason = Sentence("this PyTorch build has no code for {arch}", arch=arch)
    else:
        wheel = choose_wheel((arch,), find_torch_build().cuda_major)
        remedy = wheel.command if wheel else ""
        reason = Sentence("this PyTorch build has no code for compute capability {arch}", arch=arch)
    raise NoDevice(name, reason, remedy)


def stream_of_rank(device: torch.device) -> torch.cuda.Stream:
    """Return a CUDA stream for a rank's kernels, which is never used for copies.

    Torch hands out 32 streams per priority and GPU in turn. Copies, for which streams are created
    all the time, use another priority and therefore never get the same stream.
    """
    make: Callable[[torch.device, int], torch.cuda.Stream] = torch.cuda.Stream
    return make(device, RANK_PRIORITY)


def torch_devices(names: Sequence[str], holders: Collection[int]) -> list[torch.device]:
    """Return the torch device of each rank; a rank without weights is kept off its GPU.

    Any use of a GPU, even reading its free memory, takes hundreds of MB on it.

    Raises:
        NoDevice: a device does not exist on this machine.
    """
    idle = [name for rank, name in enumerate(names) if rank not in holders and name != "cpu"]
    if idle:
        require_devices(idle)
    return [
        torch_device(name) if rank in holders else torch.device("cpu")
        for rank, name in enumerate(names)
    ]


def kind_of(device: torch.device) -> str:
    """Return the kind of a device; equal kinds compute the same bits from the same input."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def free_bytes(devices: Iterable[str]) -> Mapping[str, int]:
    """Return the free bytes of each device, including torch's reserve.

    CUDA's current overhead counts as free, because plans already include all of it.
    """
    free: dict[str, int] = {}
    for name in devices:
        if name == "cpu":
            free[name] = psutil.virtual_memory().available
        else:
            device = torch.device(name)
            idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            left = torch.cuda.mem_get_info(device)[0]
            taken = taken_overhead(device)
            free[name] = left + idle + (overhead_bytes(name) if taken is None else taken)
    return free


def taken_overhead(device: torch.device) -> int | None:
    """Return the bytes that CUDA has taken on a GPU for this process; None if unknown.

    What the driver counts for this process minus torch's segments: contexts, kernels, libraries.
    """
    try:
        with DeviceMonitor([str(device)]) as monitor:
            own = monitor.snapshot()[0].own_bytes
    except NoDevice:
        return None
    taken = -1 if own is None else own - int(torch.cuda.memory_reserved(device))
    return taken if is_overhead(taken) else None


def mark_hanging(devices: Iterable[torch.device]) -> None:
    """Record GPUs with hanging work, so that nothing waits for them."""
    _hanging.update(device for device in devices if device.type == "cuda")


def release_cached_memory(devices: Sequence[torch.device]) -> None:
    """Return freed memory to the system, without touching other GPUs.

    Torch frees the reserves on all of this process's GPUs together and waits for their work. If a
    GPU hangs or has stopped working, memory therefore stays in torch's reserve for the next model.
    """
    for device in set(devices):
        if device.type != "cuda":
            trim_heap()
        elif not _hanging and not stopped_gpus():
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


def trim_heap() -> None:
    """Return to the system the freed heap memory that the C library keeps."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    # only in GNU's C library; others keep less
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if found is None:
        return None
    found.argtypes = [ctypes.c_size_t]
    trim: Callable[[int], int] = found
    return trim


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed; torch and drivers report that in several ways."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, CudaCallError):
        return error.error_code == OUT_OF_MEMORY
    return isinstance(error, RuntimeError) and any(t in str(error) for t in OUT_OF_MEMORY_TEXTS)
