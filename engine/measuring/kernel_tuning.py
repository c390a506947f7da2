"""The search for better configurations of the kernels on GPUs: what it needs, and what it tells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import engine.hardware.environment  # noqa: F401 before torch, which reads it
from engine.devices import list_devices, parse_devices
from engine.errors import EngineError
from engine.hardware.gpu_path import find_gpu_path
from engine.progress import never

if TYPE_CHECKING:
    from engine.gpu.matmul.tuning_report import KernelTuning, TuningProgress
    from engine.progress import IsCancelled


def tune_kernels(
    path: str | Path,
    devices: Sequence[str] = (),
    on_progress: TuningProgress = lambda n_done, n_total, what: None,
    is_cancelled: IsCancelled = never,
) -> list[KernelTuning]:
    """Search for all products of a model on each of some GPUs, and keep what is found.

    It is used by what is loaded from then on.

    Args:
        path: of the model, of which only the header is read.
        devices: such as "cuda:0"; none for all GPUs of this machine.

    Raises:
        EngineError: there is no such GPU, kernels cannot be started, or the model has no matrices
            for them.
        Cancelled: nothing of the search under way is kept, all before it is.
    """
    found = tunable(devices)
    from engine.gpu.matmul.config_search import tune  # Triton is not everywhere

    return tune(path, found, on_progress, is_cancelled)


def tunable(wanted: Sequence[str] = ()) -> list[str]:
    """The GPUs among some devices, or all of this machine, whose kernels can be tuned.

    Raises:
        EngineError: there is none, or they do without kernels.
    """
    devices = list_devices()
    path = find_gpu_path(devices)
    if not path.has_gpu or path.arithmetic != "kernels":
        raise EngineError(f"There is no GPU with kernels to tune: {path.sentence}")
    here = [device.id for device in devices if device.kind == "cuda" and device.usable]
    named = parse_devices(",".join(wanted)) if wanted else here
    found = [device for device in dict.fromkeys(named) if device in here]
    if not found:
        raise EngineError("Only GPUs have kernels to tune.", f"Name {here[0]}, or no device.")
    return found
