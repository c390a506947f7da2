"""What computes one token, as a whole: captured once, then replayed without the host's work.

On NVIDIA's and AMD's cards that is a graph of the device. Where kernels are interpreted it is a
`Tape`, which repeats what was done on the same memory; so it also shows that nothing which differs
from token to token was built in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from engine.gpu.launch import Start, watched
from engine.ops.again import Again, Watching, is_allocation, is_fit, is_view

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class NotRepeatable(Exception):
    """It cannot be captured; says why."""


_present = threading.local()


def refuse_capture(reason: str) -> None:
    """Note that what comes now is only right for this token.

    Raises:
        NotRepeatable: this thread is capturing.
    """
    if getattr(_present, "is_capturing", False):
        raise NotRepeatable(reason)


def between(step: Callable[[], None]) -> None:
    """Do what is no work of the device, such as meeting other ranks; again at each replay.

    Raises:
        NotRepeatable: this thread is capturing what nothing can come between.
    """
    take: Callable[[Callable[[], None]], None] | None = getattr(_present, "between", None)
    if take is not None:
        take(step)
        return
    refuse_capture("something is done between kernels")
    step()


class Captured(Protocol[T_co]):
    """Something that was computed once and can be computed again.

    Attributes:
        result: what it gave, in memory that each replay writes anew.
    """

    @property
    def result(self) -> T_co: ...

    def replay(self) -> None:
        """Compute it again, in the order of torch's current stream."""
        ...


def capture(device: torch.device, compute: Callable[[], T]) -> Captured[T]:
    """Capture what `compute` does on a device, and do it once.

    It must have been done before: what is made once (compiled kernels, memory that stays) has to
    be there.

    Raises:
        NotRepeatable: it reads results back, or does something else that cannot be repeated.
    """
    _present.is_capturing = True
    try:
        return CudaGraph(device, compute) if device.type == "cuda" else Tape(compute)
    finally:
        _present.is_capturing = False


class CudaGraph(Generic[T]):
    """A graph of the device, of one stream; memory that is allocated meanwhile belongs to it."""

    def __init__(self, device: torch.device, compute: Callable[[], T]) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.device(device),
                torch.cuda.graph(
                    self._graph,
                    stream=_stream(device),  # torch's own one is of the first device
                    capture_error_mode="thread_local",  # other threads may use other GPUs
                ),
            ):
                self._result = compute()
        except RuntimeError as error:
            raise NotRepeatable(str(error).partition("\n")[0]) from error
        self.replay()

    @property
    def result(self) -> T:
        return self._result

    def replay(self) -> None:
        with torch.cuda.device(self._device):
            self._graph.replay()


class Tape(Watching, Generic[T]):
    """The operations of torch and the starts of kernels on the CPU, in their order."""

    def __init__(self, compute: Callable[[], T]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Callable[[], Any]] = []
        self._kept: list[object] = []
        _present.between = self._between
        try:
            with watched(self._watch), self:
                self._result = compute()
        finally:
            _present.between = None

    @property
    def result(self) -> T:
        return self._result

    def replay(self) -> None:
        for step in self._steps:
            step()

    def _watch(self, start: Start) -> bool:
        """Take part in a kernel's start: the interpreter's own use of torch is not to be noted."""
        self._steps.append(start.run)
        with _disable_current_modes():
            start.run()
        return False

    def _between(self, step: Callable[[], None]) -> None:
        self._steps.append(step)
        with _disable_current_modes():
            step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._kept.append(result)
        if not is_fit(func, args, result):
            raise NotRepeatable(f"{func} depends on what it computes with")
        if func._schema.is_mutable:
            self._steps.append(lambda: func(*args, **kwargs))
        elif not is_allocation(func) and not is_view(result, args):
            self._steps.append(Again(func, args, kwargs, result))
        return result


def _stream(device: torch.device) -> torch.cuda.Stream:
    make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
    return make(device)
