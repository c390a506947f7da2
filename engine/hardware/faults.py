"""Distinguishes faults after which a GPU is lost from recoverable errors; releases resources.

A kernel that fails takes its GPU's context with it: "any further CUDA work will return the same
error. To continue using CUDA, the process must be terminated and relaunched" (CUDA Runtime API,
"Error Handling", cudaErrorIllegalAddress and others). The call that reports the fault is often not
its cause.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from engine.errors import CommError, DeviceStopped, EngineError
from engine.hardware.devices.visibility import mark_stopped, stopped_gpus

log = logging.getLogger(__name__)

FAULT_CODES = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    226: "invalid access of peer GPU memory over NVLink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    999: "unknown error",
}
"""The driver's text for each fault, by its number in CUDA and HIP (cudaError_t, hipError_t)."""

VAGUE = "unknown error"
"""A text that also occurs elsewhere; it counts only after a CUDA or HIP prefix."""

MORE_WORDS = ("GPU is lost", "fallen off the bus", "Memory access fault by GPU", "GPU Hang")
"""The drivers' texts for faults without a number."""

WORDS = re.compile(
    "|".join(re.escape(words) for words in (*FAULT_CODES.values(), *MORE_WORDS) if words != VAGUE)
    + rf"|(?<=CUDA error: ){VAGUE}|(?<=HIP error: ){VAGUE}"
    + rf"|(?<=Triton Error \[CUDA\]: ){VAGUE}|(?<=Triton Error \[HIP\]: ){VAGUE}",
    re.IGNORECASE,
)


def fault_of(error: BaseException) -> str:
    """Return the driver's text if an error or one of its causes means a lost GPU; otherwise "".

    Lack of memory is not such a fault.
    """
    for one in _chain(error):
        if isinstance(one, DeviceStopped):
            return one.why
        if not isinstance(one, RuntimeError | EngineError):
            continue
        code = getattr(one, "error_code", None)  # on torch.AcceleratorError and CudaCallError
        if code in FAULT_CODES:
            return FAULT_CODES[code]
        if found := WORDS.search(str(one)):
            return found.group()
    return ""


def stopped_error(error: BaseException, devices: Iterable[torch.device]) -> DeviceStopped | None:
    """Return the error to show if this process has lost a GPU, or None; also mark lost GPUs."""
    if isinstance(error, DeviceStopped):
        return error
    why = fault_of(error)
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    if not gpus or not (why or isinstance(error, CommError)):  # peers may be waiting for a lost GPU
        return None
    lost = {device: found for device in gpus if (found := fault_on(device))}
    if why and not lost:
        lost = {gpus[0]: why}
    for device, found in lost.items():
        log.warning("%s is lost to this process: %s", device, str(error).partition("\n")[0])
        mark_stopped(str(device), found)
    return next((DeviceStopped(str(device), found) for device, found in lost.items()), None)


@contextmanager
def explain_faults(devices: Iterable[torch.device]) -> Iterator[None]:
    """Turn an error after which a GPU is lost into a `DeviceStopped`; see `stopped_error`.

    Raises:
        DeviceStopped: this process has lost a GPU.
    """
    try:
        yield
    except (RuntimeError, EngineError) as error:
        stopped = stopped_error(error, devices)
        if stopped is None or stopped is error:
            raise
        raise stopped from None


def fault_on(device: torch.device) -> str:
    """Return the fault that a GPU reports, or "", without waiting for its work."""
    if known := stopped_gpus().get(str(device)):
        return known
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError as error:
        return fault_of(error)
    return ""


def has_stopped(devices: Iterable[torch.device]) -> bool:
    """Return whether any of the devices is known to have stopped working."""
    return any(str(device) in stopped_gpus() for device in devices)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        yield found
        seen.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def call_all(*steps: Callable[[], object]) -> None:
    """Call functions in order; log errors and continue.

    Use it for closing: if a GPU has stopped working, any call may fail, but the rest must be freed.
    """
    for step in steps:
        try:
            step()
        except Exception:
            log.warning("cleanup failed", exc_info=True)
