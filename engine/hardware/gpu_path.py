"""What computing on GPUs needs besides a GPU, and what of it is here; found without imports."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from engine.devices.catalog import cuda_status
from engine.devices.torch_build import find_torch_build
from engine.devices.types import DeviceInfo
from engine.hardware.backend_choice import chosen_backend

__all__ = ["GpuPath", "Launcher", "find_gpu_path", "launcher_problem", "triton_version"]

Launcher = Literal["triton", "own", ""]

PACKAGES = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
"""Under which Triton is installed."""

GPU = "a GPU with its NVIDIA driver"

LAUNCHER_VARIABLE = "TANDEM_LAUNCHER"
"""Set to "own", kernels are started without Triton's part in it; for diagnosis."""


@dataclass(frozen=True, slots=True)
class GpuPath:
    """How GPUs compute, or would if there were one.

    Attributes:
        has_gpu: whether a model can be put on a GPU.
        arithmetic: "kernels" of our own, or "reference": torch in F32 over dequantised weights.
        launcher: what starts the kernels: a part of Triton that is compiled once, or our own.
        triton: its version; "" where it is not installed.
        torch_cuda: for which CUDA torch was built; "" for none.
        launcher_problem: why Triton's own launcher cannot be made; "" if it can.
        missing: what a GPU would need that is not here, in words.
        sentence: all of it in one or two sentences.
    """

    has_gpu: bool
    arithmetic: Literal["kernels", "reference"]
    launcher: Launcher
    triton: str
    torch_cuda: str
    launcher_problem: str
    missing: tuple[str, ...]
    sentence: str


def find_gpu_path(devices: Sequence[DeviceInfo]) -> GpuPath:
    """Look for what GPUs need.

    Args:
        devices: all of this machine.
    """
    build, triton, problem = find_torch_build(), triton_version(), launcher_problem()
    has_gpu = any(d.kind == "cuda" and d.usable for d in devices)
    is_exact = chosen_backend() == "reference"
    missing: list[str] = []
    if not any(d.kind == "cuda" for d in devices):
        missing.append(GPU)
    if not build.cuda:
        missing.append("a PyTorch build with CUDA")
    if not triton:
        missing.append(f"Triton (pip install {triton_package()})")
    launcher: Launcher = "" if not triton else "own" if problem or _wants_own() else "triton"
    return GpuPath(
        has_gpu=has_gpu,
        arithmetic="reference" if is_exact or not triton else "kernels",
        launcher=launcher,
        triton=triton,
        torch_cuda=build.cuda,
        launcher_problem=problem,
        missing=tuple(missing),
        sentence=_how(is_exact, triton, launcher, problem) if has_gpu else _why_not(missing),
    )


def _how(is_exact: bool, triton: str, launcher: Launcher, problem: str) -> str:
    """How the GPUs that are here compute."""
    if is_exact:
        return "GPUs compute with PyTorch in F32, as TANDEM_BACKEND=reference asks for."
    if not triton:
        return (
            "GPUs compute with PyTorch in F32, which is slow and takes much memory, because Triton "
            f"is missing: pip install {triton_package()}."
        )
    if launcher == "triton":
        return f"GPUs compute with Tandem's kernels, compiled and started by Triton {triton}."
    why = f" because {problem}" if problem else ""
    return (
        f"GPUs compute with Tandem's kernels, compiled by Triton {triton} and started by Tandem "
        f"itself{why}."
    )


def _why_not(missing: Sequence[str]) -> str:
    """Why no GPU is used, and what else there would have to be."""
    status, more = cuda_status(), [text for text in missing if text != GPU]
    if GPU in missing and more:
        return f"{status} For GPUs, {' and '.join(more)} would be needed, too."
    if len(more) > 1:  # the first is what the status is about
        return f"{status} For GPUs, {' and '.join(more[1:])} would be needed, too."
    return status


def triton_version() -> str:
    """Of the installed Triton; "" if there is none."""
    if importlib.util.find_spec("triton") is None:
        return ""
    for package in PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


def triton_package() -> str:
    """What to install for Triton here."""
    return "triton-windows" if sys.platform == "win32" else "triton"


def launcher_problem() -> str:
    """Why Triton cannot compile what it starts kernels with, as half a sentence; "" if it can.

    Triton writes a program in C once for each version of it; Triton for Windows brings a compiler
    and Python's headers along.
    """
    if sys.platform == "win32":
        return ""
    compiler = os.environ.get("CC") or "gcc"
    if not any(shutil.which(name) for name in (compiler, "gcc", "clang")):
        return "there is no C compiler (gcc or clang) for Triton's own launcher"
    if os.environ.get("CC") and not shutil.which(compiler):
        return f"CC is {compiler!r}, which is no compiler for Triton's own launcher"
    if not (python_headers() / "Python.h").is_file():
        return f"Python.h is missing in {python_headers()} for Triton's own launcher"
    return ""


def python_headers() -> Path:
    """Where Triton looks for Python's own headers."""
    scheme = sysconfig.get_default_scheme()
    return Path(
        sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    )


def _wants_own() -> bool:
    return os.environ.get(LAUNCHER_VARIABLE) == "own"
