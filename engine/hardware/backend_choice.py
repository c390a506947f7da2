"""Chooses the backend of each rank: our kernels for its device, or the exact reference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

from engine.errors import EngineError
from engine.hardware.devices.places import is_cpu
from engine.hardware.devices.visibility import ORDER, PCI_ORDER, VISIBLE, has_numbers
from engine.hardware.environment import DEFAULTS, loads_kernels_lazily

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


for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
if not loads_kernels_lazily():
    # then ranks of one GPU wait for each other in kernels; with fewer hardware queues than streams,
    # a kernel that one waits for could be queued behind that one
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
if not has_numbers(os.environ.get(VISIBLE)):
    os.environ[ORDER] = PCI_ORDER
