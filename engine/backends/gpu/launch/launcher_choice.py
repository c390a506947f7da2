"""Choice of the kernel launcher for this machine, made once, before the first compilation.

It also sets up the on-disk cache of kernels and reads the configurations that searches found
(`tune_kernels`).
"""

from __future__ import annotations

import logging
import os
import threading
from importlib import import_module
from typing import Any, Literal

import torch

from engine.backends.gpu.launch import configs
from engine.backends.gpu.launch.found_configs import configs_file, read_configs
from engine.backends.gpu.launch.kernel_cache import use_cache
from engine.backends.gpu.launch.own_launcher import OwnDriver
from engine.errors import EngineError
from engine.hardware.cuda_api import CudaApi
from engine.hardware.fallbacks import OF_THIS_PROCESS
from engine.hardware.gpu_path import LAUNCHER_VARIABLE, launcher_problem, triton_version

__all__ = ["Launcher", "launcher_problem", "prepare"]

log = logging.getLogger(__name__)

Launcher = Literal["triton", "own"]
"""Launcher of kernels: Triton's, which needs a C compiler once, or Tandem's own."""

_lock = threading.Lock()
_found: dict[str, Launcher | EngineError] = {}


def prepare() -> Launcher:
    """Choose the launcher and set up the kernel cache; later calls return the first one's choice.

    Raises:
        EngineError: kernels cannot be launched on this machine; torch can compute without them.
    """
    found = _found.get("")
    if found is None:
        with _lock:
            found = _found.get("") or _choice_or_error()
            _found[""] = found
    if isinstance(found, EngineError):
        raise found
    return found


def _choice_or_error() -> Launcher | EngineError:
    try:
        return _choose()
    except EngineError as error:
        return error


def _choose() -> Launcher:
    version = triton_version()
    if not version:
        raise EngineError(
            "Triton, which compiles the kernels for GPUs, is not installed.",
            "Install triton (on Windows triton-windows).",
        )
    use_cache(targets(), version)
    configs.use_found(read_configs(configs_file()))
    why = launcher_problem()
    if not why and (torch.version.hip or os.environ.get(LAUNCHER_VARIABLE) != "own"):
        why = _build_launcher()
        if not why:
            return "triton"
    if torch.version.hip:
        raise EngineError(
            f"Kernels for AMD's GPUs cannot be started because {why}.",
            "Install gcc and Python's headers (python3-dev).",
        )
    _triton_driver().set_active(OwnDriver(CudaApi.open()))
    log.info("kernels are started by Tandem's own launcher%s", why and f": {why}")
    helps = "" if why else f"Unset the environment variable {LAUNCHER_VARIABLE}."
    OF_THIS_PROCESS.report("launcher", (), why or f"{LAUNCHER_VARIABLE} is set to own", helps)
    return "own"


def targets() -> str:
    """Return the targets of all GPUs of this machine as one name, such as "sm86+sm90"."""
    numbers = range(torch.cuda.device_count())
    if torch.version.hip:
        names = {str(torch.cuda.get_device_properties(n).gcnArchName) for n in numbers}
        return "+".join(sorted(name.partition(":")[0] for name in names)) or "hip"
    capabilities = {torch.cuda.get_device_capability(n) for n in numbers}
    return "+".join(f"sm{major}{minor}" for major, minor in sorted(capabilities)) or "cuda"


def _build_launcher() -> str:
    """Let Triton build its launcher or load it from its cache; return why that fails, or ""."""
    try:
        _ = _triton_driver().active.utils
    except Exception as error:  # noqa: BLE001 compilers fail in all ways
        return f"Triton's own launcher fails ({_first_line(error)})"
    return ""


def _triton_driver() -> Any:
    return import_module("triton.runtime").driver


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
