"""Reads GPU names, memory, load and temperature from NVIDIA's management library, NVML.

NVML opens no CUDA context, so reading a GPU takes none of its memory. `pynvml` is imported on first
use. A machine may well lack the driver or the library, which raises `DeviceError`. MIG instances
count as whole GPUs.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from engine.errors import DeviceError, Sentence
from engine.hardware.devices.types import ClockLimit, DeviceSnapshot, Memory

NO_DRIVER = Sentence("No NVIDIA driver was found; Tandem runs on the CPU.")

CLOCK_LIMITS: Mapping[ClockLimit, int] = {
    "power": 0x04, "heat": 0x20 | 0x40, "supply": 0x80, "setting": 0x02 | 0x100, "hardware": 0x08,
}  # fmt: skip
"""Bits of NVML's nvmlClocksEventReasons. An idle GPU (1) and synchronised boards (0x10) are not
limits; the hardware bit (8) is also set along with the more specific bits for heat and supply."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU in this machine, with either a `handle` or a `problem`, which is a sentence."""

    handle: Any
    name: str
    uuid: str = ""
    pci_bus: str = ""
    compute_capability: str = ""
    problem: str = ""


class Nvml:
    """An open NVML session.

    Raises:
        DeviceError: there is no driver, or the driver does not answer; the message says which.
    """

    def __init__(self) -> None:
        try:
            self._lib = importlib.import_module("pynvml")
        except ImportError as error:
            raise DeviceError(
                "The Python package nvidia-ml-py is missing, so NVIDIA GPUs cannot be found.",
                "Install nvidia-ml-py.",
            ) from error
        try:
            self._lib.nvmlInit()
        except self._lib.NVMLError as error:
            raise DeviceError(self._why_not_open(error)) from error

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session."""
        self.ask("nvmlShutdown")

    def driver_version(self) -> str:
        """Return the driver version; "" if unknown."""
        return _text(self.ask("nvmlSystemGetDriverVersion"))

    def cuda_major(self) -> int | None:
        """Return the newest major CUDA version that the driver supports; None if unknown."""
        version = self.ask("nvmlSystemGetCudaDriverVersion_v2")
        return None if version is None else int(version) // 1000

    def gpus(self) -> list[Gpu]:
        """Return all GPUs that this process may open, by PCI bus id; GPUs without one come last.

        Raises:
            DeviceError: the driver does not answer.
        """
        try:
            count = self._lib.nvmlDeviceGetCount()
        except self._lib.NVMLError as error:
            raise DeviceError(self._problem(error)) from error
        found = (self._open(index) for index in range(count))
        return sorted((gpu for gpu in found if gpu), key=lambda gpu: (not gpu.pci_bus, gpu.pci_bus))

    def memory(self, gpu: Gpu) -> Memory:
        """Return a GPU's memory, or the machine's if the GPU shares it (GB10, Jetson).

        Raises:
            DeviceError: the GPU does not answer.
        """
        if gpu.problem:
            raise DeviceError(gpu.problem)
        try:
            memory = self._lib.nvmlDeviceGetMemoryInfo(gpu.handle)
        except self._lib.NVMLError as error:
            if error.value == self._lib.NVML_ERROR_NOT_SUPPORTED:
                host = psutil.virtual_memory()
                return Memory(host.total, host.total - host.available, host.available)
            raise DeviceError(self._problem(error)) from error
        return Memory(int(memory.total), int(memory.used), int(memory.free))

    def read(
        self, device: str, gpu: Gpu, own: Collection[int] = (), *, traffic: bool = False
    ) -> DeviceSnapshot:
        """Return the current state of `gpu` under the id `device`; never raise.

        Args:
            own: process ids of this program.
            traffic: whether to read PCIe traffic, which takes the driver 40 ms.
        """
        now = time.monotonic()
        try:
            memory = self.memory(gpu)
        except DeviceError as error:
            return DeviceSnapshot(device, now, 0, 0, 0, problem=error.message)
        lib, handle = self._lib, gpu.handle
        load = self.ask("nvmlDeviceGetUtilizationRates", handle)
        power_mw = self.ask("nvmlDeviceGetPowerUsage", handle)
        limit_mw = self.ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        return DeviceSnapshot(
            device, now, memory.used_bytes, memory.total_bytes, memory.free_bytes,
            load_percent=None if load is None else float(load.gpu),
            temperature_c=self.ask("nvmlDeviceGetTemperatureV", handle, lib.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw / 1000,
            own_bytes=self._own_bytes(handle),
            clock_mhz=self.ask("nvmlDeviceGetClockInfo", handle, lib.NVML_CLOCK_SM),
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            memory_clock_mhz=self.ask("nvmlDeviceGetClockInfo", handle, lib.NVML_CLOCK_MEM),
            clock_limits=self._clock_limits(handle),
            sent_bytes_s=self._traffic(handle, lib.NVML_PCIE_UTIL_TX_BYTES) if traffic else None,
            received_bytes_s=self._traffic(handle, lib.NVML_PCIE_UTIL_RX_BYTES)
            if traffic
            else None,
            others_bytes=self._others_bytes(handle, own),
        )  # fmt: skip

    def _open(self, index: int) -> Gpu | None:
        # None if this process has no permission, as in a container (CUDA skips the GPU as well)
        try:
            handle = self._lib.nvmlDeviceGetHandleByIndex(index)
        except self._lib.NVMLError as error:
            if error.value == self._lib.NVML_ERROR_NO_PERMISSION:
                return None
            return Gpu(None, "NVIDIA GPU", problem=self._problem(error))
        pci = self.ask("nvmlDeviceGetPciInfo", handle)
        capability = self.ask("nvmlDeviceGetCudaComputeCapability", handle)
        return Gpu(
            handle=handle,
            name=_text(self.ask("nvmlDeviceGetName", handle)) or "NVIDIA GPU",
            uuid=_text(self.ask("nvmlDeviceGetUUID", handle)),
            pci_bus=_text(pci.busId).upper() if pci else "",
            compute_capability=".".join(map(str, capability or ())),
        )

    def _own_bytes(self, handle: Any) -> int | None:
        # In a container, the driver may list processes by host ids; a list without this process is
        # then meaningless. Windows reports no sizes.
        processes = self.ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if processes is None:
            return None
        own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
        if not own and not all(psutil.pid_exists(process.pid) for process in processes):
            return None
        return None if None in own else sum(own)

    def _others_bytes(self, handle: Any, own: Collection[int]) -> int | None:
        # includes windows and games
        computing = self.ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if computing is None:
            return None
        pids = {process.pid for process in computing}  # some are in both lists
        drawing = self.ask("nvmlDeviceGetGraphicsRunningProcesses", handle) or ()
        found = [*computing, *(process for process in drawing if process.pid not in pids)]
        pids.update(process.pid for process in found)
        if pids.isdisjoint(own) and not all(map(psutil.pid_exists, pids)):
            return None
        others = [process.usedGpuMemory for process in found if process.pid not in own]
        return None if None in others else sum(others)

    def _clock_limits(self, handle: Any) -> tuple[ClockLimit, ...] | None:
        # drivers before 535 use an older name
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if bits is None:
            return None
        found = [limit for limit, mask in CLOCK_LIMITS.items() if bits & mask]
        if len(found) > 1 and "hardware" in found:
            found.remove("hardware")
        return tuple(found)

    def _traffic(self, handle: Any, counter: int) -> int | None:
        kb_per_s = self.ask("nvmlDeviceGetPcieThroughput", handle, counter)
        return None if kb_per_s is None else 1000 * int(kb_per_s)

    def ask(self, function: str, *args: Any) -> Any:
        """Return the driver's answer; None if this GPU or driver does not support the function."""
        try:
            return getattr(self._lib, function)(*args)
        except self._lib.NVMLError:
            return None

    def _why_not_open(self, error: Any) -> Sentence:
        lib = self._lib
        if error.value in (lib.NVML_ERROR_LIBRARY_NOT_FOUND, lib.NVML_ERROR_DRIVER_NOT_LOADED):
            return NO_DRIVER
        if error.value == lib.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return Sentence(
                "The NVIDIA driver was updated while in use; restart the machine to use the GPUs."
            )
        return Sentence(
            "The NVIDIA driver does not answer ({problem}); Tandem runs on the CPU.",
            problem=str(error),
        )

    def _problem(self, error: Any) -> Sentence:
        lib = self._lib
        if error.value == lib.NVML_ERROR_GPU_IS_LOST:
            return Sentence(
                "The GPU fell off the bus; restart the machine, and check the card's power and"
                " seating."
            )
        if error.value == lib.NVML_ERROR_RESET_REQUIRED:
            return Sentence("The GPU needs a reset; restart the machine.")
        return Sentence("The NVIDIA driver could not read the GPU ({problem}).", problem=str(error))


def _text(value: str | bytes | None) -> str:
    # older versions of the binding return bytes
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
