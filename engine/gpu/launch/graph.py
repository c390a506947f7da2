"""What computes one token, as a whole: captured once, then replayed without the host's work.

On NVIDIA's and AMD's cards that is a graph of the device, or several where the host has something
to do in between. Where kernels are interpreted it is a `Tape`, which repeats what was done on the
same memory; so it also shows that nothing which differs from token to token was built in.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.hardware.torch_devices import stream_of_rank
from engine.ops.replay import Again, Watching, is_allocation, is_fit, is_view

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Step = Callable[[], object]


class NotRepeatable(Exception):
    """It cannot be captured; says why."""


_present = threading.local()

_capturing = threading.Lock()
"""Held while a graph is captured: PyTorch captures one at a time."""


def refuse_capture(reason: str) -> None:
    """Note that what comes now is only right for this token.

    Raises:
        NotRepeatable: this thread is capturing.
    """
    if getattr(_present, "is_capturing", False):
        raise NotRepeatable(reason)


def host_step(step: Step) -> None:
    """Do what is no work of the device, such as meeting other ranks; again at each replay.

    What the device was given before is not waited for.
    """
    take: Callable[[Step], None] | None = getattr(_present, "between", None)
    if take is None:
        step()
    else:
        take(step)


def host_step_value(step: Callable[[], Tensor | None]) -> Tensor | None:
    """Return the value of a host step, such as a sum that ranks make on the host.

    Where this thread captures, it lies in memory that each replay writes anew. A step gives a
    tensor always, of the same shape, or never.
    """
    if getattr(_present, "between", None) is None:
        return step()
    places: list[Tensor | None] = []

    def again() -> None:
        found = step()
        if not places:
            places.append(None if found is None else found.clone())
        elif places[0] is not None:
            assert found is not None, "a step gives a tensor always or never"
            places[0].copy_(found)

    host_step(again)
    return places[0]


class Captured(Protocol[T_co]):
    """Something that can be computed any number of times.

    Attributes:
        result: what it gave, in memory that each replay writes anew; of use after the first.
        is_whole: nothing is done between kernels, so that any thread may replay it.
    """

    @property
    def result(self) -> T_co: ...

    @property
    def is_whole(self) -> bool: ...

    def replay(self) -> None:
        """Compute it again, in the order of torch's current stream."""
        ...


def capture(device: torch.device, compute: Callable[[], T]) -> Captured[T]:
    """Capture what `compute` does on a device.

    It must have been done before: what is made once (compiled kernels, memory that stays) has to
    be there. A graph is not computed meanwhile, unless it is cut; a tape is.

    Raises:
        NotRepeatable: it reads results back, or does something else that cannot be repeated.
    """
    if device.type != "cuda":
        return Tape(compute)
    with torch.cuda.device(device):
        return CudaGraph(CudaGraphRecorder(device), compute)


@contextlib.contextmanager
def _capturing_with(take: Callable[[Step], None]) -> Iterator[None]:
    """Let `take` have what is done between kernels."""
    _present.is_capturing, _present.between = True, take
    try:
        yield
    finally:
        _present.is_capturing, _present.between = False, None


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Be outside of what is captured: all that a step does is done once more by the step itself."""
    take, _present.between, _present.is_capturing = _present.between, None, False
    try:
        with intercept_launches(lambda start: True), _disable_current_modes():
            yield
    finally:
        _present.between, _present.is_capturing = take, True


class GraphRecorder(Protocol):
    """Makes the graphs that one computation consists of, one after the other."""

    def open(self) -> None:
        """Have torch's current stream be one that can be captured."""
        ...

    def begin(self) -> None:
        """Capture from now on what is started, which does not happen then."""
        ...

    def end(self) -> Step:
        """Capture no longer; returns what starts it all."""
        ...

    def close(self) -> None:
        """Have the current stream from before again, which goes on behind the other."""
        ...


class CudaGraphRecorder:
    """Graphs of a GPU, of one stream and one pool of memory, as they follow on each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = stream_of_rank(device)
        pool: Callable[[], Any] = torch.cuda.graph_pool_handle
        self._pool = pool()
        self._before: torch.cuda.Stream | None = None
        self._graph: Any = None

    def open(self) -> None:
        self._before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._before)
        torch.cuda.set_stream(self._stream)

    def begin(self) -> None:
        _capturing.acquire()
        try:
            self._graph = torch.cuda.CUDAGraph()
            # other threads may use other GPUs meanwhile
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._leave_pool()
            _capturing.release()
            raise

    def end(self) -> Step:
        graph, self._graph = self._graph, None
        try:
            with warnings.catch_warnings():  # there may be nothing between two sums
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
        if self._before is None:
            return
        torch.cuda.set_stream(self._before)
        self._before.wait_stream(self._stream)

    def _leave_pool(self) -> None:
        """Tell torch's allocator that nothing is captured, which a capture that fails leaves out.

        As long as it believes that, it frees no memory that lies idle when a device is full.
        """
        binding: Any = torch._C
        with contextlib.suppress(RuntimeError):  # it failed before, or behind that
            binding._cuda_endAllocateToPool(self._device.index, self._pool)
            binding._cuda_releasePool(self._device.index, self._pool)


class CudaGraph(Generic[T]):
    """A graph of a device; or several, and what the host does between them.

    Of several each is started as soon as it is captured: the host's next step may need its values.
    """

    def __init__(self, parts: GraphRecorder, compute: Callable[[], T]) -> None:
        self._parts = parts
        self._steps: list[Step] = []
        self._is_open = False
        try:
            try:
                parts.open()
                with _capturing_with(self._between):
                    self._result = self._captured(compute)
                if not self.is_whole:
                    self._steps[-1]()
            finally:
                parts.close()
        except RuntimeError as error:
            raise NotRepeatable(str(error).partition("\n")[0]) from error

    @property
    def result(self) -> T:
        return self._result

    @property
    def is_whole(self) -> bool:
        return len(self._steps) == 1

    def replay(self) -> None:
        for step in self._steps:
            step()

    def _captured(self, compute: Callable[[], T]) -> T:
        self._begin()
        try:
            result = compute()
        except BaseException:
            if self._is_open:
                with contextlib.suppress(RuntimeError):  # it has failed already
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

    def _between(self, step: Step) -> None:
        self._end()
        with _outside():
            self._steps[-1]()
            step()
        self._steps.append(step)
        self._begin()


class Tape(Watching, Generic[T]):
    """The operations of torch and the starts of kernels on the CPU, in their order."""

    is_whole = True

    def __init__(self, compute: Callable[[], T]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Step] = []
        self._kept: list[object] = []
        with _capturing_with(self._between), intercept_launches(self._watch), self:
            self._result = compute()

    @property
    def result(self) -> T:
        return self._result

    def replay(self) -> None:
        for step in self._steps:
            step()

    def _watch(self, start: KernelLaunch) -> bool:
        """Take part in a kernel's start: the interpreter's own use of torch is not to be noted."""
        self._steps.append(start.run)
        with _disable_current_modes():
            start.run()
        return False

    def _between(self, step: Step) -> None:
        self.is_whole = False
        self._steps.append(step)
        with _outside():
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
