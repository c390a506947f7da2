"""Monitors the memory, load and temperature of devices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from engine.errors import DeviceError, NoDevice, Sentence
from engine.hardware.devices.amd import AmdGpu, read_amd
from engine.hardware.devices.catalog import cuda_status, find_gpus, nvidia_gpus
from engine.hardware.devices.host import CpuReader, OwnProcesses
from engine.hardware.devices.nvml import Gpu, Nvml
from engine.hardware.devices.other_gpus import Adapter, TorchGpu, read_torch_gpu
from engine.hardware.devices.torch_builds import find_torch_build
from engine.hardware.devices.types import DeviceSnapshot

log = logging.getLogger(__name__)

OnSnapshots = Callable[[list[DeviceSnapshot]], None]
"""Receiver of snapshots of all monitored devices."""


class DeviceMonitor:
    """Monitor that reads devices on demand, or periodically on a thread.

    A GPU that stops answering stays in the list, with a problem instead of numbers.

    Args:
        devices: ids in the desired order, without repetitions; None for all.

    Raises:
        NoDevice: a device does not exist on this machine.
    """

    def __init__(self, devices: Sequence[str] | None = None) -> None:
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._interval_s = 1.0
        self._own = OwnProcesses()
        self._cpu = CpuReader(self._own)
        self._nvml: Nvml | None = None
        self._gpus: dict[str, Gpu | AmdGpu | TorchGpu] = {}
        if devices is None or not set(devices) <= {"cpu"}:
            self._find_gpus(wait=devices is not None)
        here = [*self._gpus, "cpu"]
        self.devices = tuple(dict.fromkeys(here if devices is None else devices))
        for device in self.devices:
            if device not in here:
                self.close()
                why = "" if self._gpus else cuda_status()
                raise NoDevice(
                    device, why or Sentence("this machine has {names}", names=", ".join(here))
                )

    def __enter__(self) -> DeviceMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def snapshot(self) -> list[DeviceSnapshot]:
        """Return the current state of each device. After `close`, only the CPU can be read."""
        return self._snapshot(traffic=False)

    def start(self, on_snapshots: OnSnapshots, interval_s: float) -> None:
        """Call `on_snapshots` now and every `interval_s`, on a thread, until `stop`."""
        if self._thread is not None:
            raise RuntimeError("the monitor is already running")
        self._stopping.clear()
        self._interval_s = interval_s
        self._thread = threading.Thread(
            target=self._run, args=(on_snapshots,), name="tandem-monitor", daemon=True
        )
        self._thread.start()

    def pace(self, interval_s: float) -> None:
        """Change the interval from the next reading on."""
        self._interval_s = interval_s

    def stop(self) -> None:
        """Stop the thread and wait for it; must not be called from `on_snapshots`."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Stop the thread and close the driver session."""
        self.stop()
        with self._lock:
            if self._nvml is not None:
                self._nvml.close()
                self._nvml = None

    def _find_gpus(self, *, wait: bool) -> None:
        try:
            self._nvml = Nvml()
        except DeviceError as error:
            log.info("no NVIDIA GPU is monitored: %s", error)
        nvidia = nvidia_gpus(self._nvml)
        self._gpus = {
            device: gpu
            for device, gpu in find_gpus(nvidia, find_torch_build(), wait=wait).items()
            if not isinstance(gpu, Adapter)  # its state is unknown
        }

    def _snapshot(self, *, traffic: bool) -> list[DeviceSnapshot]:
        with self._lock:
            return [self._read(device, traffic=traffic) for device in self.devices]

    def _read(self, device: str, *, traffic: bool) -> DeviceSnapshot:
        if device == "cpu":
            return self._cpu.read()
        gpu = self._gpus[device]
        if isinstance(gpu, AmdGpu):
            return read_amd(device, gpu, self._own.pids())
        if not isinstance(gpu, Gpu):
            return read_torch_gpu(device, gpu)
        if self._nvml is None:
            raise RuntimeError("the monitor is closed")
        return self._nvml.read(device, gpu, self._own.pids(), traffic=traffic)

    def _run(self, on_snapshots: OnSnapshots) -> None:
        while not self._stopping.is_set():
            try:
                on_snapshots(self._snapshot(traffic=True))
            except Exception:  # an error in a receiver must not stop the monitor
                log.exception("a receiver of device snapshots failed")
            self._stopping.wait(self._interval_s)
