"""Check of our kernels on the GPUs that a model will use, before it is planned."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.hardware.backend_choice import (
    VARIABLE,
    captures_tokens,
    chosen_backend,
    kernels_for,
    refuse_kernels,
    refused_kernels,
)
from engine.hardware.fallbacks import OF_THIS_PROCESS, Fallbacks
from engine.hardware.gpu_path import triton_package

UNSET = f"Unset the environment variable {VARIABLE}."
"""Sentence on what helps where a person chose the slower way."""


def prove_kernels(names: Iterable[str]) -> Fallbacks:
    """Check that our kernels compute correctly on GPUs; refuse them where they do not.

    Args:
        names: ids of the devices that hold parts of a model.

    Returns:
        The model's list of what makes these GPUs slower. A GPU whose kernels are refused, or that
        has none, computes with the torch reference.
    """
    names = tuple(dict.fromkeys(names))
    gpus = [name for name in names if name != "cpu"]
    with_kernels = {name for name in names if kernels_for(name) == "gpu"}
    found = Fallbacks({*gpus, *with_kernels}, OF_THIS_PROCESS)
    for name in gpus:
        if kernels_for(name):
            from engine.gpu.self_test import problem_of  # needs Triton

            if problem := problem_of(torch.device(name)):
                refuse_kernels(name, problem)
        _report_choice(name, found)
    return found


def _report_choice(name: str, found: Fallbacks) -> None:
    """Report why a GPU computes without our kernels, or starts them one by one."""
    backend = chosen_backend()
    if why := refused_kernels().get(name):
        found.report("kernels", [name], why)
    elif backend == "reference":
        found.report("kernels", [name], f"{VARIABLE} is set to {backend}", UNSET)
    elif not kernels_for(name):
        package = triton_package()
        found.report("kernels", [name], "Triton is not installed", f"Run: pip install {package}")
    elif not captures_tokens():
        found.report("graph", [name], f"{VARIABLE} is set to {backend}", UNSET)
