"""Copies of tensors between devices, through pinned host memory.

PyTorch copies directly between GPUs if the driver claims that this works, but the claim is no proof
(`engine.runtime.interconnect.proof`), so nothing here copies directly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from engine.errors import CommError, Sentence
from engine.hardware.host_memory import HostTensor

MIN_BYTES = 1 << 20
"""Minimum size of the pinned buffer."""


class DeviceCopier:
    """Copier of tensors to one rank's device; used only by that rank's thread.

    It has a pinned buffer, because the driver would copy pageable memory twice, piece by piece.

    Args:
        copied: starts copying the second tensor into the first, one of which is in pinned memory,
            and returns an event that occurs when the copy is complete. Tests replace it.
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
        """Return a value on this rank's device: the tensor itself if it is there, else a copy."""
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
        target = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        self._last = self._copied(target, held)
        return target

    def _room(self, value: Tensor, gpu: torch.device) -> Tensor:
        # reusable once the last copy from it has finished
        if self._last is not None:
            self._last.synchronize()
            self._last = None
        if self._buffer is None or self._buffer.value.nbytes < value.nbytes:
            n_bytes = max(MIN_BYTES, 1 << (value.nbytes - 1).bit_length())
            self._buffer = None  # freed before the next one is allocated
            self._buffer = HostTensor((n_bytes,), torch.uint8, gpu)
        return self._buffer.value[: value.nbytes].view(value.dtype).view(value.shape)


def copy_over(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target`, on any two devices; between GPUs through host memory."""
    is_between = target.is_cuda and source.is_cuda and target.device != source.device
    target.copy_(source.cpu() if is_between else source)


def _begin_copy(target: Tensor, source: Tensor) -> torch.cuda.Event:
    gpu = target.device if target.is_cuda else source.device
    with torch.cuda.device(gpu):
        target.copy_(source, non_blocking=True)
        event: torch.cuda.Event = torch.cuda.current_stream(gpu).record_event()
    return event


DeviceName = Callable[[int], str]
"""Function that returns the name of a rank's device; "" if unknown."""


def check_fit(
    values: Mapping[int, Tensor], name: DeviceName, *, all_but_last: bool = False
) -> None:
    """Check that all values have the same shape and type.

    Args:
        all_but_last: whether the last dimension may differ.

    Raises:
        CommError: a value differs from the majority; the error names its rank.
    """
    stop = -1 if all_but_last else None
    first, *others = values.values()
    if all(x.shape[:stop] == first.shape[:stop] and x.dtype is first.dtype for x in others):
        return
    kinds = {rank: (x.shape[:stop], x.dtype) for rank, x in values.items()}
    given = {rank: f"{tuple(x.shape)} of {x.dtype}" for rank, x in values.items()}
    odd, most, other = _odd_one(kinds, name)
    problem = Sentence(
        "has provided values {shape}, but {other} has provided {other_shape}",
        shape=given[odd], other=other, other_shape=given[most],
    )  # fmt: skip
    raise CommError(odd, problem, name(odd))


def check_alike(values: Mapping[int, Tensor], name: DeviceName) -> None:
    """Check that all values have the same bits.

    Args:
        values: each rank's value; 4-byte numbers in host memory.

    Raises:
        CommError: a rank's bits differ from the majority's; the error names that rank.
    """
    first, *others = values.items()
    bits = first[1].view(torch.int32)
    if all(torch.equal(x.view(torch.int32), bits) for _, x in others):
        return
    check_same({rank: x.numpy().tobytes() for rank, x in values.items()}, name)


def check_same(held: Mapping[int, Hashable], name: DeviceName) -> None:
    """Check that all ranks hold equal values.

    Args:
        held: each rank's value or checksum.

    Raises:
        CommError: a value differs from the majority; the error names its rank.
    """
    if len(set(held.values())) <= 1:
        return
    odd, _, other = _odd_one(held, name)
    problem = Sentence(
        "and {other} have computed different numbers for the same input"
        if len(held) == 2
        else "has computed different numbers from {other} for the same input",
        other=other,
    )
    raise CommError(odd, problem, name(odd))


def _odd_one(kinds: Mapping[int, Hashable], name: DeviceName) -> tuple[int, int, str]:
    # the first rank outside the majority, the majority's first rank, and the latter's name; if
    # there are two ranks, either may be wrong, and the second counts as odd
    ranks_of: dict[Hashable, list[int]] = defaultdict(list)
    for rank, kind in kinds.items():
        ranks_of[kind].append(rank)
    most = max(ranks_of.values(), key=len)  # of equally large sets, the first
    odd = next(rank for rank in kinds if rank not in most)
    return odd, most[0], f"{name(most[0])} (rank {most[0]})".lstrip()
