"""GPUs that no driver library lists: those that PyTorch finds, and the system's display adapters.

PyTorch is asked in a child process. That is needed where NVML is missing or broken (some
containers, WSL and Jetson), and for AMD's GPUs under Windows and WSL. Importing torch takes seconds
and using a GPU takes memory there, so nobody is asked unless files of a driver show that there may
be a GPU, and then once per process.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.hardware.devices.torch_builds import TorchBuild
from engine.hardware.devices.types import DeviceSnapshot
from engine.util.programs import NO_WINDOW, child_environment, program_command, tie_child

log = logging.getLogger(__name__)

COMMAND = program_command("engine.hardware.torch_devices")
"""Command of the child."""

ANSWER_S = 60.0
"""Seconds for the child to import torch and open the GPUs."""

SYSTEM32 = Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32"

CUDA_FILES = (
    Path("/dev/nvidiactl"), Path("/dev/nvhost-gpu"), Path("/dev/nvgpu"),
    Path("/usr/lib/wsl/lib/libcuda.so.1"), SYSTEM32 / "nvcuda.dll",
)  # fmt: skip
"""Files that show that CUDA may work, on Linux, Jetson, WSL and Windows."""

HIP_FILES = (*map(Path, ("/dev/kfd", "/dev/dxg")), SYSTEM32 / "amdhip64.dll",
             SYSTEM32 / "amdhip64_6.dll", SYSTEM32 / "amdhip64_7.dll")  # fmt: skip
"""Files that show that HIP may work, on Linux, WSL and Windows."""


@dataclass(frozen=True, slots=True)
class TorchGpu:
    """A GPU as PyTorch describes it; texts are "" where it does not tell.

    Attributes:
        free_bytes: free memory when PyTorch was asked.
        problem: sentence that says why PyTorch could not open it, else "".
    """

    name: str
    total_bytes: int
    free_bytes: int
    uuid: str = ""
    pci_bus: str = ""
    compute_capability: str = ""
    arch: str = ""
    problem: str = ""


class _Question(threading.Thread):
    """A thread that waits for the child; `gpus` is None until it has answered."""

    def __init__(self) -> None:
        super().__init__(name="tandem-ask-torch", daemon=True)
        self.gpus: tuple[TorchGpu, ...] | None = None

    def run(self) -> None:
        try:
            self.gpus = _gpus_of_child()
        except (OSError, ValueError, TypeError, KeyError, subprocess.SubprocessError) as error:
            log.warning("PyTorch did not tell its GPUs: %s", error)
            self.gpus = ()


_lock = threading.Lock()
_question: _Question | None = None


def ask_torch(build: TorchBuild, *, wait: bool) -> tuple[TorchGpu, ...] | None:
    """Return the GPUs that PyTorch finds, by number; none where no file of a driver is.

    Args:
        build: the installed PyTorch.
        wait: whether to wait for the answer, some seconds when asked for the first time.

    Returns:
        The GPUs; None if the answer is not there yet and `wait` is False.
    """
    global _question
    files = HIP_FILES if build.hip else CUDA_FILES if build.cuda else ()
    if not any(path.exists() for path in files):
        return ()
    with _lock:
        if _question is None:
            _question = _Question()
            _question.start()
        question = _question
    if wait:
        question.join()
    return question.gpus


def read_torch_gpu(device: str, gpu: TorchGpu) -> DeviceSnapshot:
    """Return what is known of `gpu` now, under the id `device`: that its state is not."""
    problem = gpu.problem or (
        "Memory and load are not shown, as no library of the driver tells them; PyTorch can use "
        "the GPU."
    )
    return DeviceSnapshot(device, time.monotonic(), 0, 0, 0, problem=problem)


def _gpus_of_child() -> tuple[TorchGpu, ...]:
    """Return what a child process finds.

    Raises:
        OSError, SubprocessError: it does not start, fails or falls silent.
        ValueError, TypeError, KeyError: it says something else.
    """
    text = _output_of_child()
    answer: Mapping[str, object] = json.loads(text.splitlines()[-1] if text else "")
    if answer["problem"]:
        log.warning("PyTorch finds no GPU: %s", answer["problem"])
    gpus = answer["gpus"]
    if not isinstance(gpus, list):
        raise TypeError("no list of GPUs")
    return tuple(TorchGpu(**gpu) for gpu in gpus)


def _output_of_child() -> str:
    """Run the child, which does not outlive this process, and return what it prints.

    Raises:
        OSError, SubprocessError: see `_gpus_of_child`.
    """
    with subprocess.Popen(
        COMMAND, env=child_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, encoding="utf-8", errors="replace",
        creationflags=NO_WINDOW,
    ) as child:  # fmt: skip
        tie_child(child.pid)
        try:
            text, _ = child.communicate(timeout=ANSWER_S)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, COMMAND)
    return text


GpuMaker = Literal["nvidia", "amd", "intel", "apple"]

MAKERS: Mapping[str, GpuMaker] = {"10de": "nvidia", "1002": "amd", "8086": "intel"}
"""Makers by PCI vendor."""

PCI = Path("/sys/bus/pci/devices")
"""Folder of Linux's files on PCI devices."""

DISPLAY_CLASS = "0x03"
"""Beginning of the PCI class of display controllers."""

REGISTRY = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
"""Key under which Windows lists display adapters, in keys such as 0000."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A display adapter; Linux tells neither `name` nor `total_bytes`, which are then "" and 0."""

    maker: GpuMaker
    name: str = ""
    total_bytes: int = 0


def find_adapters() -> list[Adapter]:
    """Return the display adapters of known makers."""
    if sys.platform == "win32":
        return _adapters_of_windows()
    if sys.platform == "darwin":
        return [Adapter("apple")]
    try:
        folders = sorted(PCI.iterdir())
    except OSError:
        return []
    vendors = [_word(folder / "vendor") for folder in folders if _is_display(folder)]
    return [Adapter(MAKERS[v]) for v in (v.removeprefix("0x") for v in vendors) if v in MAKERS]


def _is_display(folder: Path) -> bool:
    return _word(folder / "class").startswith(DISPLAY_CLASS)


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip().lower()
    except OSError:
        return ""


def _adapters_of_windows() -> list[Adapter]:
    found: list[Adapter] = []
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, REGISTRY) as adapters:
                n_keys = winreg.QueryInfoKey(adapters)[0]
                for key in (winreg.EnumKey(adapters, index) for index in range(n_keys)):
                    if key.isdigit():
                        with winreg.OpenKey(adapters, key) as adapter:
                            values = _values(winreg, adapter)
                        found += _adapter_of(values)
        except OSError:
            return found
    return found


def _values(winreg: object, key: object) -> dict[str, object]:
    """Return the values of a registry key that can be read, by name."""
    query = winreg.QueryValueEx  # type: ignore[attr-defined]
    found: dict[str, object] = {}
    for name in ("DriverDesc", "MatchingDeviceId", "HardwareInformation.qwMemorySize"):
        try:
            found[name] = query(key, name)[0]
        except OSError:
            continue
    return found


def _adapter_of(values: Mapping[str, object]) -> list[Adapter]:
    r"""Return the adapter of a registry key with these values, or none.

    MatchingDeviceId has the PCI vendor: "PCI\VEN_10DE&DEV_2684".
    """
    vendor = str(values.get("MatchingDeviceId", "")).lower().partition("ven_")[2][:4]
    if vendor not in MAKERS:
        return []
    size = values.get("HardwareInformation.qwMemorySize", 0)
    name = str(values.get("DriverDesc", ""))
    return [Adapter(MAKERS[vendor], name, size if isinstance(size, int) else 0)]
