"""Ranks on the CPU that run one-shot all-reduces, and the results that these must have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from engine.backends.gpu.comm import one_shot as one_shot_module
from engine.backends.gpu.comm.one_shot import OneShot, OneShotGroups
from engine.backends.gpu.launch.configs import KernelTarget
from engine.hardware.devices.links import Routes

CPU = torch.device("cpu")

WAIT_S = 60.0


class Ranks:
    """Threads that stand for ranks on one device.

    Args:
        timeout_s: seconds a kernel waits, in polls of a microsecond each.

    Attributes:
        group: all ranks, as a group.
    """

    def __init__(self, n: int, timeout_s: float = 1.0) -> None:
        self.group = tuple(range(n))
        self._barrier = threading.Barrier(n)
        self.one_shots = OneShotGroups(
            [CPU] * n, Routes(), lambda rank, group: self.meet(), timeout_s
        )
        self.pool = ThreadPoolExecutor(n)

    def meet(self) -> None:
        """Return once all ranks have called this."""
        self._barrier.wait(WAIT_S)

    def one_shot(self, seat: int) -> OneShot:
        """Return one rank's end."""
        one_shot = self.one_shots.one_shot(seat, self.group)
        assert one_shot is not None
        return one_shot

    def all(self, do: Callable[[OneShot], object]) -> list[object]:
        """Call a function for all ranks at the same time; return their results."""
        return list(self.pool.map(lambda seat: do(self.one_shot(seat)), self.group))

    def sums(self, values: Sequence[Tensor | None], shape: Sequence[int]) -> list[Tensor]:
        """All-reduce values; return each rank's sum."""
        found = self.all(lambda one_shot: one_shot.all_reduce(values[one_shot.seat], shape))
        return [y for y in found if isinstance(y, Tensor)]


@contextmanager
def ranks_of(n: int, timeout_s: float = 1.0) -> Iterator[Ranks]:
    """Yield ranks that end with the test."""
    ranks = Ranks(n, timeout_s)
    try:
        yield ranks
    finally:
        ranks.pool.shutdown()


class Unheard:
    """A one-shot all-reduce that sends nothing and starts no kernels."""

    def __init__(self, n_rank: int) -> None:
        self.seat, self.group = 0, tuple(range(n_rank))

    def words(self, own: Tensor) -> Tensor:
        return own.new_empty(len(self.group), own.numel())


class Gone(Exception):
    """Raised for a rank that has written, and does not come to read."""


def write_only(ranks: Ranks, seat: int, do: Callable[[OneShot], object]) -> None:
    """Let a rank write its packets of an exchange, and read none."""

    def leave(rank: int, group: tuple[int, ...]) -> None:
        raise Gone

    one_shot = ranks.one_shot(seat)
    end = one_shot._end
    one_shot._end = replace(end, meet=leave)
    try:
        do(one_shot)
    except Gone:
        return
    finally:
        one_shot._end = end
    raise AssertionError("it must have been about to meet the others")


@contextmanager
def one_kernel() -> Iterator[None]:
    """Let one kernel write and wait, as on a GPU without a clock: no peer can come meanwhile."""
    with mock.patch.object(one_shot_module, "target_of", return_value=KernelTarget("amd", 0, 4)):
        yield


def randn(*shape: int, seed: int = 1) -> Tensor:
    """Return random numbers that are the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def values_of(n: int, shape: Sequence[int], empty: Sequence[int], seed: int) -> list[Tensor | None]:
    """Return a value of each rank, None for those in `empty`."""
    return [None if r in empty else randn(*shape, seed=100 * seed + r) for r in range(n)]


def expected(values: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of the values as they arrive, in the order of seats."""
    total = None
    for x in values:
        if x is not None:
            value = x if x.numel() <= one_shot_module.MAX_IN_F32 else x.bfloat16().float()
            total = value if total is None else total + value
    assert total is not None
    return total


def alike(found: Sequence[Tensor], wanted: Tensor) -> bool:
    """Return whether all results have the expected bits."""
    bits = wanted.contiguous().view(torch.int32)
    return len(found) > 0 and all(torch.equal(y.view(torch.int32), bits) for y in found)
