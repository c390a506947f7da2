"""Lists the devices of this machine under torch's ids, and parses device names.

The drivers list GPUs without delay: NVIDIA's through NVML, AMD's through files in /sys. If neither
does, torch lists them (`other_gpus`). GPUs from the vendor that torch was built for come first,
with torch's numbers; others follow, with the reason why torch cannot use them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from engine.errors import DeviceError, DeviceStopped, NoDevice, Sentence, listed, paragraph
from engine.hardware.devices.amd import AmdGpu, access_problem, amd_driver, amd_gpus, amd_memory
from engine.hardware.devices.host import cpu_info
from engine.hardware.devices.nvml import NO_DRIVER, Gpu, Nvml
from engine.hardware.devices.other_gpus import Adapter, GpuMaker, TorchGpu, ask_torch, find_adapters
from engine.hardware.devices.torch_builds import (
    Advice,
    TorchBuild,
    advise_amd,
    advise_nvidia,
    choose_wheel,
    find_torch_build,
)
from engine.hardware.devices.types import DeviceInfo, Memory, far_id
from engine.hardware.devices.visibility import (
    VISIBLE,
    hiding_variables,
    hip_visible,
    hip_visible_problem,
    order_problem,
    require_running,
    stopped_gpus,
    visible,
    visible_problem,
)

log = logging.getLogger(__name__)

Source = Gpu | AmdGpu | TorchGpu | Adapter
"""A GPU as described by its source."""

NO_MEMORY = Memory(0, 0, 0)

MIN_BYTES = 4 << 30
"""Memory that a GPU must have to be listed if torch was built for another vendor; integrated GPUs
usually have less."""

UNPROVEN_AMD = Sentence("Tandem has not been run on AMD GPUs yet.")

ADD_TO_GROUPS = "sudo usermod -aG render,video $USER"
"""Command that gives the user access to AMD GPUs after the next login."""


def list_devices(*, wait: bool = True) -> list[DeviceInfo]:
    """Return all devices: GPUs by number (except those that variables hide), then the CPU.

    The numbers are torch's: in PCI order for NVIDIA, in the driver's order for AMD, or in the order
    of the environment variables that select some of them.

    Args:
        wait: whether to wait a few seconds for torch if only torch can list the GPUs. Otherwise
            they are missing until torch has answered.
    """
    build = find_torch_build()
    with open_nvml() as nvml:
        nvidia = nvidia_gpus(nvml)
        gpus = find_gpus(nvidia, build, wait=wait)
        found = [_noted(_describe(nvml, nvidia, build, *item)) for item in gpus.items()]
    return [*found, cpu_info()]


def find_gpus(nvidia: Sequence[Gpu], build: TorchBuild, *, wait: bool) -> dict[str, Source]:
    """Return the GPUs of this machine by id; see `list_devices`."""
    own: list[Source]
    others: list[Source]
    if build.hip:
        amd = amd_gpus()
        own = [amd[index] for index in hip_visible([gpu.uuid for gpu in amd])]
        is_known, others = bool(amd), [*nvidia]
    else:
        own = [nvidia[index] for index in _shown(nvidia)]
        is_known, others = bool(nvidia), large_amd_gpus()
    if not is_known:
        own = [*(ask_torch(build, wait=wait) or ())]
    return {f"cuda:{number}": gpu for number, gpu in enumerate([*own, *others])}


def cuda_status() -> str:
    """Return why no GPU can be used, as a sentence; "" if one can."""
    gpus = [info for info in list_devices() if info.kind == "cuda"]
    if any(info.usable for info in gpus):
        return ""
    return gpus[0].reason if gpus else _why_no_gpu()


def hidden_gpus() -> str:
    """Return which GPUs environment variables hide or fail to select; "" if all are shown."""
    is_hip = bool(find_torch_build().hip)
    with open_nvml() as nvml:
        gpus: Sequence[Gpu | AmdGpu] = amd_gpus() if is_hip else nvidia_gpus(nvml)
    shown = hip_visible([gpu.uuid for gpu in gpus]) if is_hip else _shown(gpus)
    problem = _visible_problem(gpus, is_hip=is_hip)
    hidden = [gpu.name for index, gpu in enumerate(gpus) if index not in shown]
    if problem or not hidden or not shown:  # if none is shown, `cuda_status` says so
        return problem
    return Sentence(
        "{variables} and hides {names}.",
        variables=hiding_variables(on_hip=is_hip),
        names=", ".join(hidden),
    )


def numbered_gpus(nvml: Nvml) -> dict[str, Gpu]:
    """Return the NVIDIA GPUs that torch shows to this process, by id.

    Raises:
        DeviceError: the driver does not answer.
    """
    if find_torch_build().hip:
        return {}
    gpus = nvml.gpus()
    return {f"cuda:{number}": gpus[index] for number, index in enumerate(_shown(gpus))}


@contextmanager
def open_nvml() -> Iterator[Nvml | None]:
    """Open a session with NVIDIA's driver; yield None if there is no driver."""
    try:
        nvml = Nvml()
    except DeviceError as error:
        log.info("NVML lists no GPU: %s", error)
        yield None
        return
    with nvml:
        yield nvml


def nvidia_gpus(nvml: Nvml | None) -> list[Gpu]:
    """Return all NVIDIA GPUs in PCI order; an empty list if the driver does not answer."""
    if nvml is None:
        return []
    try:
        return nvml.gpus()
    except DeviceError as error:
        log.info("NVML lists no GPU: %s", error)
        return []


def _shown(gpus: Sequence[Gpu | AmdGpu]) -> list[int]:
    return visible([gpu.uuid for gpu in gpus], os.environ.get(VISIBLE))


def _visible_problem(gpus: Sequence[Gpu | AmdGpu], *, is_hip: bool) -> str:
    uuids = [gpu.uuid for gpu in gpus]
    if not uuids:
        return ""
    return hip_visible_problem(uuids) if is_hip else visible_problem(uuids, os.environ.get(VISIBLE))


def large_amd_gpus() -> list[Source]:
    """Return the AMD GPUs that models could use with a suitable build of torch."""
    large: list[Source] = []
    for gpu in amd_gpus():
        try:
            if amd_memory(gpu).total_bytes >= MIN_BYTES:
                large.append(gpu)
        except DeviceError:
            continue
    return large or [
        one for one in find_adapters() if one.maker == "amd" and one.total_bytes >= MIN_BYTES
    ]


def _noted(info: DeviceInfo) -> DeviceInfo:
    if info.id not in stopped_gpus():
        return info
    stopped = DeviceStopped(info.id, stopped_gpus()[info.id])
    reason = paragraph(stopped.message, stopped.hint)
    return replace(info, usable=False, reason=reason, note="", remedy="")


def _describe(
    nvml: Nvml | None, nvidia: Sequence[Gpu], build: TorchBuild, device: str, gpu: Source
) -> DeviceInfo:
    if isinstance(gpu, Gpu):
        assert nvml is not None
        return _describe_nvidia(nvml, nvidia, build, device, gpu)
    if isinstance(gpu, AmdGpu):
        return _describe_amd(build, device, gpu)
    if isinstance(gpu, Adapter):
        advice = advise_amd(build)
        return DeviceInfo(
            id=device, kind="cuda", name=gpu.name, total_bytes=gpu.total_bytes,
            free_bytes=gpu.total_bytes, usable=False, reason=advice.reason, remedy=advice.remedy,
        )  # fmt: skip
    return DeviceInfo(
        id=device, kind="cuda", name=gpu.name, total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes, uuid=gpu.uuid, pci_bus=gpu.pci_bus,
        compute_capability=gpu.compute_capability, usable=not gpu.problem, reason=gpu.problem,
        arch=gpu.arch, note=UNPROVEN_AMD if build.hip else "",
    )  # fmt: skip


def _describe_nvidia(
    nvml: Nvml, nvidia: Sequence[Gpu], build: TorchBuild, device: str, gpu: Gpu
) -> DeviceInfo:
    others = [other.compute_capability for other in nvidia]
    advice = advise_nvidia(build, gpu.compute_capability, nvml.cuda_major(), others)
    if not build.hip and (order := order_problem(len(nvidia))):
        advice = Advice(order)
    info = _with_driver(device, gpu, nvml.driver_version(), advice, lambda: nvml.memory(gpu))
    return replace(info, compute_capability=gpu.compute_capability)


def _describe_amd(build: TorchBuild, device: str, gpu: AmdGpu) -> DeviceInfo:
    advice = advise_amd(build, gpu.arch)
    if not advice.reason and (problem := access_problem()):
        advice = Advice(problem, ADD_TO_GROUPS if "groups" in problem else "")
    info = _with_driver(device, gpu, amd_driver(), advice, lambda: amd_memory(gpu))
    return replace(info, arch=gpu.arch, note=UNPROVEN_AMD if info.usable else "")


def _with_driver(
    device: str, gpu: Gpu | AmdGpu, driver: str, advice: Advice, read_memory: Callable[[], Memory]
) -> DeviceInfo:
    # not usable if its memory cannot be read
    try:
        memory = read_memory()
    except DeviceError as error:
        memory, advice = NO_MEMORY, Advice(error.message)
    return DeviceInfo(
        id=device, kind="cuda", name=gpu.name, total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes, uuid=gpu.uuid, pci_bus=gpu.pci_bus, driver=driver,
        usable=not advice.reason, reason=advice.reason, remedy=advice.remedy,
    )  # fmt: skip


def _why_no_gpu() -> str:
    is_hip = bool(find_torch_build().hip)
    makers = {adapter.maker for adapter in find_adapters()}
    try:
        with Nvml() as nvml:
            gpus: Sequence[Gpu | AmdGpu] = amd_gpus() if is_hip else nvml.gpus()
            problem: str = Sentence("There is an NVIDIA driver but no GPU; Tandem runs on the CPU.")
    except DeviceError as error:
        gpus, problem = amd_gpus() if is_hip else [], error.message
    if gpus:
        hidden = Sentence(
            "{variables} and hides all GPUs.", variables=hiding_variables(on_hip=is_hip)
        )
        cause = _visible_problem(gpus, is_hip=is_hip) or hidden
        return paragraph(cause, Sentence("Tandem runs on the CPU."))
    if is_hip:
        return Sentence(
            "No AMD GPU was found that this PyTorch build can use; Tandem runs on the CPU."
        )
    if problem == NO_DRIVER and makers:
        return _without_driver(makers)
    return problem


def _without_driver(makers: Collection[GpuMaker]) -> Sentence:
    if "nvidia" in makers:
        return Sentence(
            "There is an NVIDIA GPU but no driver for it; install NVIDIA's driver, or give this"
            " container access to the GPU. Tandem runs on the CPU."
        )
    if "amd" in makers:
        return Sentence(
            "The AMD GPU has too little dedicated memory, or no compute driver; Tandem runs on the"
            " CPU."
        )
    return Sentence(
        "Tandem can use NVIDIA and AMD GPUs, but not {maker} GPUs; it runs on the CPU.",
        maker="Apple" if "apple" in makers else "Intel",
    )


GPU_ID = re.compile(r"(?:cuda|gpu):([0-9]+)")
UUID = re.compile(r"gpu-[0-9a-f][0-9a-f-]*")
FAR = re.compile(r"[0-9]{1,3}/(?:cpu|(?:cuda|gpu):[0-9]+)")
RANK = re.compile(r"#[0-9]+")


def parse_devices(devices: str | Sequence[str]) -> list[str]:
    """Return the device ids in a text like "cpu,cuda:0" or in a list, repetitions included.

    "gpu:N" means "cuda:N". A GPU may also be named by its UUID, "GPU-…", or by an unambiguous
    prefix of it; "1/cuda:0" is a device on another machine. Only the syntax of other names is
    checked; `require_devices` checks that they exist.

    Raises:
        NoDevice: an entry has another syntax or is a UUID that matches no GPU or several, or there
            are no entries.
    """
    entries = devices.split(",") if isinstance(devices, str) else devices
    ids = [_parse_device(entry) for entry in entries]
    if not ids:
        raise NoDevice("", Sentence("name at least one, such as cpu or cuda:0"))
    return ids


def parse_target(target: str) -> str:
    """Return the target of an override: a device id, or a rank as in "#1".

    Raises:
        NoDevice: see `parse_devices`.
    """
    name = target.strip()
    return f"#{int(name[1:])}" if RANK.fullmatch(name) else _parse_device(name)


def _parse_device(entry: str) -> str:
    name = entry.strip().lower()
    if name == "cpu":
        return name
    if name.startswith("mig-"):
        raise NoDevice(entry.strip(), Sentence("part of a GPU cannot be used; name the whole GPU"))
    if UUID.fullmatch(name):
        return _by_uuid(entry.strip())
    if FAR.fullmatch(name):
        machine, _, device = name.partition("/")
        return far_id(int(machine), _parse_device(device))
    match = GPU_ID.fullmatch(name)
    if match is None:
        problem = Sentence("write cpu, or cuda:0 for the first GPU, or a GPU's UUID")
        raise NoDevice(entry.strip(), problem)
    return f"cuda:{int(match.group(1))}"


def _by_uuid(beginning: str) -> str:
    known = list_devices()
    found = [d.id for d in known if d.uuid.lower().startswith(beginning.lower())]
    if len(found) > 1:
        problem = "the UUIDs of {names} start with this; write more of it"
        raise NoDevice(beginning, Sentence(problem, names=listed(found)))
    if not found:
        here = [Sentence("{device} with {uuid}", device=d.id, uuid=d.uuid) for d in known if d.uuid]
        raise NoDevice(beginning, _there_is(listed(here)) if here else _why_missing(["cpu"]))
    return found[0]


def require_devices(
    ids: Sequence[str], available: Sequence[DeviceInfo] | None = None
) -> list[DeviceInfo]:
    """Return the devices with these ids, in the same order, repetitions included.

    Args:
        available: all devices; None to call `list_devices`.

    Raises:
        NoDevice: a device does not exist or is not usable; the message says why.
        DeviceStopped: a device has stopped working in this process.
    """
    for device in ids:
        require_running(device)
    known = {info.id: info for info in (list_devices() if available is None else available)}
    for device in ids:
        if device not in known:
            raise NoDevice(device, _why_missing(list(known)))
        if not known[device].usable:
            raise NoDevice(device, known[device].reason, known[device].remedy)
    return [known[device] for device in ids]


def _why_missing(known: list[str]) -> str:
    here = _there_is(", ".join(known))
    has_gpu = any(device.startswith("cuda") for device in known)
    return here if has_gpu else cuda_status() or here


def _there_is(names: str) -> Sentence:
    return Sentence("this machine has {names}", names=names)


TorchKind = Literal["cuda13", "cuda12", "rocm", "cpu"]
"""Target of a PyTorch build: a major CUDA version, ROCm, or only the CPU."""

OF_CUDA: dict[str, TorchKind] = {"13.0": "cuda13", "13.2": "cuda13", "12.6": "cuda12"}
"""Targets by CUDA version, without 12.8, for which there is no recent build."""


def suitable_torch() -> tuple[TorchKind, ...]:
    """Return the PyTorch targets that use as much of this machine as possible, best first.

    "cpu" is always last. NVIDIA comes before AMD, because a build supports only one of them.
    """
    found: list[TorchKind] = []
    with open_nvml() as nvml:
        capabilities = [gpu.compute_capability for gpu in nvidia_gpus(nvml)]
        major = nvml.cuda_major() if nvml else None
    if capabilities:
        wheel = choose_wheel(capabilities, major)
        each = [wheel] if wheel else [choose_wheel([one], major) for one in capabilities]
        found += [OF_CUDA[one.cuda] for one in each if one and one.cuda in OF_CUDA]
    if large_amd_gpus():
        found.append("rocm")
    return (*dict.fromkeys(found), "cpu")
