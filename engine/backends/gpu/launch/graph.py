"""Captures a whole computation, for example of one token, and replays it without host work.

On NVIDIA and AMD GPUs, this is a CUDA graph, or several graphs with host steps between them. For
interpreted kernels, it is a `Tape`, which repeats the operations on the same memory; this also
proves that nothing that differs from token to token was captured.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.backends.reference.dispatch import (
    DispatchMode,
    ReplayedOp,
    is_allocation,
    is_fit,
    is_view,
)
from engine.errors import Sentence
from engine.hardware.garbage import hold_garbage
from engine.hardware.torch_devices import stream_of_rank
from engine.model.forward.recording import Captured

T = TypeVar("T")

Step = Callable[[], object]
"""One part of a replay: a graph, a host step, or an operation on a tape."""


class NotRepeatable(Exception):
    """Raised if a computation cannot be captured; its only argument says why."""

    def __str__(self) -> str:
        reason: str = self.args[0]  # a `Sentence` keeps its template
        return reason


_thread = threading.local()
_capturing = threading.Lock()  # PyTorch captures one graph at a time


def refuse_capture(reason: str) -> None:
    """Declare that the current computation is valid only for this token.

    Raises:
        NotRepeatable: this thread is capturing.
    """
    if getattr(_thread, "is_capturing", False):
        raise NotRepeatable(reason)


def host_step(step: Step) -> None:
    """Run a host step between kernels, for example a barrier of the ranks; replays repeat it.

    It does not wait for the device's earlier work.
    """
    record: Callable[[Step], None] | None = getattr(_thread, "record_step", None)
    if record is None:
        step()
    else:
        record(step)


def host_step_value(step: Callable[[], Tensor | None]) -> Tensor | None:
    """Return a host step's tensor, for example the result of an all-reduce on the host.

    While this thread captures, the tensor is in memory that each replay overwrites. A step must
    either always return a tensor, of the same shape, or always return None.
    """
    if getattr(_thread, "record_step", None) is None:
        return step()
    places: list[Tensor | None] = []

    def again() -> None:
        found = step()
        if not places:
            places.append(None if found is None else found.clone())
        elif places[0] is not None:
            assert found is not None, "a step returns a tensor always or never"
            places[0].copy_(found)

    host_step(again)
    return places[0]


def capture(device: torch.device, compute: Callable[[], T]) -> Captured[T]:
    """Capture what `compute` does on a device.

    `compute` must have run before, so that one-time work is done (compiling kernels, allocating
    memory that stays). Capturing computes nothing, except with host steps and on a tape.

    Raises:
        NotRepeatable: `compute` reads results back, or does something else that is not repeatable.
    """
    if device.type != "cuda":
        return Tape(compute)
    with torch.cuda.device(device), hold_garbage():
        return CudaGraph(CudaGraphRecorder(device), compute)


@contextlib.contextmanager
def _capturing_with(record_step: Callable[[Step], None]) -> Iterator[None]:
    _thread.is_capturing, _thread.record_step = True, record_step
    try:
        yield
    finally:
        _thread.is_capturing, _thread.record_step = False, None


@contextlib.contextmanager
def _not_capturing() -> Iterator[None]:
    """Suspend capturing for a host step, since replays run the step, not its parts."""
    record, _thread.record_step, _thread.is_capturing = _thread.record_step, None, False
    try:
        with intercept_launches(lambda start: True), _disable_current_modes():
            yield
    finally:
        _thread.record_step, _thread.is_capturing = record, True


class CudaGraphRecorder:
    """Recorder for the graphs of one computation, captured one after another on one stream.

    They share a memory pool, since they run in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = stream_of_rank(device)
        pool: Callable[[], Any] = torch.cuda.graph_pool_handle
        self._pool = pool()
        self._before: torch.cuda.Stream | None = None
        self._graph: Any = None

    def open(self) -> None:
        """Make a stream that can be captured torch's current stream."""
        self._before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._before)
        torch.cuda.set_stream(self._stream)

    def begin(self) -> None:
        """Start a graph: launches from now on are captured instead of executed."""
        _capturing.acquire()
        try:
            self._graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may use other GPUs
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._leave_pool()
            _capturing.release()
            raise

    def end(self) -> Step:
        """Finish the graph; return a function that launches it."""
        graph, self._graph = self._graph, None
        try:
            with warnings.catch_warnings():  # there may be no kernel between two host steps
                warnings.filterwarnings("ignore", ".*Graph is empty")
                graph.capture_end()
        except BaseException:
            self._leave_pool()
            raise
        finally:
            _capturing.release()

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay

    def close(self) -> None:
        """Restore the previous current stream, ordered after the captured one."""
        if self._before is None:
            return
        torch.cuda.set_stream(self._before)
        self._before.wait_stream(self._stream)

    def _leave_pool(self) -> None:
        """Leave the allocator's capture mode, in which torch remains after a capture fails.

        In that mode, the allocator frees no cached memory when a device is full.
        """
        binding: Any = torch._C
        with contextlib.suppress(RuntimeError):  # the mode may be off already
            binding._cuda_endAllocateToPool(self._device.index, self._pool)
            binding._cuda_releasePool(self._device.index, self._pool)


class CudaGraph(Captured[T]):
    """A captured computation as one CUDA graph, or as several with host steps between them.

    Each of several is launched as soon as it is captured: the next host step may need its values.
    """

    def __init__(self, parts: CudaGraphRecorder, compute: Callable[[], T]) -> None:
        super().__init__()
        self._parts = parts
        self._is_open = False
        try:
            try:
                parts.open()
                with _capturing_with(self._host_step):
                    self.result = self._captured(compute)
                if not self.is_whole:
                    self._steps[-1]()
            finally:
                parts.close()
        except RuntimeError as error:
            raise NotRepeatable(str(error).partition("\n")[0]) from error

    def _captured(self, compute: Callable[[], T]) -> T:
        self._begin()
        try:
            result = compute()
        except BaseException:
            if self._is_open:
                with contextlib.suppress(RuntimeError):  # the capture has already failed
                    self._end()
            raise
        self._end()
        return result

    def _begin(self) -> None:
        self._parts.begin()
        self._is_open = True

    def _end(self) -> None:
        self._is_open = False
        self._steps.append(self._parts.end())

    def _host_step(self, step: Step) -> None:
        self.is_whole = False
        self._end()
        with _not_capturing():
            self._steps[-1]()
            step()
        self._steps.append(step)
        self._begin()


class Tape(DispatchMode, Captured[T]):
    """A captured computation on the CPU: torch's operations and kernel launches, in order."""

    def __init__(self, compute: Callable[[], T]) -> None:
        DispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        Captured.__init__(self)
        self._kept: list[object] = []
        with _capturing_with(self._host_step), intercept_launches(self._launch), self:
            self.result = compute()

    def _launch(self, launch: KernelLaunch) -> bool:
        self._steps.append(launch.run)
        with _disable_current_modes():
            launch.run()
        return False

    def _host_step(self, step: Step) -> None:
        self.is_whole = False
        self._steps.append(step)
        with _not_capturing():
            step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._kept.append(result)
        if not is_fit(func, args, result):
            raise NotRepeatable(
                Sentence("{operation} depends on its input values", operation=str(func))
            )
        if func._schema.is_mutable:
            self._steps.append(lambda: func(*args, **kwargs))
        elif not is_allocation(func) and not is_view(result, args):
            self._steps.append(ReplayedOp(func, args, kwargs, result))
        return result
