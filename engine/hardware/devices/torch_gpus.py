"""Asks PyTorch for its GPUs, in a child process, where no driver library tells them.

That is so where NVML is missing or broken (some containers, WSL and Jetson), and for AMD's GPUs
under Windows and WSL. Importing torch takes seconds and using a GPU takes memory there, so nobody
is asked unless files of a driver show that there may be a GPU, and then once per process.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
