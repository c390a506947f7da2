"""A fake NVIDIA driver that takes the place of `pynvml`."""

# ruff: noqa: N802 - the functions carry the names that they stand in for

import sys
import types
from pathlib import Path

import pytest

from engine.hardware.devices.torch_builds import TorchBuild

GIB = 1 << 30
CODES = {
    "NVML_ERROR_INVALID_ARGUMENT": 2,
    "NVML_ERROR_NOT_SUPPORTED": 3,
    "NVML_ERROR_NO_PERMISSION": 4,
    "NVML_ERROR_DRIVER_NOT_LOADED": 9,
    "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
    "NVML_ERROR_GPU_IS_LOST": 15,
    "NVML_ERROR_RESET_REQUIRED": 16,
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": 18,
    "NVML_ERROR_UNKNOWN": 999,
}


class FakeNVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


class FakeGpu:
    def __init__(self, name: str, uuid: str, bus: int, gib: int, capability=(8, 9)) -> None:
        self.name, self.uuid, self.capability = name, uuid, capability
        self.pci_bus = f"00000000:{bus:02x}:00.0"
        self.total, self.used = gib * GIB, GIB
        self.processes: list[types.SimpleNamespace] = []
        self.errors: dict[str, int] = {}  # function, or "*" for all, -> error code
        self.pcie = (1, 16, 4, 16)  # generation and width now (it rests), and at most
        self.nvlinks: list[str] = []  # where each active link leads: a PCI bus
        self.peers: dict[str, int] = {}  # PCI bus -> NVML_P2P_STATUS, 5 where it is not named
        self.clock_events = 0x01  # bits of nvmlClocksEventReasons: idle
        self.graphics: list[types.SimpleNamespace] = []
        self.nvlink_peers: set[str] = set()  # PCI buses that NVLinks reach, also by a switch


class FakeDriver(types.ModuleType):
    """Stand-in for `pynvml`: the functions that Tandem calls, over a list of `FakeGpu`."""

    NVMLError = FakeNVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1

    def __init__(self, gpus: list[FakeGpu]) -> None:
        super().__init__("pynvml")
        self.__dict__.update(CODES)
        self.gpus = gpus
        self.init_error = 0
        self.count_error = 0
        self.cuda = 13000
        self.n_open = 0

    def named(self, name: str) -> FakeGpu:
        return next(gpu for gpu in self.gpus if gpu.name == name)

    def answer(self, gpu: FakeGpu, function: str, value):
        code = gpu.errors.get(function) or gpu.errors.get("*")
        if code:
            raise FakeNVMLError(code)
        return value

    def nvmlInit(self):
        if self.init_error:
            raise FakeNVMLError(self.init_error)
        self.n_open += 1

    def nvmlShutdown(self):
        self.n_open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.65"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda

    def nvmlDeviceGetCount(self):
        if self.count_error:
            raise FakeNVMLError(self.count_error)
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.answer(self.gpus[index], "handle", self.gpus[index])

    def nvmlDeviceGetName(self, gpu):
        return self.answer(gpu, "name", gpu.name.encode())

    def nvmlDeviceGetUUID(self, gpu):
        return self.answer(gpu, "uuid", gpu.uuid)

    def nvmlDeviceGetPciInfo(self, gpu):
        return self.answer(gpu, "pci", types.SimpleNamespace(busId=gpu.pci_bus))

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return self.answer(gpu, "capability", gpu.capability)

    def nvmlDeviceGetMemoryInfo(self, gpu):
        memory = types.SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)
        return self.answer(gpu, "memory", memory)

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return self.answer(gpu, "load", types.SimpleNamespace(gpu=42, memory=7))

    def nvmlDeviceGetPowerUsage(self, gpu):
        return self.answer(gpu, "power", 215_500)

    def nvmlDeviceGetTemperatureV(self, gpu, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self.answer(gpu, "temperature", 61)

    def nvmlDeviceGetClockInfo(self, gpu, clock):
        return self.answer(
            gpu, "clock", {self.NVML_CLOCK_SM: 2520, self.NVML_CLOCK_MEM: 10501}[clock]
        )

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):
        return self.answer(gpu, "limit", 450_000)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return self.answer(gpu, "events", gpu.clock_events)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return self.answer(gpu, "throttling", gpu.clock_events)

    def nvmlDeviceGetPcieThroughput(self, gpu, counter):
        sent, received = self.NVML_PCIE_UTIL_TX_BYTES, self.NVML_PCIE_UTIL_RX_BYTES
        return self.answer(gpu, "traffic", {sent: 1500, received: 2_000_000}[counter])

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu):
        return self.answer(gpu, "graphics", gpu.graphics)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu):
        return self.answer(gpu, "pcie", gpu.pcie[0])

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu):
        return self.answer(gpu, "pcie", gpu.pcie[1])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu):
        return self.answer(gpu, "pcie", gpu.pcie[2])

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu):
        return self.answer(gpu, "pcie", gpu.pcie[3])

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        if link >= 18:
            raise FakeNVMLError(CODES["NVML_ERROR_INVALID_ARGUMENT"])
        return self.answer(gpu, "nvlink", int(link < len(gpu.nvlinks)))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, link):
        bus = types.SimpleNamespace(busId=gpu.nvlinks[link].encode())
        return self.answer(gpu, "remote", bus)

    def nvmlDeviceGetNvLinkVersion(self, gpu, link):
        return self.answer(gpu, "version", 4)

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return self.answer(one, "ancestor", 30)

    def nvmlDeviceGetP2PStatus(self, one, other, index):
        assert isinstance(index, int), "the real binding takes nothing else"
        status = one.peers.get(other.pci_bus, 5)
        if index == 2:
            status = 0 if other.pci_bus in one.nvlink_peers else 5
        return self.answer(one, "peer", status)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return self.answer(gpu, "processes", gpu.processes)


def three_gpus() -> FakeDriver:
    """Return different GPUs, which the driver lists in another order than they sit on the bus."""
    return FakeDriver(
        [
            FakeGpu("RTX 4090", "GPU-aaaa1111", bus=0x81, gib=24),
            FakeGpu("RTX 3060", "GPU-bbbb2222", bus=0x01, gib=12, capability=(8, 6)),
            FakeGpu("RTX 5090", "GPU-aaaa3333", bus=0x2A, gib=32, capability=(12, 0)),
        ]
    )


def no_gpus(init_error: str = "NVML_ERROR_LIBRARY_NOT_FOUND") -> FakeDriver:
    """Return the driver of a machine that has none: starting it fails."""
    driver = FakeDriver([])
    driver.init_error = CODES[init_error]
    return driver


def install(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Install a fake driver on this machine, with a torch that can use it; return the driver.

    Nothing else of this machine is seen: neither its display adapters nor AMD's GPUs nor torch's.
    """
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("engine.hardware.devices.amd.SYSFS", Path("/nowhere"))
    monkeypatch.setattr("engine.hardware.devices.catalog.find_adapters", list)
    monkeypatch.setattr("engine.hardware.devices.other_gpus.CUDA_FILES", ())
    monkeypatch.setattr("engine.hardware.devices.other_gpus.HIP_FILES", ())
    use_build(monkeypatch, TorchBuild(is_installed=True, cuda="13.0"))
    return driver


def use_build(monkeypatch: pytest.MonkeyPatch, build: TorchBuild) -> None:
    for module in ("devices.catalog", "devices.monitor", "backend_choice"):
        monkeypatch.setattr(f"engine.hardware.{module}.find_torch_build", lambda: build)
