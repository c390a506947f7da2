"""Copies of tensors between devices, through pinned host memory.

PyTorch would copy directly from one GPU to another where the driver claims that this works, which
is no proof that it does (`engine.runtime.interconnect.proof`); nothing here copies directly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from engine.errors import CommError
from engine.hardware.host_memory import HostTensor

MIN_BYTES = 1 << 20
"""Smallest size of the pinned buffer, in bytes."""


class DeviceCopier:
    """Copier of tensors to the device of one rank, for use by the rank's thread only.

    It has a pinned buffer, since the driver copies pageable memory once more, piece by piece.

    Args:
        device: device of the rank.
        copied: starts to copy the second tensor into the first, one of which is in pinned memory,
            and returns an event that occurs when the copy is complete. Replaced by tests.
    """

    def __init__(
        self,
        device: torch.device,
        copied: Callable[[Tensor, Tensor], torch.cuda.Event] | None = None,
    ) -> None:
        self._device = device
        self._copied = copied or _begin_copy
        self._buffer: HostTensor | None = None
        self._last: torch.cuda.Event | None = None

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
            n_bytes = max(MIN_BYTES, 1 << (value.nbytes - 1).bit_length())
            self._buffer = None  # freed before the next one is allocated
            self._buffer = HostTensor((n_bytes,), torch.uint8, gpu)
        return self._buffer.value[: value.nbytes].view(value.dtype).view(value.shape)


def copy_over(goal: Tensor, source: Tensor) -> None:
    """Copy `source` into `goal`, on any two devices; between GPUs through host memory."""
    is_between = goal.is_cuda and source.is_cuda and goal.device != source.device
    goal.copy_(source.cpu() if is_between else source)


def _begin_copy(goal: Tensor, source: Tensor) -> torch.cuda.Event:
    """Start a copy on the current stream of the GPU that takes part; return its event."""
    gpu = goal.device if goal.is_cuda else source.device
    with torch.cuda.device(gpu):
        goal.copy_(source, non_blocking=True)
        event: torch.cuda.Event = torch.cuda.current_stream(gpu).record_event()
    return event


DeviceName = Callable[[int], str]
"""Function that returns the device name of a rank; "" if it is not known."""


def check_fit(
    values: Mapping[int, Tensor], name: DeviceName, *, all_but_last: bool = False
) -> None:
    """Check that all values have one shape and type.

    Args:
        values: value of each rank, by rank.
        name: returns the device name of a rank.
        all_but_last: whether the last dimension may differ.

    Raises:
        CommError: a value differs from those of most ranks; names its rank.
    """
    stop = -1 if all_but_last else None
    first, *others = values.values()
    if all(x.shape[:stop] == first.shape[:stop] and x.dtype is first.dtype for x in others):
        return
    kinds = {rank: (x.shape[:stop], x.dtype) for rank, x in values.items()}
    given = {rank: f"{tuple(x.shape)} of {x.dtype}" for rank, x in values.items()}
    odd, most, other = _odd_one(kinds, name)
    raise CommError(
        odd, f"has given numbers {given[odd]} where {other} gave {given[most]}", name(odd)
    )


def check_alike(values: Mapping[int, Tensor], name: DeviceName) -> None:
    """Check that all values have the same bits.

    Args:
        values: value of each rank, by rank; 4-byte numbers in the host's memory.
        name: returns the device name of a rank.

    Raises:
        CommError: the bits differ from those of most ranks; names the rank.
    """
    first, *others = values.items()
    bits = first[1].view(torch.int32)
    if all(torch.equal(x.view(torch.int32), bits) for _, x in others):
        return
    check_same({rank: x.numpy().tobytes() for rank, x in values.items()}, name)


def check_same(held: Mapping[int, Hashable], name: DeviceName) -> None:
    """Check that all ranks hold equal values.

    Args:
        held: value of each rank, or its check sum, by rank.
        name: returns the device name of a rank.

    Raises:
        CommError: a rank holds something else than most; names the rank.
    """
    if len(set(held.values())) <= 1:
        return
    odd, _, other = _odd_one(held, name)
    problem = f"has computed other numbers than {other} from the same ones"
    if len(held) == 2:
        problem = f"and {other} have computed different numbers from the same ones"
    raise CommError(odd, problem, name(odd))


def _odd_one(kinds: Mapping[int, Hashable], name: DeviceName) -> tuple[int, int, str]:
    """Return the first rank outside the majority, the majority's first rank, and a text naming it.

    If two ranks differ, nobody can tell which one is wrong; then the second one counts as odd.
    """
    ranks_of: dict[Hashable, list[int]] = defaultdict(list)
    for rank, kind in kinds.items():
        ranks_of[kind].append(rank)
    most = max(ranks_of.values(), key=len)  # of equally large sets the first
    odd = next(rank for rank in kinds if rank not in most)
    return odd, most[0], f"{name(most[0])} (rank {most[0]})".lstrip()
