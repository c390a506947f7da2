"""GPUs that this process cannot use any more, because of a fault in an earlier computation.

CUDA's and HIP's state of a GPU, the *context*, belongs to the process and survives no such fault.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import DeviceStopped

__all__ = ["mark_stopped", "require_running", "stopped_gpus"]

_stopped: dict[str, str] = {}


def mark_stopped(device: str, why: str) -> None:
    """Note that a GPU has stopped working, for the rest of this process.

    Args:
        device: id of the GPU.
        why: what the driver reports, as the end of a sentence; the first report counts.
    """
    _stopped.setdefault(device, why)


def stopped_gpus() -> Mapping[str, str]:
    """Return what the driver reported for each GPU that has stopped working, by id."""
    return _stopped


def require_running(device: str) -> None:
    """Check that a device has not stopped working.

    Raises:
        DeviceStopped: it has.
    """
    if device in _stopped:
        raise DeviceStopped(device, _stopped[device])
