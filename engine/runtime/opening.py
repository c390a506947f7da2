"""Opens the runtime of a model: in this process, or over the machines that have joined."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine.errors import DeviceStopped, EngineError, KernelError
from engine.hardware.backend_choice import refuse_kernels
from engine.hardware.faults import explain_faults, has_stopped
from engine.runtime.thread_runtime import ThreadRuntime

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.load_params import LoadParams
    from engine.runtime.resplit import UsedSlots
    from engine.util.progress import IsCancelled, ProgressSink

log = logging.getLogger(__name__)


def _without_machines(*_: object) -> ThreadRuntime:
    """Refuse to load a model that several machines are to compute.

    Raises:
        EngineError: always.
    """
    raise EngineError(
        "These settings are for a model on several machines, which have not joined.",
        "Start them with tandem serve --nodes and tandem join.",
    )


_opener_on_machines: Callable[..., ThreadRuntime] = _without_machines


def open_on_machines_by(opener: Callable[..., ThreadRuntime]) -> None:
    """Set what loads models that several machines compute; it is called as `open_runtime`."""
    global _opener_on_machines  # a process is one of several machines, or none
    _opener_on_machines = opener


def open_runtime(
    file: GGUFFile, params: LoadParams, on_progress: ProgressSink, is_cancelled: IsCancelled,
    donor: ThreadRuntime | None = None, used: UsedSlots = (),
) -> ThreadRuntime:  # fmt: skip
    """Return a `ThreadRuntime`; a GPU on which our kernels do not compile uses the reference.

    Raises:
        EngineError: see `ThreadRuntime`; or several machines are to compute, and none have joined.
    """
    if params.machines:
        return _opener_on_machines(file, params, on_progress, is_cancelled, donor, used)
    gpus = [torch.device(name) for name in params.all_devices if name != "cpu"]
    while True:
        try:
            with explain_faults(gpus):
                return ThreadRuntime(file, params, on_progress, is_cancelled, donor, used)
        except DeviceStopped:
            if donor is not None and has_stopped(donor.devices):
                donor.close()
            raise
        except KernelError as error:
            log.warning("%s", error)
            refuse_kernels(error.device, error.why)
