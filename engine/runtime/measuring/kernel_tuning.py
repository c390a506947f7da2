"""Entry point to the search for better GPU kernel configurations; it chooses the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import engine.hardware.environment  # noqa: F401 before torch, which reads it
from engine.errors import EngineError
from engine.hardware.backend_choice import find_gpu_path
from engine.hardware.devices.catalog import list_devices, parse_devices
from engine.hardware.faults import explain_faults
from engine.hardware.torch_devices import torch_device
from engine.util.progress import never

if TYPE_CHECKING:
    from engine.backends.gpu.matmul.config_search import KernelTuning, TuningProgress
    from engine.util.progress import IsCancelled


def tune_kernels(
    path: str | Path,
    devices: Sequence[str] = (),
    on_progress: TuningProgress = lambda n_done, n_total, what: None,
    is_cancelled: IsCancelled = never,
) -> list[KernelTuning]:
    """Search for configurations for all of a model's matmuls on GPUs, and store the best.

    Models loaded later use them.

    Args:
        path: path of the model's file; only its header is read.
        devices: ids of GPUs, such as "cuda:0"; empty for all GPUs on this machine.
        on_progress: called with the search's progress.
        is_cancelled: polled; returning True stops the search.

    Raises:
        EngineError: there is no such GPU, kernels cannot be launched, or the model has no matrices
            for them.
        Cancelled: the search was cancelled; the results of finished searches are kept.
    """
    found = tunable(devices)
    from engine.backends.gpu.matmul.config_search import tune  # needs Triton

    with explain_faults([torch_device(name) for name in found]):
        return tune(path, found, on_progress, is_cancelled)


def tunable(requested: Sequence[str] = ()) -> list[str]:
    """Return the GPUs, among the requested devices or on this machine, with tunable kernels.

    Raises:
        EngineError: there are none, or GPUs compute without kernels on this machine.
    """
    devices = list_devices()
    path = find_gpu_path(devices)
    if not path.has_gpu or path.arithmetic != "kernels":
        raise EngineError("There is no GPU with kernels to tune: {reason}", reason=path.sentence)
    here = [device.id for device in devices if device.kind == "cuda" and device.usable]
    named = parse_devices(",".join(requested)) if requested else here
    found = [device for device in dict.fromkeys(named) if device in here]
    if not found:
        raise EngineError(
            "Only GPUs have kernels to tune.", "Specify {gpu}, or no device.", gpu=here[0]
        )
    return found
