"""Which arithmetic ranks use: kernels for their device, repeated or not, or the exact reference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

from engine.errors import EngineError

VARIABLE = "TANDEM_BACKEND"

Backend = Literal["reference", "eager", "graph", "interpreter"]
"""reference: F32 and dequantised weights everywhere. eager: kernels, started one by one. graph: the
same, and what computes one token is recorded and repeated. interpreter: graph, where ranks on the
CPU compute as those on GPUs would, by Triton's interpreter; very slow, for tests."""

Kernels = Literal["", "cpu", "gpu"]

_refused: dict[str, str] = {}


def chosen_backend() -> Backend:
    """What the environment asks for, "graph" if nothing.

    Raises:
        EngineError: the variable is set to something else.
    """
    value = os.environ.get(VARIABLE, "") or "graph"
    for name in get_args(Backend):
        if value == name:
            found: Backend = name
            return found
    raise EngineError(
        f"{VARIABLE} is {value[:40]!r}, which is no backend.",
        f"Set it to {', '.join(get_args(Backend)[:-1])} or {get_args(Backend)[-1]}, or unset it.",
    )


def is_reference() -> bool:
    """Whether everything shall be computed in F32 with dequantised weights.

    Raises:
        EngineError: see `chosen_backend`.
    """
    return chosen_backend() == "reference"


def repeats_tokens() -> bool:
    """Whether what computes one token is recorded and repeated.

    Raises:
        EngineError: see `chosen_backend`.
    """
    return chosen_backend() in ("graph", "interpreter")


def kernels_for(device: str) -> Kernels:
    """Whose kernels a rank on this device computes with; "" for the reference in torch.

    Args:
        device: a name such as "cuda:0", or a type such as "cuda".
    """
    backend = chosen_backend()
    if backend == "reference" or device in _refused:
        return ""
    if device == "cpu":
        return "gpu" if backend == "interpreter" else "cpu"
    return "gpu" if has_triton() else ""


def uses_kernels(device: str) -> bool:
    """Whether a rank on this device computes with kernels of our own."""
    return bool(kernels_for(device))


def refuse_kernels(device: str, why: str) -> None:
    """Note that kernels do not work on a GPU, for as long as this process lives.

    Args:
        why: the end of a sentence.
    """
    _refused[device] = why


def refused_kernels() -> Mapping[str, str]:
    """Why kernels are not used, by the GPU's name."""
    return _refused


def use_interpreter() -> None:
    """Have Triton interpret the kernels that are imported from now on.

    Raises:
        EngineError: it is not installed.
    """
    if not has_triton():
        raise EngineError(
            f"{VARIABLE}=interpreter needs Triton, which is not installed.",
            "Install triton, or choose another backend.",
        )
    os.environ["TRITON_INTERPRET"] = "1"


@cache
def has_triton() -> bool:
    """Whether the compiler of the GPUs' kernels is installed; it comes with PyTorch for CUDA."""
    return find_spec("triton") is not None
