"""GPUs that no driver library lists: PyTorch's, and the system's display adapters.

PyTorch lists GPUs in a child process. This is needed if NVML is missing or broken (as in some
containers, WSL and Jetson), and for AMD GPUs on Windows and WSL. Importing torch takes seconds and
using a GPU takes memory, so this is done at most once per process, and only if driver files
indicate a GPU.
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

from engine.errors import Sentence
from engine.hardware.devices.torch_builds import TorchBuild
from engine.hardware.devices.types import DeviceSnapshot
from engine.util.programs import NO_WINDOW, child_environment, program_command, tie_child

log = logging.getLogger(__name__)

COMMAND = program_command("engine.hardware.torch_devices")

ANSWER_S = 60.0
"""Time that the child has to import torch and open the GPUs, in seconds."""

SYSTEM32 = Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32"

CUDA_FILES = (
    Path("/dev/nvidiactl"), Path("/dev/nvhost-gpu"), Path("/dev/nvgpu"),
    Path("/usr/lib/wsl/lib/libcuda.so.1"), SYSTEM32 / "nvcuda.dll",
)  # fmt: skip
"""Files that indicate CUDA, on Linux, Jetson, WSL and Windows."""

HIP_FILES = (*map(Path, ("/dev/kfd", "/dev/dxg")), SYSTEM32 / "amdhip64.dll",
             SYSTEM32 / "amdhip64_6.dll", SYSTEM32 / "amdhip64_7.dll")  # fmt: skip
"""Files that indicate HIP, on Linux, WSL and Windows."""


@dataclass(frozen=True, slots=True)
class TorchGpu:
    """A GPU as PyTorch describes it; unknown strings are "".

    `free_bytes` is the free memory at the time of reading; `problem` is a sentence that says why
    PyTorch could not open the GPU.
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
    """A thread that waits for the child; `gpus` is None until the child has answered."""

    def __init__(self) -> None:
        super().__init__(name="tandem-ask-torch", daemon=True)
        self.gpus: tuple[TorchGpu, ...] | None = None

    def run(self) -> None:
        try:
            self.gpus = _gpus_of_child()
        except (OSError, ValueError, TypeError, KeyError, subprocess.SubprocessError) as error:
            log.warning("PyTorch did not list its GPUs: %s", error)
            self.gpus = ()


_lock = threading.Lock()
_question: _Question | None = None


def ask_torch(build: TorchBuild, *, wait: bool) -> tuple[TorchGpu, ...] | None:
    """Return the GPUs that PyTorch finds, by number; None if not yet known and `wait` is False.

    Args:
        wait: whether to wait for the answer, which takes a few seconds on the first call.
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
    """Return a snapshot of `gpu` under the id `device` that explains why its state is unknown."""
    problem = gpu.problem or Sentence(
        "Memory and load are not shown, because no driver library reports them; PyTorch can use the"
        " GPU."
    )
    return DeviceSnapshot(device, time.monotonic(), 0, 0, 0, problem=problem)


def _gpus_of_child() -> tuple[TorchGpu, ...]:
    text = _output_of_child()
    answer: Mapping[str, object] = json.loads(text.splitlines()[-1] if text else "")
    if answer["problem"]:
        log.warning("PyTorch finds no GPU: %s", answer["problem"])
    gpus = answer["gpus"]
    if not isinstance(gpus, list):
        raise TypeError("no list of GPUs")
    return tuple(TorchGpu(**gpu) for gpu in gpus)


def _output_of_child() -> str:
    # the child does not outlive this process
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
"""Vendors by PCI id."""

PCI = Path("/sys/bus/pci/devices")

DISPLAY_CLASS = "0x03"
"""Prefix of the PCI class of display controllers."""

REGISTRY = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
"""Key under which Windows lists display adapters, in subkeys such as 0000."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A display adapter; Linux reports neither `name` nor `total_bytes`."""

    maker: GpuMaker
    name: str = ""
    total_bytes: int = 0


def find_adapters() -> list[Adapter]:
    """Return the display adapters of known vendors."""
    if sys.platform == "win32":
        return _adapters_of_windows()
    if sys.platform == "darwin":
        return [Adapter("apple")]
    try:
        folders = sorted(PCI.iterdir())
    except OSError:
        return []
    vendors = [
        _word(folder / "vendor")
        for folder in folders
        if _word(folder / "class").startswith(DISPLAY_CLASS)
    ]
    return [Adapter(MAKERS[v]) for v in (v.removeprefix("0x") for v in vendors) if v in MAKERS]


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
    query = winreg.QueryValueEx  # type: ignore[attr-defined]
    found: dict[str, object] = {}
    for name in ("DriverDesc", "MatchingDeviceId", "HardwareInformation.qwMemorySize"):
        try:
            found[name] = query(key, name)[0]
        except OSError:
            continue
    return found


def _adapter_of(values: Mapping[str, object]) -> list[Adapter]:
    # MatchingDeviceId contains the PCI vendor: "PCI\VEN_10DE&DEV_2684"
    vendor = str(values.get("MatchingDeviceId", "")).lower().partition("ven_")[2][:4]
    if vendor not in MAKERS:
        return []
    size = values.get("HardwareInformation.qwMemorySize", 0)
    name = str(values.get("DriverDesc", ""))
    return [Adapter(MAKERS[vendor], name, size if isinstance(size, int) else 0)]
