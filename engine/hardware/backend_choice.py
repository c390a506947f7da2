"""The backend of each rank, our kernels or the exact reference, and what kernels on GPUs need.

Nothing that is looked for is imported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from engine.errors import EngineError
from engine.hardware.devices.catalog import cuda_status
from engine.hardware.devices.torch_builds import find_torch_build
from engine.hardware.devices.types import DeviceInfo, is_cpu

VARIABLE = "TANDEM_BACKEND"
"""Environment variable that names the backend."""

BackendName = Literal["reference", "eager", "graph", "interpreter"]
"""The backends. "reference": F32 with dequantised weights everywhere. "eager": kernels, launched
one by one. "graph": kernels, captured for one token and replayed. "interpreter": as "graph", but
ranks on the CPU run the GPU kernels in Triton's interpreter; very slow, for tests."""

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

KernelKind = Literal["", "cpu", "gpu"]
"""Kind of the kernels of a rank; "" is the reference in torch."""

_refused: dict[str, str] = {}
_gpus_are_simulated = False


def chosen_backend() -> BackendName:
    """Return the backend that the environment asks for, "graph" by default.

    Raises:
        EngineError: the variable is set to something else.
    """
    value = os.environ.get(VARIABLE, "") or "graph"
    for name in BACKENDS:
        if value == name:
            return name
    *others, last = BACKENDS
    raise EngineError(
        f"{VARIABLE} is {value[:40]!r}, which is not a backend.",
        f"Set it to {', '.join(others)} or {last}, or unset it.",
    )


def captures_tokens() -> bool:
    """Return whether the computation of a token is captured and replayed.

    Raises:
        EngineError: see `chosen_backend`.
    """
    return chosen_backend() in ("graph", "interpreter")


def kernels_for(device: str) -> KernelKind:
    """Return the kernels of a rank on this device; "" for the reference in torch.

    Args:
        device: device name such as "cuda:0" or "1/cuda:0", or type such as "cuda".
    """
    backend = chosen_backend()
    if backend == "reference":
        return ""
    if _gpus_are_simulated and not is_cpu(device):
        return "gpu"
    if device in _refused:
        return ""
    if is_cpu(device):
        return "gpu" if backend == "interpreter" else "cpu"
    return "gpu" if has_triton() else ""


def uses_kernels(device: str) -> bool:
    """Return whether a rank on this device computes with our own kernels."""
    return bool(kernels_for(device))


def simulate_gpus(are_simulated: bool) -> None:
    """Say whether GPUs are only planned for: then they have kernels, whatever is installed here."""
    global _gpus_are_simulated
    _gpus_are_simulated = are_simulated


def refuse_kernels(device: str, why: str) -> None:
    """Note that our kernels do not work on a GPU, for the rest of this process.

    Args:
        device: device name of the GPU.
        why: reason as the end of a sentence.
    """
    _refused[device] = why


def allow_kernels(device: str) -> None:
    """Take back `refuse_kernels`: our kernels have been found to work on a GPU."""
    _refused.pop(device, None)


def refused_kernels() -> Mapping[str, str]:
    """Return the reason against our kernels for each GPU that cannot use them, by name."""
    return _refused


def use_interpreter() -> None:
    """Make Triton interpret the kernels that are imported from now on.

    Raises:
        EngineError: Triton is not installed.
    """
    if not has_triton():
        raise EngineError(
            f"{VARIABLE}=interpreter needs Triton, which is not installed.",
            "Install triton, or choose another backend.",
        )
    os.environ["TRITON_INTERPRET"] = "1"


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, which compiles GPU kernels and comes with PyTorch."""
    return find_spec("triton") is not None


Launcher = Literal["triton", "own", ""]
"""Launcher of kernels: Triton's compiled one, our own over the CUDA driver, or none."""

PACKAGES = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
"""Names of the packages that install Triton."""

GPU = "a GPU with its NVIDIA driver"
"""Name of a missing GPU in sentences."""

LAUNCHER_VARIABLE = "TANDEM_LAUNCHER"
"""Environment variable that, set to "own", launches kernels without Triton's launcher; for
diagnosis."""


@dataclass(frozen=True, slots=True)
class GpuPath:
    """The way in which GPUs of this machine compute, or would compute if there were one.

    Attributes:
        has_gpu: whether a model can be put on a GPU.
        arithmetic: "kernels" for our own, or "reference" for torch in F32 with dequantised weights.
        launcher: launcher of the kernels, see `Launcher`.
        triton: version of Triton; "" where it is not installed.
        torch_cuda: version of CUDA that torch was built for; "" for none.
        torch_hip: version of HIP that torch was built for, for AMD's GPUs; "" for none.
        launcher_problem: why Triton's launcher cannot be compiled; "" if it can.
        missing: names of what a GPU needs and is not here.
        remedy: command that lets torch use a GPU of this machine; "" if it can, or if nothing does.
        sentence: summary in one or two sentences.
    """

    has_gpu: bool
    arithmetic: Literal["kernels", "reference"]
    launcher: Launcher
    triton: str
    torch_cuda: str
    torch_hip: str
    launcher_problem: str
    missing: tuple[str, ...]
    remedy: str
    sentence: str


def find_gpu_path(devices: Sequence[DeviceInfo]) -> GpuPath:
    """Return how GPUs compute here, and what is missing for that.

    Args:
        devices: all devices of this machine.
    """
    build, triton, problem = find_torch_build(), triton_version(), launcher_problem()
    has_gpu = any(d.kind == "cuda" and d.usable for d in devices)
    is_exact = chosen_backend() == "reference"
    missing: list[str] = []
    if not any(d.kind == "cuda" for d in devices):
        missing.append(GPU)
    if not build.has_gpus:
        missing.append("a PyTorch build with CUDA")
    if not triton:
        missing.append(f"Triton (pip install {triton_package()})")
    launcher = chosen_launcher()
    return GpuPath(
        has_gpu=has_gpu,
        arithmetic="reference" if is_exact or not launcher else "kernels",
        launcher=launcher,
        triton=triton,
        torch_cuda=build.cuda,
        torch_hip=build.hip,
        launcher_problem=problem,
        missing=tuple(missing),
        remedy="" if has_gpu else next((d.remedy for d in devices if d.remedy), ""),
        sentence=(
            _describe_path(is_exact, triton, launcher, problem)
            if has_gpu
            else _describe_missing(missing)
        ),
    )


def _describe_path(is_exact: bool, triton: str, launcher: Launcher, problem: str) -> str:
    """Return a sentence on how the GPUs of this machine compute."""
    if is_exact:
        return "GPUs compute with PyTorch in F32, as TANDEM_BACKEND=reference asks for."
    if not triton:
        return (
            "GPUs compute with PyTorch in F32, which is slow and takes much memory, because Triton "
            f"is missing: pip install {triton_package()}."
        )
    if not launcher:
        return (
            "GPUs compute with PyTorch in F32, which is slow and takes much memory, because "
            f"{problem}."
        )
    if launcher == "triton":
        return f"GPUs compute with Tandem's kernels, compiled and started by Triton {triton}."
    why = f" because {problem}" if problem else ""
    return (
        f"GPUs compute with Tandem's kernels, compiled by Triton {triton} and started by Tandem "
        f"itself{why}."
    )


def _describe_missing(missing: Sequence[str]) -> str:
    """Return a sentence on why no GPU is used, and on what else is missing."""
    status, more = cuda_status(), [text for text in missing if text != GPU]
    if GPU in missing and more:
        return f"{status} For GPUs, {' and '.join(more)} would be needed, too."
    if len(more) > 1:  # the status names the first
        return f"{status} For GPUs, {' and '.join(more[1:])} would be needed, too."
    return status


def triton_version() -> str:
    """Return the version of the installed Triton; "" if there is none."""
    if importlib.util.find_spec("triton") is None:
        return ""
    for package in PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


def triton_package() -> str:
    """Return the package to install for Triton on this system."""
    return "triton-windows" if sys.platform == "win32" else "triton"


def launcher_problem() -> str:
    """Return why Triton cannot compile its launcher, as the end of a sentence; "" if it can.

    Triton compiles a C program once per version of Triton. Triton for Windows brings a compiler and
    Python's headers along.
    """
    if sys.platform == "win32":
        return ""
    compiler = os.environ.get("CC") or "gcc"
    if not any(shutil.which(name) for name in (compiler, "gcc", "clang")):
        return "there is no C compiler (gcc or clang) for Triton's own launcher"
    if os.environ.get("CC") and not shutil.which(compiler):
        return f"CC is {compiler!r}, which is not a compiler for Triton's own launcher"
    if not (python_headers() / "Python.h").is_file():
        return f"Python.h is missing in {python_headers()} for Triton's own launcher"
    return ""


def python_headers() -> Path:
    """Return the folder where Triton looks for Python's headers."""
    scheme = sysconfig.get_default_scheme()
    return Path(
        sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    )


def chosen_launcher() -> Launcher:
    """Return the launcher of kernels on this machine."""
    if not triton_version():
        return ""
    problem = launcher_problem()
    if find_torch_build().hip:  # our own launcher knows only CUDA
        return "" if problem else "triton"
    return "own" if problem or os.environ.get(LAUNCHER_VARIABLE) == "own" else "triton"
