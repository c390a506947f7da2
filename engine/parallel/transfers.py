"""Values between devices, through pinned memory of the host: copies that a GPU makes by itself.

PyTorch would copy straight from one GPU to another where the driver says that it can be done, which
is no proof that it works (`engine.links.proof`); nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.hardware.host_memory import HostTensor

LEAST_BYTES = 1 << 20


class Event(Protocol):
    """Something on a GPU that is over or not."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Mover:
    """Brings values to the device of one rank; used by its thread alone.

    Pageable memory would be copied once more by the driver, piece by piece.

    Args:
        copied: begins to copy the second tensor to the first, one of which is in pinned memory;
            what it gives is over when the copy is. Replaced by tests.
    """

    def __init__(
        self, device: torch.device, copied: Callable[[Tensor, Tensor], Event] | None = None
    ) -> None:
        self._device = device
        self._copied = copied or _begin_copy
        self._buffer: HostTensor | None = None
        self._last: Event | None = None

    def moved(self, value: Tensor) -> Tensor:
        """The value on this rank's device: itself if it is there."""
        kinds = {value.device.type, self._device.type}
        if value.device == self._device or "cuda" not in kinds or not kinds <= {"cpu", "cuda"}:
            return value.to(self._device)
        gpu = value.device if self._device.type == "cpu" else self._device
        return self.through_pinned(value, gpu)

    def through_pinned(self, value: Tensor, gpu: torch.device) -> Tensor:
        """A copy on this rank's device, by way of the buffer."""
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
        """As much of the buffer as the value takes, once nothing is read from there any more."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
        if self._buffer is None or self._buffer.value.nbytes < value.nbytes:
            n_bytes = max(LEAST_BYTES, 1 << (value.nbytes - 1).bit_length())
            self._buffer = None  # before there is another one
            self._buffer = HostTensor((n_bytes,), torch.uint8, gpu)
        return self._buffer.value[: value.nbytes].view(value.dtype).view(value.shape)


def copy_over(goal: Tensor, source: Tensor) -> None:
    """Copy what may lie on any two devices; between GPUs by way of the host."""
    is_between = goal.is_cuda and source.is_cuda and goal.device != source.device
    goal.copy_(source.cpu() if is_between else source)


def _begin_copy(goal: Tensor, source: Tensor) -> Event:
    """On the current stream of the GPU that takes part."""
    gpu = goal.device if goal.is_cuda else source.device
    with torch.cuda.device(gpu):
        goal.copy_(source, non_blocking=True)
        event: Event = torch.cuda.current_stream(gpu).record_event()
    return event
