"""Copies of tensors between devices, through pinned host memory.

PyTorch would copy directly from one GPU to another where the driver claims that this works, which
is no proof that it does (`engine.runtime.interconnect.proof`); nothing here copies directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.hardware.host_memory import HostTensor

LEAST_BYTES = 1 << 20
"""Smallest size of the pinned buffer, in bytes."""


class Event(Protocol):
    """Event on a CUDA stream, such as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the event has occurred."""
        ...


class DeviceCopier:
    """Copier of tensors to the device of one rank, for use by the rank's thread only.

    It has a pinned buffer, since the driver copies pageable memory once more, piece by piece.

    Args:
        device: device of the rank.
        copied: starts to copy the second tensor into the first, one of which is in pinned memory,
            and returns an event that occurs when the copy is complete. Replaced by tests.
    """

    def __init__(
        self, device: torch.device, copied: Callable[[Tensor, Tensor], Event] | None = None
    ) -> None:
        self._device = device
        self._copied = copied or _begin_copy
        self._buffer: HostTensor | None = None
        self._last: Event | None = None

    def to_device(self, value: Tensor) -> Tensor:
        """Return a value on this rank's device: itself if it is there already, else a copy."""
        kinds = {value.device.type, self._device.type}
        if value.device == self._device or "cuda" not in kinds or not kinds <= {"cpu", "cuda"}:
            return value.to(self._device)
        gpu = value.device if self._device.type == "cpu" else self._device
        return self.through_pinned(value, gpu)

    def through_pinned(self, value: Tensor, gpu: torch.device) -> Tensor:
        """Return a copy on this rank's device, made through the pinned buffer."""
        held = self._room(value, gpu)
        if self._device.type == "cpu" or value.is_cuda:
            self._copied(held, value).synchronize()
        else:
            held.copy_(value)
        if self._device.type == "cpu":
            return held.clone()
        goal = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        self._last = self._copied(goal, held)
        return goal

    def _room(self, value: Tensor, gpu: torch.device) -> Tensor:
        """Return a view of the pinned buffer in the value's shape, after the last copy from it."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
        if self._buffer is None or self._buffer.value.nbytes < value.nbytes:
            n_bytes = max(LEAST_BYTES, 1 << (value.nbytes - 1).bit_length())
            self._buffer = None  # freed before the next one is allocated
            self._buffer = HostTensor((n_bytes,), torch.uint8, gpu)
        return self._buffer.value[: value.nbytes].view(value.dtype).view(value.shape)


def copy_over(goal: Tensor, source: Tensor) -> None:
    """Copy `source` into `goal`, on any two devices; between GPUs through host memory."""
    is_between = goal.is_cuda and source.is_cuda and goal.device != source.device
    goal.copy_(source.cpu() if is_between else source)


def _begin_copy(goal: Tensor, source: Tensor) -> Event:
    """Start a copy on the current stream of the GPU that takes part; return its event."""
    gpu = goal.device if goal.is_cuda else source.device
    with torch.cuda.device(gpu):
        goal.copy_(source, non_blocking=True)
        event: Event = torch.cuda.current_stream(gpu).record_event()
    return event
