"""The backend of each rank (our kernels or the exact reference), and requirements for GPU kernels.

Packages are only looked up, not imported.
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

from engine.errors import EngineError, Sentence, listed, paragraph
from engine.hardware.devices.catalog import cuda_status
from engine.hardware.devices.torch_builds import find_torch_build
from engine.hardware.devices.types import DeviceInfo, is_cpu

VARIABLE = "TANDEM_BACKEND"

BackendName = Literal["reference", "eager", "graph", "interpreter"]
"""The backends. "reference": F32 with dequantised weights everywhere. "eager": kernels, launched
one by one. "graph": kernels, captured for one token and replayed. "interpreter": like "graph", but
ranks on the CPU run the GPU kernels in Triton's interpreter; very slow, for tests."""

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

KernelKind = Literal["", "cpu", "gpu"]
"""Kind of kernels that a rank uses; "" is the reference in torch."""

_refused: dict[str, str] = {}
_gpus_are_simulated = False


def chosen_backend() -> BackendName:
    """Return the backend named by the environment, "graph" by default.

    Raises:
        EngineError: the variable is set to something else.
    """
    value = os.environ.get(VARIABLE, "") or "graph"
    for name in BACKENDS:
        if value == name:
            return name
    *others, last = BACKENDS
    raise EngineError(
        "{variable} is '{value}', which is not a backend.",
        "Set it to {names} or {last}, or unset it.",
        variable=VARIABLE, value=value[:40], names=", ".join(others), last=last,
    )  # fmt: skip


def captures_tokens() -> bool:
    """Return whether decode passes are captured and replayed."""
    return chosen_backend() in ("graph", "interpreter")


def kernels_for(device: str) -> KernelKind:
    """Return the kind of kernels for a device or a type of device; "" is the reference."""
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
    """Set whether GPUs are only planned for; they then have kernels, whatever is installed."""
    global _gpus_are_simulated
    _gpus_are_simulated = are_simulated


def refuse_kernels(device: str, why: str) -> None:
    """Record why our kernels do not work on a GPU, as the end of a sentence, for this process."""
    _refused[device] = why


def allow_kernels(device: str) -> None:
    """Undo `refuse_kernels` after our kernels have worked on a GPU."""
    _refused.pop(device, None)


def refused_kernels() -> Mapping[str, str]:
    """Return why our kernels do not work, by GPU id."""
    return _refused


def use_interpreter() -> None:
    """Make Triton interpret kernels imported from now on; raise EngineError if it is missing."""
    if not has_triton():
        raise EngineError(
            "{variable}=interpreter needs Triton, which is not installed.",
            "Install triton, or choose another backend.",
            variable=VARIABLE,
        )
    os.environ["TRITON_INTERPRET"] = "1"


@cache
def has_triton() -> bool:
    """Return whether Triton, the GPU kernel compiler that comes with PyTorch, is installed."""
    return find_spec("triton") is not None


Launcher = Literal["triton", "own", ""]
"""Launcher for kernels: Triton's compiled one, our own on top of the CUDA driver, or none."""

PACKAGES = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
"""Packages that install Triton."""

GPU = Sentence("a GPU with its NVIDIA driver")

LAUNCHER_VARIABLE = "TANDEM_LAUNCHER"
"""Environment variable that, set to "own", disables Triton's launcher for diagnosis."""


@dataclass(frozen=True, slots=True)
class GpuPath:
    """How GPUs on this machine compute, or would compute if there were any.

    Attributes:
        arithmetic: "kernels" (our own) or "reference" (torch in F32 with dequantised weights).
        torch_cuda: CUDA version of the PyTorch build; "" if none.
        torch_hip: HIP version of the PyTorch build, for AMD GPUs; "" if none.
        launcher_problem: why Triton's launcher cannot be compiled; "" if it can.
        missing: names of missing requirements for using a GPU.
        remedy: command that lets torch use a GPU in this machine; "" if there is none.
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
    """Return how this machine's GPUs compute and what is missing, given its devices."""
    build, triton, problem = find_torch_build(), triton_version(), launcher_problem()
    has_gpu = any(d.kind == "cuda" and d.usable for d in devices)
    is_exact = chosen_backend() == "reference"
    missing: list[str] = []
    if not any(d.kind == "cuda" for d in devices):
        missing.append(GPU)
    if not build.has_gpus:
        missing.append(Sentence("a PyTorch build with CUDA"))
    if not triton:
        missing.append(Sentence("Triton (pip install {package})", package=triton_package()))
    launcher = chosen_launcher()
    return GpuPath(
        has_gpu=has_gpu, arithmetic="reference" if is_exact or not launcher else "kernels",
        launcher=launcher, triton=triton, torch_cuda=build.cuda, torch_hip=build.hip,
        launcher_problem=problem, missing=tuple(missing),
        remedy="" if has_gpu else next((d.remedy for d in devices if d.remedy), ""),
        sentence=(
            _describe_path(is_exact, triton, launcher, problem)
            if has_gpu
            else _describe_missing(missing)
        ),
    )  # fmt: skip


def _describe_path(is_exact: bool, triton: str, launcher: Launcher, problem: str) -> Sentence:
    if is_exact:
        return Sentence("GPUs compute with PyTorch in F32, as set by TANDEM_BACKEND=reference.")
    if not triton:
        return Sentence(
            "GPUs compute with PyTorch in F32, which is slow and takes a lot of memory, because"
            " Triton is missing: pip install {package}.",
            package=triton_package(),
        )
    if not launcher:
        return Sentence(
            "GPUs compute with PyTorch in F32, which is slow and takes a lot of memory, because"
            " {problem}.",
            problem=problem,
        )
    if launcher == "triton":
        return Sentence(
            "GPUs compute with Tandem's kernels, compiled and launched by Triton {version}.",
            version=triton,
        )
    return Sentence(
        "GPUs compute with Tandem's kernels, compiled by Triton {version} and launched by Tandem"
        " itself because {problem}."
        if problem
        else "GPUs compute with Tandem's kernels, compiled by Triton {version} and launched by"
        " Tandem itself.",
        version=triton,
        problem=problem,
    )


def _describe_missing(missing: Sequence[str]) -> str:
    more = [text for text in missing if text != GPU]
    if GPU not in missing:
        more = more[1:]  # the status already names the first
    if not more:
        return cuda_status()
    needed = Sentence("GPUs also need {names}.", names=listed(more))
    return paragraph(cuda_status(), needed)


def triton_version() -> str:
    """Return the version of the installed Triton; "" if there is none."""
    if importlib.util.find_spec("triton") is None:
        return ""
    for package in PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Sentence("of an unknown version")


def triton_package() -> str:
    """Return the package that installs Triton on this system."""
    return "triton-windows" if sys.platform == "win32" else "triton"


def launcher_problem() -> str:
    """Return why Triton cannot compile its launcher, as the end of a sentence; "" if it can.

    Triton compiles a C program once per version. Triton for Windows includes a compiler and the
    Python headers.
    """
    if sys.platform == "win32":
        return ""
    compiler = os.environ.get("CC") or "gcc"
    if not any(shutil.which(name) for name in (compiler, "gcc", "clang")):
        return Sentence("there is no C compiler (gcc or clang) for Triton's own launcher")
    if os.environ.get("CC") and not shutil.which(compiler):
        return Sentence(
            "CC is '{compiler}', which is not a C compiler for Triton's own launcher",
            compiler=compiler,
        )
    if not (python_headers() / "Python.h").is_file():
        return Sentence(
            "Python.h, which Triton's own launcher needs, is missing in {folder}",
            folder=str(python_headers()),
        )
    return ""


def python_headers() -> Path:
    """Return the folder in which Triton looks for Python's headers."""
    scheme = sysconfig.get_default_scheme()
    return Path(
        sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    )


def chosen_launcher() -> Launcher:
    """Return the kernel launcher for this machine."""
    if not triton_version():
        return ""
    problem = launcher_problem()
    if find_torch_build().hip:  # our own launcher supports only CUDA
        return "" if problem else "triton"
    return "own" if problem or os.environ.get(LAUNCHER_VARIABLE) == "own" else "triton"
