"""Which kinds of PyTorch suit the GPUs of a machine, as the drivers tell, without torch."""

from __future__ import annotations

from typing import Literal

from engine.hardware.devices.catalog import large_amd_gpus, nvidia_gpus, open_nvml
from engine.hardware.devices.wheels import choose_wheel

__all__ = ["TorchKind", "suitable_torch"]

TorchKind = Literal["cuda13", "cuda12", "rocm", "cpu"]
"""What a build of PyTorch is for: a major version of CUDA, ROCm, or the processor alone."""

OF_CUDA: dict[str, TorchKind] = {"13.0": "cuda13", "13.2": "cuda13", "12.6": "cuda12"}
"""Kinds by version of CUDA. 12.8, of which there is no recent build, is none of them."""


def suitable_torch() -> tuple[TorchKind, ...]:
    """Return the kinds of PyTorch that use as much as possible of this machine, the best first.

    "cpu" is always the last of them. NVIDIA's GPUs come before AMD's, as one build knows either.
    """
    found: list[TorchKind] = []
    with open_nvml() as nvml:
        capabilities = [gpu.compute_capability for gpu in nvidia_gpus(nvml)]
        major = nvml.cuda_major() if nvml else None
    if capabilities:
        wheel = choose_wheel(capabilities, major)
        each = [wheel] if wheel else [choose_wheel([one], major) for one in capabilities]
        found += [OF_CUDA[one.cuda] for one in each if one and one.cuda in OF_CUDA]
    if large_amd_gpus():
        found.append("rocm")
    return (*dict.fromkeys(found), "cpu")
